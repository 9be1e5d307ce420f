"""Tests of `flatshard.tensor`."""
