"""Tests of `flatshard.extras.recording`."""
