"""Tests of `flatshard.extras.join`."""
