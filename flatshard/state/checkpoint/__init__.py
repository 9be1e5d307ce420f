"""Checkpoints: folders that are complete or refused, written and read by all ranks."""
