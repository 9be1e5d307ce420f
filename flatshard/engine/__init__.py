"""One training step."""
