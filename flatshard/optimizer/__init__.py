"""Optimizer steps, gradient clipping and optimizer state of sharded parameters."""
