"""Tests of `flatshard.engine`."""
