"""Flat parameters, and sharded parameters with their full shape and torch's operators."""
