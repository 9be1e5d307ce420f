"""Tests of `flatshard.extras.reduction`."""
