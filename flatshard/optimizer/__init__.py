"""The step over shards."""
