"""Sharded training against training of the unwrapped model, over all settings."""
