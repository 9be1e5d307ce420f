"""Extra: the policy ``"auto"``, which chooses the modules that become units.

All parameters of a unit are all-gathered together, so a unit should be a small part of the model.
But each all-gather has a fixed cost, so a unit should not have too few elements. From the root
downwards, the policy either *opens* a module and decides about the children, or makes the module a
unit. If a module does not become a unit, the parameters of the module count as parameters of the
enclosing module. In the end, parameters outside of all units belong to the root.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from torch import nn

from flatshard.units.module_tree import ModuleTree, find_params, has_forward, numel

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Kind: TypeAlias = type[nn.Module] | Shapes

# Minimum number of elements of a model for which the choice of units matters.
LARGE_MODEL_NUMEL = 10_000_000
# Minimum number of elements of a unit. For fewer elements, the fixed cost of an all-gather (Python,
# latency, filling the pipeline) exceeds the time to send the bytes.
MIN_UNIT_NUMEL = 250_000
# Minimum number of elements of a module that is opened. In a module of this size, most children are
# large enough to be units.
DIVISIBLE_NUMEL = 8 * MIN_UNIT_NUMEL
# If the root has too few elements, units of at most this number of elements move into the root. The
# parameters then stay unsharded throughout a step: at most 4 MB of float32 for each unit.
ROOT_TAKES_NUMEL = 4 * MIN_UNIT_NUMEL
# Blocks (repeated modules) that are too small for units stay in the root, if all of them together
# have at most this number of elements. This costs at most 32 MB of float32.
ROOT_BLOCKS_NUMEL = 32 * MIN_UNIT_NUMEL
# A module with a larger share of the model's elements is opened if possible. While one unit
# computes, the next unit is all-gathered: at the peak, at most a quarter of the model is unsharded.
LARGE_SHARE = 1 / 8
# If at least this share of a module's elements is in blocks, the module is opened. A module with a
# smaller share may be a block itself: the two attentions of a decoder layer have about half of the
# layer's elements.
BLOCKS_SHARE = 2 / 3
# Generic containers. Two containers of one class may have different contents, so two containers
# count as repeated blocks only if their parameters have the same shapes.
_GENERIC = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class AutoUnits:
    """Chooses the modules that become units. All other parameters belong to the root."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        params = find_params(tree.module, {id(param) for param in tree.ignored_params})
        self._containers = {one.param: one.containers for one in params}
        self._numel: Counter[nn.Module] = Counter()
        for param, containers in self._containers.items():
            self._numel.update(dict.fromkeys(containers, param.numel()))
        self._left = self._numel.copy()
        # Maps each chosen module to its number of elements. Elements of inner units do not count.
        self._held: dict[nn.Module, int] = {}
        self._taken: set[nn.Parameter] = set()
        self._too_small: list[nn.Module] = []
        self._opened = {tree.module}
        self._seen: set[nn.Module] = set()
        self._counts = self._count_kinds(tree.module)
        self._visit(tree.module)
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
        if not has_forward(module):  # cannot be a unit: a `ModuleList`, for example
            return True
        if self._numel[module] < DIVISIBLE_NUMEL:
            return False
        is_large = self._numel[module] > LARGE_SHARE * self._numel[self._tree.module]
        if self._is_block(module, self._counts):
            # A large block that consists of smaller blocks (a stage or a tower of the model) is
            # opened. Any other block becomes a unit.
            return is_large and self._is_made_of_blocks(module)
        return is_large or self._is_made_of_blocks(module)

    def _take(self, module: nn.Module) -> None:
        self._held[module] = self._left[module]
        for param in module.parameters():
            containers = self._containers.get(param, ())
            # `containers` are the modules that contain all users of the parameter. Skip a tied
            # parameter that is also used outside of `module`: a larger module owns the parameter.
            if module in containers and param not in self._taken:
                self._taken.add(param)
                self._left.subtract(dict.fromkeys(containers, param.numel()))

    def _take_small_blocks(self) -> None:
        """Make units of small blocks, too, if these blocks together are too large for the root."""
        # `_left` counts the elements that are in no unit yet.
        blocks = [m for m in self._too_small if self._left[m] and self.is_closed_block(m)]
        if sum(self._left[module] for module in blocks) > ROOT_BLOCKS_NUMEL:
            for module in blocks:
                self._take(module)

    def _fill_root(self) -> None:
        """If the root has too few elements, move the parameters of small units to the root."""
        root = self._tree.module
        if len(self._held) == 1 and self._left[root] < MIN_UNIT_NUMEL:
            # The only unit has nearly all elements of the model. A tiny root beside the unit would
            # cost a second all-gather.
            self._held.clear()
            return
        held = ((m for m in some if m in self._held) for some in self._containers.values())
        outermost = {next(modules, None) for modules in held}
        # Do not dissolve blocks. The root stays unsharded throughout a step, and the memory of a
        # block in the root costs more than a separate small all-gather. Dissolve the smallest
        # modules first. The sort is stable: modules of equal size stay in the order of the model.
        singles = [m for m in self._held if m in outermost and not self.is_closed_block(m)]
        for module in sorted(singles, key=self._held.__getitem__):
            missing = 0 < self._left[root] < MIN_UNIT_NUMEL
            if missing and self._held[module] <= ROOT_TAKES_NUMEL:
                self._left[root] += self._held.pop(module)

    def _children(self, module: nn.Module) -> list[nn.Module]:
        children = self._tree.open_children(module)
        return [child for name, child in children if not _is_expert(name, child)]

    def _kinds(self, module: nn.Module) -> Iterator[Kind]:
        """Yield the keys by which repeated modules (blocks) are found: class, and parameter shapes.

        Modules that share a key are blocks. A generic container (``nn.Sequential``, for example)
        has no key for its class, and a module without children has no key at all.
        """
        if self._children(module) and has_forward(module):
            if type(module) not in _GENERIC:
                yield type(module)
            yield _shapes(module)

    def _count_kinds(self, top: nn.Module) -> Counter[Kind]:
        counts: Counter[Kind] = Counter()
        seen: set[nn.Module] = set()

        def visit(parent: nn.Module) -> None:
            for child in self._children(parent):
                if child not in seen:
                    seen.add(child)
                    # Do not count a child that has the same shapes as its parent: the parent only
                    # wraps this child, so parent and child are not repeated blocks.
                    counts.update(kind for kind in self._kinds(child) if kind != _shapes(parent))
                    visit(child)

        visit(top)
        return counts

    def is_closed_block(self, module: nn.Module) -> bool:
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
        """Return the chosen modules, each with a text that gives the reason for the choice."""
        closed = [module for module in self._held if module not in self._opened]
        same = Counter(kind for module in closed for kind in self._kinds(module))
        return {module: self._reason(module, same) for module in self._held}

    def _reason(self, module: nn.Module, same: Counter[Kind]) -> str:
        if module in self._opened:
            return "the rest of its elements, in parts that are too small for units"
        name = type(module).__name__
        for kind in self._kinds(module):
            if same[kind] > 1:
                what = f"repeated {name}" if kind is type(module) else "modules of the same shapes"
                return f"one of {same[kind]} {what}"
        return f"a large {name}"


