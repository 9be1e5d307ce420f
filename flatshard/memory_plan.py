"""What a model takes in memory, from its shapes; see ``flatshard.diagnostics.memory_plan``."""

from flatshard.diagnostics.memory_plan import MemoryPlan, UnitMemory, predict

__all__ = ["MemoryPlan", "UnitMemory", "predict"]
