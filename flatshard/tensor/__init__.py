"""Flat parameters, sharded parameters that have their full shape, and operators for these."""
