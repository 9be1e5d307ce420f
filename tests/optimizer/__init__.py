"""Tests of `flatshard.optimizer`."""
