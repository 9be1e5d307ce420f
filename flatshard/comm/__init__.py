"""Process groups and collectives: the only package that communicates."""
