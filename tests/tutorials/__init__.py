"""The scripts behind the tutorials, at toy size."""
