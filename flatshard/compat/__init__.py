"""Other libraries' names."""
