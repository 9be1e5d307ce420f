"""What each strategy sends and holds, on four ranks that make two nodes, against the theory.

The expectations are written out here, in units of Psi (the bytes of all parameters) and of the root
unit's part of it; the script's own formulas, for any number of ranks, must agree with them.
"""

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatshard.options import transport_options
from tests.harness import run_ranks

pytest.importorskip("rich")
pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "strategies.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


script = _load()
script.MICRO_BATCHES = NUM_MICRO_BATCHES = 2
ARGUMENTS = "--world-size 4 --ranks-per-node 2 --width 96 --depth 4".split()


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    # The theory has a unit for each block, which are so small that they would be coalesced.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_options, "COALESCE_BYTES", 0)
        of_ranks = run_ranks(_measure, 4, timeout=200)
    # The median of the ranks: a thread of one rank may hold a tensor for longer than the script
    # waits, while a tensor that flatshard fails to free stays on every rank.
    for index, one in enumerate(of_ranks[0]["strategies"]):
        readings = [ranks["strategies"][index]["between"]["all_tensors"] for ranks in of_ranks]
        one["between"]["all_tensors"] = statistics.median_low(readings)
    return of_ranks[0]


def _measure(rank: int, world_size: int) -> dict[str, Any]:
    return script.measure(script.parse_args(ARGUMENTS))


def _strategy(figures: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in figures["strategies"] if one["name"] == name)


# ---------------------------------------------------------------- what is sent

Coefficients = tuple[int, float, float]

# Five units. Number of collectives, and their volume: so many Psi, so many times the root's part.
# An all-reduce of x bytes moves 2 x.
ONE_STEP: dict[str, dict[tuple[str, str], Coefficients]] = {
    "NO_SHARD": {("all", "all_reduce"): (5, 2, 0)},
    "SHARD_OP": {("all", "gather"): (5, 1, 0), ("all", "reduce"): (5, 1, 0)},
    "SHARD_GRAD_OP": {("all", "gather"): (5, 1, 0), ("all", "reduce"): (5, 1, 0)},
    "FULL_SHARD": {("all", "gather"): (9, 2, -1), ("all", "reduce"): (5, 1, 0)},
    "FULL_SHARD, k=2": {
        ("all", "gather"): (5, 1, 0),
        ("node", "gather"): (4, 1, -1),
        ("all", "reduce"): (5, 1, 0),
    },
    "HYBRID_SHARD": {
        ("node", "gather"): (9, 2, -1),
        ("node", "reduce"): (5, 1, 0),
        ("across", "all_reduce"): (5, 1, 0),
    },
    "HYBRID_SHARD_ZERO2": {
        ("node", "gather"): (5, 1, 0),
        ("node", "reduce"): (5, 1, 0),
        ("across", "all_reduce"): (5, 1, 0),
    },
    "HYBRID_SHARD_OP": {
        ("node", "gather"): (9, 2, -1),
        ("node", "reduce"): (5, 1, 0),
        ("across", "gather"): (5, 0.5, 0),
        ("across", "reduce"): (5, 0.5, 0),
    },
}

# Which collectives of a step with several micro-batches are not several times as many.
ONCE = {"SHARD_OP": [("all", "gather")], "HYBRID_SHARD_OP": [("across", "gather")]}


def _times(name: str, key: tuple[str, str], mode: str) -> int:
    """How often several micro-batches make the collectives of ``ONE_STEP``."""
    group, kind = key
    if key in ONCE.get(name, []):
        return 1
    is_in_each = kind == "gather" or mode == "each" or (mode == "replicas" and group == "node")
    return NUM_MICRO_BATCHES if is_in_each else 1


@pytest.mark.parametrize("name", ONE_STEP)
def test_traffic(figures: dict[str, Any], name: str) -> None:
    psi, root = figures["sizes"]["psi"], figures["sizes"]["root"]
    one = _strategy(figures, name)
    assert one["padding_bytes"] == 0  # so that all numbers are exact
    for step in one["steps"]:
        actual = {
            (row["group"], row["kind"]): (row["count"], row["volume"]) for row in step["traffic"]
        }
        expected = {}
        for key, (count, of_psi, of_root) in ONE_STEP[name].items():
            times = _times(name, key, step["mode"]) if step["micro_batches"] > 1 else 1
            expected[key] = (times * count, times * (of_psi * psi + of_root * root))
        assert actual == expected, (step["micro_batches"], step["mode"])
    modes = [(step["micro_batches"], step["mode"]) for step in one["steps"]]
    several = ["each", "last", *(["replicas"] if name.startswith("HYBRID") else [])]
    assert modes == [(1, "each"), *((NUM_MICRO_BATCHES, mode) for mode in several)]


def test_control_messages(figures: dict[str, Any]) -> None:
    """One a backward that reduces: ten bytes, four per unit, and one per parameter."""
    num_bytes = 10 + 4 * 5 + (5 + 4 * 11)
    for one in figures["strategies"]:
        for step in one["steps"]:
            messages = 1 if step["mode"] == "last" else step["micro_batches"]
            assert step["control_messages"] == messages
            assert step["control_bytes"] == messages * num_bytes


# ---------------------------------------------------------------- what is held

