"""The policy ``"auto"``: which modules become units where users name none.

docs/units.md says what it chooses. A unit is unsharded at once, so units should be small against
the model; each all-gather also has a fixed cost, so they should not be small as such. From the root
downwards every module is either *opened*, which means that its children are asked in its place, or
taken as one unit. What becomes no unit counts for the module around it, in the end for the root.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from torch import nn

from flatshard.plan.module_tree import ModuleTree, find_params, has_forward

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Kind: TypeAlias = type[nn.Module] | Shapes

# Elements in the smallest unit, 1 MB of float32: below about that, an all-gather's fixed part
# (Python, latency, a pipeline that is not full) takes longer than its bytes.
MIN_UNIT_NUMEL = 250_000
# From which on a module is worth dividing, into parts that mostly reach the minimum.
DIVISIBLE_NUMEL = 8 * MIN_UNIT_NUMEL
# In the largest module that joins a small root: 4 MB that stay unsharded in a step.
ROOT_TAKES_NUMEL = 4 * MIN_UNIT_NUMEL
# That small blocks may leave to the root together: 32 MB, unsharded throughout a step.
ROOT_BLOCKS_NUMEL = 32 * MIN_UNIT_NUMEL
# Part of the model that is too large for a unit if it can be divided. While one unit computes the
# next is all-gathered: with units of this size, a quarter of the model is unsharded at the peak.
LARGE_SHARE = 1 / 8
# Part of a module's elements that blocks in it must hold for it to be opened. Less is a block that
# happens to contain similar children: a decoder's two attentions, about half of its elements.
BLOCKS_SHARE = 2 / 3
# They say nothing about what a module does, so that repeating one makes no blocks.
_GENERIC = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class AutoUnits:
    """The units that are chosen, never the root, and the parameters that they leave over."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        params = find_params(tree.root, {id(param) for param in tree.ignored_params})
        self._containers = {one.param: one.containers for one in params}
        self._numel: Counter[nn.Module] = Counter()
        for param, containers in self._containers.items():
            for module in containers:
                self._numel[module] += param.numel()
        self._left = self._numel.copy()
        self._held: dict[nn.Module, int] = {}  # elements of each chosen module
        self._taken: set[nn.Parameter] = set()
        self._too_small: list[nn.Module] = []
        self._opened = {tree.root}
        self._seen: set[nn.Module] = set()
        self._counts = self._count_kinds(tree.root)
        self._visit(tree.root)
        self._take_small_blocks()
        self._fill_root()

    def _visit(self, module: nn.Module) -> None:
        for child in self._children(module):
            if child in self._seen:
                continue
            self._seen.add(child)
            if self._opens(child):
                self._opened.add(child)
                self._visit(child)
            if not has_forward(child):
                continue
            if self._left[child] >= MIN_UNIT_NUMEL:
                self._take(child)
            elif self._left[child] >= MIN_UNIT_NUMEL // 10:
                self._too_small.append(child)

    def _opens(self, module: nn.Module) -> bool:
        if not self._children(module):
            return False
        if not has_forward(module):  # a list, say
            return True
        if self._numel[module] < DIVISIBLE_NUMEL:
            return False
        is_large = self._numel[module] > LARGE_SHARE * self._numel[self._tree.root]
        if self._is_block(module, self._counts):
            # A stage or a tower; other blocks are units with all that is in them.
            return is_large and self._is_made_of_blocks(module)
        return is_large or self._is_made_of_blocks(module)

    def _take(self, module: nn.Module) -> None:
        self._held[module] = self._left[module]
        for param in module.parameters():
            containers = self._containers.get(param, ())
            # A weight that is tied to one outside stays in what contains both.
            if module in containers and param not in self._taken:
                self._taken.add(param)
                for container in containers:
                    self._left[container] -= param.numel()

    def _take_small_blocks(self) -> None:
        """Make units of small blocks if the root would otherwise hold too much of them."""
        # Those of which something is left belong to no unit yet.
        blocks = [m for m in self._too_small if self._left[m] and self._is_closed_block(m)]
        if sum(self._left[module] for module in blocks) > ROOT_BLOCKS_NUMEL:
            for module in blocks:
                self._take(module)

    def _fill_root(self) -> None:
        """Let a small root take in what is cheap to keep unsharded."""
        root = self._tree.root
        if len(self._held) == 1 and self._left[root] < MIN_UNIT_NUMEL:
            self._held.clear()  # else two all-gathers, the first of nearly everything
            return
        outermost = {
            next((module for module in containers if module in self._held), None)
            for containers in self._containers.values()
        }
        # The root stays unsharded in a step, so it takes in no block: holding that would cost more
        # than a small all-gather does. The sort is stable: of equal ones the first in the model.
        singles = [m for m in self._held if m in outermost and not self._is_closed_block(m)]
        for module in sorted(singles, key=self._held.__getitem__):
            missing = 0 < self._left[root] < MIN_UNIT_NUMEL
            if missing and self._held[module] <= ROOT_TAKES_NUMEL:
                self._left[root] += self._held.pop(module)

    def _children(self, module: nn.Module) -> list[nn.Module]:
        return [
            child for name, child in self._tree.open_children(module) if not _is_expert(name, child)
        ]

    def _kinds(self, module: nn.Module) -> Iterator[Kind]:
        """Keys by which a module with children is a block if another module has one too."""
        if self._children(module) and has_forward(module):
            if type(module) not in _GENERIC:
                yield type(module)
            yield _shapes(module)

    def _count_kinds(self, top: nn.Module) -> Counter[Kind]:
        counts: Counter[Kind] = Counter()
        seen: set[nn.Module] = set()

        def visit(parent: nn.Module) -> None:
            for child in self._children(parent):
                if child in seen:
                    continue
                seen.add(child)
                for kind in self._kinds(child):
                    # A module that only wraps another one is not a second one like it.
                    if kind != _shapes(parent):
                        counts[kind] += 1
                visit(child)

        visit(top)
        return counts

    def blocks(self) -> list[nn.Module]:
        """The chosen modules that are blocks and were not opened."""
        return [module for module in self._held if self._is_closed_block(module)]

    def _is_closed_block(self, module: nn.Module) -> bool:
        return module not in self._opened and self._is_block(module, self._counts)

    def _is_block(self, module: nn.Module, counts: Counter[Kind]) -> bool:
        return any(counts[kind] > 1 for kind in self._kinds(module))

    def _is_made_of_blocks(self, module: nn.Module) -> bool:
        counts = self._count_kinds(module)

        def in_blocks(parent: nn.Module) -> int:
            return sum(
                self._numel[child] if self._is_block(child, counts) else in_blocks(child)
                for child in self._children(parent)
            )

        return in_blocks(module) >= BLOCKS_SHARE * self._numel[module]

    def reasons(self) -> dict[nn.Module, str]:
        """The chosen modules, each with the reason in words."""
        closed = [module for module in self._held if module not in self._opened]
        same = Counter(kind for module in closed for kind in self._kinds(module))
        return {module: self._reason(module, same) for module in self._held}

    def _reason(self, module: nn.Module, same: Counter[Kind]) -> str:
        if module in self._opened:
            return "what is left of it, in parts too small for units"
        name = type(module).__name__
        for kind in self._kinds(module):
            if same[kind] > 1:
                what = f"repeated {name}" if kind is type(module) else "modules of the same shapes"
                return f"one of {same[kind]} {what}"
        return f"a large {name}"


def _shapes(module: nn.Module) -> Shapes:
    return tuple(tuple(param.shape) for param in module.parameters())


def _is_expert(name: str, module: nn.Module) -> bool:
    # Which experts run depends on the data: as units, ranks that run other ones would wait for each
    # other. `MixtureOfExperts` runs for every input, an `Expert` for some.
    return "expert" in name.lower() or bool(
        re.search("expert(?!s)", type(module).__name__, re.IGNORECASE)
    )
