"""Turns an unwrapped module into units, and looks after the sharded model."""
