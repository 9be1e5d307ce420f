"""Tests of `flatshard.state`."""