def one_unit_warning(tree: ModuleTree) -> list[str]:
    """Return a list with a warning if a large model with repeated blocks is a single unit."""
    # Do not warn about a module without repeated blocks: the user may wrap a model part by part.
    if (size := numel(tree.params(tree.module))) < LARGE_MODEL_NUMEL:
        return []
    units = AutoUnits(tree)
    if not (blocks := sum(map(units.is_closed_block, units.reasons()))):
        return []
    return [
        f"ShardedWrapper: all {size:,} elements of {type(tree.module).__name__} are one unit, so "
        'every rank holds the full model during a step. auto_wrap_policy="auto" makes a unit of '
        f"each of {blocks} repeated blocks, so that about two blocks at a time are unsharded. "
        "[FS-ONE-UNIT]"
    ]


def _shapes(module: nn.Module) -> Shapes:
    return tuple(tuple(param.shape) for param in module.parameters())


def _is_expert(name: str, module: nn.Module) -> bool:
    # An expert of a mixture of experts must not be a unit. Each rank's data decides which experts
    # run on the rank, and all-gathers of different experts would deadlock. The pattern matches the
    # class name `Expert`, but not `MixtureOfExperts`, a module that always runs.
    is_named_so = re.search("expert(?!s)", type(module).__name__, re.IGNORECASE) is not None
    return is_named_so or "expert" in name.lower()
