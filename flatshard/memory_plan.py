"""Predicts the memory of a model from its shapes; see ``flatshard.module.memory_plan``."""

from flatshard.module.memory_plan import MemoryPlan, UnitMemory, predict

__all__ = ["MemoryPlan", "UnitMemory", "predict"]
