"""Extra: predicts the memory of a model from its shapes.

Without this folder, ``flatshard.memory_plan`` cannot be imported.
"""
