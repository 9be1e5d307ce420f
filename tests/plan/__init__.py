"""Tests of `flatshard.plan`."""
