"""Tests of `flatshard.options`."""
