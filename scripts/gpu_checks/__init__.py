"""The parts of `gpu_check.py`, and what they have in common."""
