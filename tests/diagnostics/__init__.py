"""Tests of `flatshard.diagnostics`."""
