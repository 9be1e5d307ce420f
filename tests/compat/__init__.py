"""Tests of `flatshard.compat`."""
