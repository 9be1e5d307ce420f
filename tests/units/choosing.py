"""``find_units`` for tests that have a module, and do not need the module's ``ModuleTree``."""

from torch import nn

from flatshard.units import policies
from flatshard.units.module_tree import NOTHING, Ignored, ModuleTree
from flatshard.units.policies import ChosenModule, Policy


def find_units(module: nn.Module, policy: Policy, ignored: Ignored = NOTHING) -> list[ChosenModule]:
    policies.as_policy(policy)
    return policies.find_units(ModuleTree(module, ignored), policy)
