"""Tests of `flatshard.memory`."""
