"""One class for each way of moving bytes."""
