"""Process groups and collectives. Only this package communicates."""
