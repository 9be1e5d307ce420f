"""Flat parameters, and sharded parameters that keep their true shape and support operators."""
