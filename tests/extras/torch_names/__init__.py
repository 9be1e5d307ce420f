"""Tests of `flatshard.extras.torch_names`."""
