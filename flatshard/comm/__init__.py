"""Process groups and collectives. All communication between ranks goes through this package."""
