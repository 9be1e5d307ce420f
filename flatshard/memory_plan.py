"""Predicts the memory of a model from its shapes; see ``flatshard.extras.plan``."""

from flatshard.options.extras import extra

extra("plan", "flatshard.memory_plan")

from flatshard.extras.plan import MemoryPlan, UnitMemory, predict  # noqa: E402

__all__ = ["MemoryPlan", "UnitMemory", "predict"]
