"""Modules import only from layers below their own, or a neighbour that is named here."""

import ast
import re
from pathlib import Path

import pytest

import flatshard

LAYERS = [
    {
        "layout",
        "schedule",
        "config",
        "precision",
        "quantised",
        "offload",
        "disk_memory",
        "home",
        "profiling",
        "capture",
        "watchdog",
        "standstill",
        "program_collectives",
        "non_finite",
        "rank_order",
        "grad_parts",
        "wire",
        "pending",
        "peer_memory",
        "on_host",
        "mapped_shards",
        "ring",
        "buffer_memory",
        "memory_file",
        "spare",
        "registrations",
        "given_copies",
        "tags",
        "peers",
        "state_dict_options",
        "memory_timeline",
    },
    {
        "ignored",
        "process_groups",
        "wrap",
        "auto_policy",
        "module_tree",
        "heap",
        "plan_report",
        "stand_in",
        "step_report",
        "casting",
        "module_hook",
        "nested",
        "grad_dtypes",
        "overrides",
    },
    {
        "flat_param",
        "freed_param",
        "shard_tensor",
        "elementwise",
        "reductions",
        "collectives",
        "communicators",
        "topology",
        "secondary",
        "ownership",
        "coalescing",
        "agreement",
        "starting",
        "optim",
        "optim_runs",
        "fused_step",
        "optim_offload",
        "spent_gradient",
    },
    {
        "reduction",
        "gradients",
        "param_views",
        "grad_publisher",
        "handle",
        "portions",
        "saved_tensors",
        "summon",
        "whole",
        "materialise",
        "recorder",
        "memory_plan",
    },
    {
        "unit",
        "context",
        "prefetch",
        "synced_buffers",
        "grad_norm",
        "left_out",
        "optim_places",
        "scaled_loss",
        "settings",
        "inspection",
        "comm_hook",
        "forward_edits",
        "hook_turns",
        "recording",
        "step_in_backward",
    },
    {"checkpoint", "optim_state", "unit_module"},
    {"construction", "peer_names", "whole_model"},
    {"wrapper"},
    {"__init__"},
]
NEIGHBOURS = {
    "precision": {"quantised"},
    "pending": {"standstill", "watchdog"},
    "standstill": {"program_collectives"},
    "watchdog": {"standstill"},
    "disk_memory": {"memory_file", "offload"},
    "home": {"disk_memory", "layout", "memory_file", "offload", "pending", "spare"},
    "grad_parts": {"layout"},
    "wire": {"grad_parts", "rank_order"},
    "on_host": {
        "grad_parts",
        "peer_memory",
        "pending",
        "rank_order",
        "standstill",
        "watchdog",
    },
    "peer_memory": {"memory_file", "watchdog"},
    "mapped_shards": {"layout", "memory_file", "on_host", "pending"},
    "ring": {"layout", "memory_file"},
    "auto_policy": {"module_tree"},
    "wrap": {"auto_policy", "module_tree"},
    "overrides": {"casting", "module_tree", "stand_in"},
    "plan_report": {"auto_policy", "module_tree"},
    "step_report": {"plan_report"},
    "freed_param": {"shard_tensor"},
    "shard_tensor": {"collectives"},
    "elementwise": {"shard_tensor"},
    "reductions": {"collectives", "shard_tensor"},
    "communicators": {"collectives"},
    "topology": {"collectives", "communicators"},
    "secondary": {"collectives"},
    "ownership": {"shard_tensor"},
    "coalescing": {"ownership"},
    "agreement": {"collectives"},
    "starting": {"collectives", "flat_param", "topology"},
    "optim": {
        "flat_param",
        "fused_step",
        "optim_offload",
        "optim_runs",
        "shard_tensor",
        "spent_gradient",
    },
    "optim_offload": {"flat_param", "optim_runs", "shard_tensor", "spent_gradient"},
    "optim_runs": {"flat_param", "shard_tensor"},
    "gradients": {"reduction"},
    "grad_publisher": {"gradients", "param_views"},
    "handle": {"grad_publisher", "gradients", "param_views"},
    "materialise": {"handle"},
    "portions": {"handle"},
    "saved_tensors": {"handle"},
    "summon": {"handle", "whole"},
    "whole": {"handle"},
    "context": {"hook_turns", "left_out", "prefetch", "step_in_backward", "synced_buffers", "unit"},
    "prefetch": {"unit"},
    "unit": {"forward_edits"},
    "step_in_backward": {"scaled_loss", "unit"},
    "comm_hook": {"unit"},
    "left_out": {"unit"},
    "optim_places": {"unit"},
    "hook_turns": {"unit"},
    "recording": {"context"},
}
FOLDER = Path(flatshard.__file__).parent
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}


def _imports(path: Path) -> set[str]:
    """The package's own modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "flatshard":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatshard."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("flatshard.")}
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_down(path: Path) -> None:
    module = path.stem
    assert module in LEVEL, f"{module} has no layer"
    allowed = NEIGHBOURS.get(module, set())
    wrong = {
        other
        for other in _imports(path)
        if other not in allowed and LEVEL.get(other, -1) >= LEVEL[module]
    }
    assert not wrong, f"{module} imports {sorted(wrong)}"


def test_the_map_has_every_module_in_its_layer() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    _, *sections = text.partition("## The modules")[2].split("\n### ")
    found = [set(re.findall(r"^- \**`(\w+)`", section, re.MULTILINE)) for section in sections]
    *below, surface = found
    assert below == LAYERS[: len(below)]
    assert surface == set().union(*LAYERS[len(below) :]) - {"__init__"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_only_torch(path: Path) -> None:
    """The core depends on torch and the standard library alone."""
    import sys

    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        for name in names:
            top = name.split(".")[0]
            assert top in {"torch", "flatshard"} or top in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_only_one_file_communicates(path: Path) -> None:
    """All communication passes ``collectives``, so that it can be recorded and replaced."""
    if path.stem == "collectives":
        return
    calls = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "isend", "barrier")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id == "dist" and node.attr.startswith(calls)), ast.dump(node)
