"""Shards an unwrapped module; checks, converts and copies the sharded model."""
