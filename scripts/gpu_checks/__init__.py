"""The parts of `gpu_check.py`, and the code that several parts share."""
