"""Tests of `flatshard.units`."""
