"""Tests of `flatshard.extras.step_in_backward`."""
