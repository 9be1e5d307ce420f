"""Tests of `flatshard.extras.out_of_forward`."""
