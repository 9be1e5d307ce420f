"""Tests of `flatshard.extras.average_over`."""
