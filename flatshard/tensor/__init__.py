"""Sharded parameters that keep their true shape, and the operators on these parameters."""