# Parameters, gradients, optimizer state (AdamW's two), gathered, secondary.
BETWEEN = {
    "NO_SHARD": (1, 1, 2, 0, 0),
    "SHARD_OP": (1 / 4, 1 / 4, 1 / 2, 1, 0),
    "SHARD_GRAD_OP": (1 / 4, 1 / 4, 1 / 2, 0, 0),
    "FULL_SHARD": (1 / 4, 1 / 4, 1 / 2, 0, 0),
    "FULL_SHARD, k=2": (1 / 4, 1 / 4, 1 / 2, 0, 0),
    "HYBRID_SHARD": (1 / 2, 1 / 2, 1, 0, 0),
    "HYBRID_SHARD_ZERO2": (1 / 2, 1 / 2, 1, 0, 0),
    "HYBRID_SHARD_OP": (1 / 4, 1 / 4, 1 / 2, 0, 1 / 2),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_steps(figures: dict[str, Any], name: str) -> None:
    psi = figures["sizes"]["psi"]
    held = dict(_strategy(figures, name)["between"])
    # Whoever holds them: nothing is left of the unwrapped parameters, say.
    assert held.pop("all_tensors") == pytest.approx(sum(BETWEEN[name]) * psi, rel=0.01)
    # AdamW also counts its steps, 4 bytes a parameter.
    assert list(held.values()) == pytest.approx([x * psi for x in BETWEEN[name]], rel=0.01)


@pytest.mark.parametrize("name", BETWEEN)
def test_peaks(figures: dict[str, Any], name: str) -> None:
    psi, root, block = (figures["sizes"][key] for key in ("psi", "root", "block"))
    peaks = _strategy(figures, name)["peaks"]
    frees = name.startswith("FULL") or name in ("HYBRID_SHARD", "HYBRID_SHARD_OP")
    gathered = 0 if name == "NO_SHARD" else root + 3 * block if frees else psi
    assert peaks["gathered"] == gathered
    secondary = {"FULL_SHARD, k=2": (psi - root) / 2, "HYBRID_SHARD_OP": psi / 2}
    assert peaks["secondary"] == secondary.get(name, 0)
    if name == "NO_SHARD":
        assert peaks["gradients"] == psi
        return
    first = 1 / 2 if name.startswith("HYBRID") else 1 / 4
    rest = 1 / 2 if name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") else 1 / 4
    bound = root + (4 + 2 * first) * block + 2 * rest * block
    # A reduction that a loaded machine holds up for a second lets the next one begin.
    assert root + block < peaks["gradients"] <= bound + 2 * block


# Reduced each time, no_sync(), no_sync(max_bytes), no_sync(replicas_only).
# The root and one block of four fit into half of Psi.
ACCUMULATED: dict[str, tuple[float, float, float, float]] = {
    "NO_SHARD": (1, 1, 1, 1),
    "SHARD_OP": (1 / 4, 1, 1 / 4, 1 / 4),
    "SHARD_GRAD_OP": (1 / 4, 1, 1 / 4, 1 / 4),
    "FULL_SHARD": (1 / 4, 1, 1 / 4, 1 / 4),
    "FULL_SHARD, k=2": (1 / 4, 1, 1 / 4, 1 / 4),
    "HYBRID_SHARD": (1 / 2, 1, 1 / 2, 1),
    "HYBRID_SHARD_ZERO2": (1 / 2, 1, 1 / 2, 1),
    "HYBRID_SHARD_OP": (1 / 4, 1, 1 / 4, 3 / 4),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulated(figures: dict[str, Any], name: str) -> None:
    psi, root, block = (figures["sizes"][key] for key in ("psi", "root", "block"))
    held = _strategy(figures, name)["accumulated"]
    each, whole, of_the_rest, replicas = ACCUMULATED[name]
    expected = {
        "each": each * psi,
        "last": whole * psi,
        "replicas": replicas * psi,
        "max_bytes": root + block + of_the_rest * 3 * block,
    }
    assert root + block <= psi // 2 < root + 2 * block
    assert held == pytest.approx(expected, rel=0.01)


# ---------------------------------------------------------------- the script itself


def test_formulas(figures: dict[str, Any]) -> None:
    for one in figures["strategies"]:
        for row in (row for step in one["steps"] for row in step["traffic"]):
            assert row["count"] == row["count_expected"]
            assert row["volume"] == pytest.approx(row["volume_expected"], rel=0.01)
        for kind in ("between", "accumulated"):
            expected = one[f"{kind}_expected"]
            measured = {key: one[kind][key] for key in expected}
            assert measured == pytest.approx(expected, rel=0.01)
        for kind in ("gathered", "secondary"):
            assert one["peaks"][kind] == pytest.approx(one["peaks_expected"][kind], rel=0.01)


def test_tables(figures: dict[str, Any]) -> None:
    assert [make(figures).row_count for make in script.TABLES] == [27, 8, 8, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world-size 4 --ranks-per-node 3", "must divide --world-size"),
        ("--world-size 4 --ranks-per-node 4", "at least 2 nodes"),
        ("--width 64", "at least 96"),
    ],
)
def test_bad_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(arguments.split())
    assert message in capsys.readouterr().err
