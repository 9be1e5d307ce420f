"""Tests of `flatshard.extras.uneven`."""
