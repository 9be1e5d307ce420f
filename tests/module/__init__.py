"""Tests of `flatshard.module`."""
