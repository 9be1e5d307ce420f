"""Tests of `flatshard.extras.summon`."""
