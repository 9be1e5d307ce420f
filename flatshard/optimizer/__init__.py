"""Optimizer steps, gradient clipping and optimizer state for sharded parameters."""
