"""``EXTRAS``: the table of extras. An extra is an optional feature in a folder of its own.

A user may delete the folder, so other code does not import extras directly. When a model is wrapped
or an option is given, ``extra`` or ``default_extra`` imports the extra. Steps import nothing.
"""

from importlib import import_module
from typing import Any

FOLDER = "flatshard.extras"
# Folder and purpose of each extra. Extras that act at the same moment of a step act in this order.
EXTRAS = {
    "join": "lets ranks without input left follow the other ranks",
    "average_over": "averages gradients over counts (of tokens) instead of ranks",
    "boundary": "keeps rows, blocks or whole parameters on one rank",
    "divergence": "lets ranks skip units, or run them in another order",
    "step_in_backward": "steps each unit as soon as its gradients are reduced",
    "disk": "keeps shards, gradients and optimizer state in files",
    "secondary_shards": "all-gathers within a node, from larger parts than the shards",
    "deadlock": "finds ranks that wait for one another forever",
    "out_of_forward": "unshards parameters that are used outside of their unit's forward",
    "auto_wrap": "chooses the modules that become units",
    "tensor_parallel": "trains parameters that are DTensors",
    "shared_memory": "lets ranks on one host read one another's memory",
    "advice": "warns of settings without effect when a model is wrapped",
    "overrides": "gives modules and parameters another dtype by name",
    "conversion": "converts and copies sharded models",
    "summon": "lets modules hold full parameters for a while",
    "meta_init": "initialises models that are built on the meta device",
    "torch_names": "reads the names of DistributedDataParallel, FSDP1 and FSDP2",
    "plan": "predicts the memory and time of training",
    "trial_run": "runs a script under DDP and under flatshard, and compares",
    "unit_report": "tabulates units",
    "weights": "iterates over full tensors, and computes norms",
    "device_checks": "on accelerators, finds lost writes, and ranks that evaluate different units",
    "reduction": "reduces by a communication hook, and all-gathers in float8",
    "recording": "records steps",
    "compared_steps": "finds ranks that step an optimizer with different options",
    "whole_tensors": "steps optimizers that need whole parameters",
}


class MissingExtraError(ImportError):
    """An option needs a folder of ``flatshard.extras`` that is not installed."""


def extra(name: str, asked_for: str) -> Any:
    """Import and return the package of the extra ``name``, or raise MissingExtraError."""
    found = default_extra(name)
    if found is None:
        raise MissingExtraError(
            f"{asked_for} needs the extra {name!r}, which {EXTRAS[name]}. Expected the package "
            f"{FOLDER}.{name}, but it is not installed. Install flatshard with all of its folders."
        )
    return found


def default_extra(name: str) -> Any | None:
    """Import the extra ``name`` and return its package, or None if the folder is not installed."""
    assert name in EXTRAS, f"{name} is no extra"
    package = f"{FOLDER}.{name}"
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        # Raise if the folder exists, but a module that it imports is missing.
        if error.name not in (package, FOLDER):
            raise
        return None
