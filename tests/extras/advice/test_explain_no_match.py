"""A policy that chooses no module: the warning names the classes that it could choose."""

import functools

from torch import nn

from flatshard.extras.advice import explain_no_match
from flatshard.units.module_tree import ModuleTree
from flatshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy


class Block(nn.Sequential):
    def __init__(self, width: int = 4, hidden: int = 8) -> None:
        super().__init__(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def test_explain_no_match() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=9999)
    root = nn.Sequential(nn.ModuleList([Block(), Block(4, 9)]), nn.LayerNorm(4), nn.ReLU())
    assert explain_no_match(ModuleTree(root), policy) == (
        "auto_wrap_policy: size_based_auto_wrap_policy(min_num_params=9999) chose no module of "
        "Sequential, so all 169 elements of the model are one unit and are unsharded together. "
        "A policy could choose these classes, largest first: Linear (161 elements), "
        "Block (161 elements), LayerNorm (8 elements)."
    )
    one_layer = ModuleTree(nn.Linear(2, 2))
    assert "first: none." in explain_no_match(one_layer, ModuleWrapPolicy({Block}))
