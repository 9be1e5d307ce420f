"""Tests of `flatshard.extras.divergence`."""
