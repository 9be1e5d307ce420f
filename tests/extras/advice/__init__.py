"""Tests of `flatshard.extras.advice`."""
