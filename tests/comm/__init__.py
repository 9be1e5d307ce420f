"""Tests of `flatshard.comm`."""
