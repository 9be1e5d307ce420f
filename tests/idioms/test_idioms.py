"""Each idiom has the numbers of DistributedDataParallel, or raises a documented error.

An idiom runs beside DistributedDataParallel in float64, with one way to wrap by turns; THOROUGH=1
takes all ways. To save time, one call of `run_ranks` takes all idioms of a section, one after
another. If that call fails, each of them runs again by itself, so that the test of the idiom that
fails shows its own traceback.
"""

import functools
import os
import re
import warnings
import zlib
from collections import defaultdict
from typing import NamedTuple
from unittest import mock

import pytest

from flatshard.extras.deadlock import detector
from tests.combinations import THOROUGH
from tests.harness import RankError, allow_warnings, naming, run_ranks
from tests.idioms import IDIOMS
from tests.idioms.side import difference, run
from tests.outcomes import QUICK
from tests.ways import WAYS

TURNS = [
    *("full", "no_shard", "grad_op", "full", "hybrid-op-nodes-of-one", "full-3"),
    *("full", "no_shard", "grad_op", "hybrid-op", "op", "regather"),
]


_DEADLOCK = r"\[FS-DEADLOCK\]"
_EDIT = "its forward edited parameters in place"
_REPLACED = "was replaced or removed after wrapping"
_FAILED = "a backward failed"
_READ = "outside of the unit's forward"

DOCUMENTED = {
    "accumulation_nodes": r"hooks on its autograd node .* would never run",
    "copied_shallowly": r"Instead of copy\.copy\(model\.module\), call copy\.deepcopy\(model\)",
    **dict.fromkeys(("edited_in_forward", "embedding_max_norm", "momentum_encoder"), _EDIT),
    "evaluation_on_one_rank": _DEADLOCK,
    "exported": "full_state_dict.* into an unwrapped model",
    **dict.fromkeys(("functional_call", "functional_call_own"), _REPLACED),
    "grad_of_parameters": r"parameter 'fc1.weight' is sharded: torch\.autograd\.grad",
    "gradients_in_one_tensor": "a view of a tensor that the program still has",
    "layer_drop_by_rank": _DEADLOCK,
    "multi_grad_hook": r"hooks on its autograd node .* would never run",
    "optimizer_sparseadam": "SparseAdam (cannot step sharded|does not support dense)",
    "parameter_subclass": "is a _OnSphere, but sharding keeps only the elements",
    "pickled": r"cannot be pickled.*flatshard\.checkpoint\.save",
    "pruned_afterwards": _REPLACED,
    **dict.fromkeys(("skipped_experts", "state_on_rank_0", "unused_by_rank"), _DEADLOCK),
    "sync_batch_norm": "SyncBatchNorm expected input tensor to be on GPU",
    "traced": r"torch\.jit\.trace and torch\.export cannot read sharded parameters",
}
"""Words of the errors under FULL_SHARD. Under other strategies the numbers may be right."""

ALWAYS = {
    *("functional_call_own", "gradients_in_one_tensor", "optimizer_sparseadam", "pickled"),
    *("copied_shallowly", "pruned_afterwards", "sync_batch_norm"),
}
"""Idioms that raise the error under all other strategies, too."""

NOT_UNDER = {
    "join": ("hybrid-op-nodes-of-one", "hybrid-op", "op", "regather"),
    "two_strategies": ("regather",),
}
"""Idioms and the ways that refuse them with an error that names what to do."""

WARNED = {
    **dict.fromkeys(("as_vector", "fetched_embedding", "iterated_sequential"), _READ),
    **dict.fromkeys(("looked_at", "parent_reads_child", "tied_by_reading"), _READ),
    "exceptions_at_first": _FAILED,
    **dict.fromkeys(("backward_after_failure", "replaced_while_accumulating"), _FAILED),
    "momentum_encoder": "chose no module of Momentum",
    "optimizer_round_trip": "contains only this rank's parts",
    "wrapped_one_by_one": "chose no module of Linear",
}
"""Words of the warnings of idioms. All others train without a warning."""


class Cell(NamedTuple):
    """An idiom and a key of `WAYS`."""

    idiom: str
    way: str

    @property
    def call(self) -> tuple[object, ...]:
        """Cells with equal values run in one call of `run_ranks`."""
        alone = self if self.idiom in DOCUMENTED or os.environ.get("FRESH_RANKS") else None
        return IDIOMS[self.idiom].section, WAYS[self.way].world_size, alone

    def __str__(self) -> str:
        return f"{IDIOMS[self.idiom].section}-{self.idiom}-{self.way}"


def _cells() -> list[Cell]:
    found = []
    for name, idiom in IDIOMS.items():
        by_turns = ["full", "no_shard"] if name in DOCUMENTED else [TURNS[_number(name)]]
        always = idiom.ways.split()
        ways = dict.fromkeys([*TURNS, *always]) if THOROUGH else always or by_turns
        known = [way for way in ways if way not in NOT_UNDER.get(name, ())]
        found += [Cell(name, way) for way in known or ["full"] if not idiom.slow]
    return found


def _number(name: str) -> int:
    return zlib.crc32(name.encode()) % len(TURNS)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> dict[tuple[object, ...], tuple[Cell, ...]]:
    """The cells of this run of pytest, by the call that takes them."""
    found: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            cell = item.callspec.params["cell"]
            found[cell.call].append(cell)
    return {call: tuple(cells) for call, cells in found.items()}


@pytest.mark.parametrize("cell", _cells(), ids=str)
def test_idiom(cell: Cell, together: dict[tuple[object, ...], tuple[Cell, ...]]) -> None:
    cells = together[cell.call]
    if _failure(cells) is None:
        return
    alone = {one: _failure((one,)) for one in cells}
    error = alone[cell]
    if cell == cells[-1] and not any(alone.values()):
        error = _failure(cells)  # only together they fail: something is left behind
    if error is not None:
        raise error


@functools.cache
def _failure(cells: tuple[Cell, ...]) -> RankError | None:
    """The error of a call that takes some cells, one after another."""
    try:
        run_ranks(_prove, WAYS[cells[0].way].world_size, cells, timeout=60 + 2 * len(cells))
    except RankError as error:
        return error
    return None


def _prove(rank: int, world_size: int, cells: tuple[Cell, ...]) -> None:
    for cell in cells:
        with naming(cell):
            _prove_one(cell)


def _prove_one(cell: Cell) -> None:
    name, way = cell
    implementation = f"flatshard {way}"
    coalesces = name not in DOCUMENTED and _number(name) % 2 == 0
    if name in ALWAYS or (way == "full" and name in DOCUMENTED):
        words = rf"(?s){DOCUMENTED[name]}"
        with mock.patch.multiple(detector, **QUICK), pytest.raises(Exception, match=words):
            with allow_warnings():
                run(name, implementation)
        return
    with allow_warnings():
        expected = run(name, "by hand" if IDIOMS[name].by_hand else "ddp")
    with allow_warnings(), warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        warnings.filterwarnings("ignore", f".*{WARNED.get(name, '(?!)')}", UserWarning)
        try:
            found = run(name, implementation, coalesces)
        except Exception as error:
            if way != "no_shard" and name in DOCUMENTED and re.search(DOCUMENTED[name], str(error)):
                return
            raise
    assert not (why := difference(found, expected)), why
