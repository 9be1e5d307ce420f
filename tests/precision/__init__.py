"""Tests of `flatshard.precision`."""
