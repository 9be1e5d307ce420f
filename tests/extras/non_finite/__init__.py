"""Tests of `flatshard.extras.non_finite`."""
