"""Extra: makes a table of a model's units.

Without this folder, ``ShardedWrapper.unit_report()`` raises ``MissingExtraError``.
"""

from collections.abc import Sequence

from flatshard.comm.communicator import Topology
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.extras import show_bytes, tabulate
from flatshard.module.wrappers import unit_modules, units_in
from flatshard.units.module_proxy import ModuleProxy

__all__ = ["report"]

_HEADER = (
    *("unit", "class", "elements", "padding", "flat parameters", "unsharded"),
    *("strategy", "ranks", "transport", "why"),
)


def report(root: ModuleProxy) -> str:
    """Return a table of the units in a wrapper, with totals.

    Lines below the table say why units do not use a faster transport.
    """
    units = units_in(root)
    rest = "what is left" if len(unit_modules(root)) > 1 else "the whole model"
    count = f"{len(units)} unit{'s' if len(units) != 1 else ''}"
    sizes = _sizes("", [handle for unit in units for handle in unit.handles])
    table = [_HEADER, *(_row(unit, rest) for unit in units)]
    table.append(("total", count, *sizes, "", "", "", ""))
    lines = [tabulate(table, numbers={2, 3, 5, 7})]
    for topology in (unit.settings.topology for unit in units):
        # A group has no reason if only one transport was possible, for example because the user
        # chose the transport.
        groups = topology.intra_group, topology.inter_group
        reasons = dict.fromkeys(group.transport_reason for group in groups)
        if reason := "; ".join(filter(None, reasons)):
            lines.append(f"{_transports(topology)}: {reason}")
    return "\n".join(dict.fromkeys(lines))


def _transports(topology: Topology) -> str:
    """Return the names of the transports for a unit's parameters and gradients."""
    groups = topology.intra_group, topology.inter_group
    names = [group.transport_for().name for group in groups if group.size > 1]
    if topology.replicate.size > 1:
        names.append(topology.replicate.native.name)  # the transport for all-reduces
    return " + ".join(dict.fromkeys(names)) or "nothing"


def _row(unit: Unit, rest: str) -> tuple[str, ...]:
    topology = unit.settings.topology
    kinds = [
        str(handle.flat_param.dtype).removeprefix("torch.")
        + ("" if handle.sharded[0].requires_grad else " frozen")
        + (f" {handle.layout.numel:,}" if len(unit.handles) > 1 else "")
        for handle in unit.handles
    ]
    reason = unit.reasons[0] or ("by hand" if unit.name else f"root: {rest}")
    return (
        unit.name or "(root)",
        ", ".join(dict.fromkeys(type(module).__name__ for module in unit.modules)),
        *_sizes(" + ".join(kinds) or "none", unit.handles),
        unit.settings.strategy.name,
        str(topology.shard.size),
        _transports(topology),
        reason + (f", {len(unit.modules)} coalesced" if len(unit.modules) > 1 else ""),
    )


def _sizes(kinds: str, handles: Sequence[FlatParamHandle]) -> tuple[str, str, str, str]:
    numel = sum(handle.layout.numel for handle in handles)
    padding = sum(handle.layout.padding_numel for handle in handles)
    divided = (one for one in handles if one.topology.shard.size > 1)
    unsharded_bytes = sum(one.layout.padded_numel * one.buffer.element_size() for one in divided)
    padded = f"{padding:,} ({padding / max(numel, 1):.1%})"
    return f"{numel:,}", padded, kinds, show_bytes(unsharded_bytes)
