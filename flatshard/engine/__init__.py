"""Runs a training step: unshards units, computes, reduces gradients, and reshards units."""
