"""The exchange between all ranks at the end of a backward.

A parameter may be used on one rank and unused on another. So at the end of a backward, all ranks
take part in one all-reduce (MAX) of bytes. The bytes tell which parameters each rank used, and
which reductions each rank has not started. The bytes also show whether all ranks run the same
program, and all-gathered the same units in the same order. If the orders differ, a transport that
matches all-gathers only by order (NCCL) has delivered parameters of other units.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress, count, islice
from zlib import crc32

from flatshard.comm.consistency import Facts, differing_fact
from flatshard.comm.host_exchange import differ, with_complements
from flatshard.comm.work import REMEDY, Begun, first_difference
from flatshard.engine.buffer_sync import BufferSync
from flatshard.engine.events import Kind, StepExtension
from flatshard.engine.gradients import GradSync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.units.module_tree import unit_text

_SYNCS = list(GradSync)


@dataclass
class Agreement:
    """The result of the exchange at the end of a backward.

    All ranks have the same result, except for units (experts) that train only on some ranks.
    """

    # For each flat parameter, a list of flags: whether any rank used each original parameter.
    used: dict[FlatParamHandle, list[bool]]
    # Flat parameters for which some rank has gradients that need an additional reduction: gradients
    # that were computed after the reduction, or accumulated before the user froze the parameters.
    left_over: list[FlatParamHandle]
    # Indices of the flat parameters whose reduction some ranks, but not all ranks, have started
    # before the end of backward.
    uneven: list[int]
    # Units in which the user, on at least one rank, has edited accumulated gradients, or edited
    # parameters during forward.
    edited: list[Unit]


def exchange_end_of_backward(state: RunState, rest: Set[int]) -> Agreement:
    """Exchange with all ranks what each rank has done in this backward. Collective.

    All ranks call this after each backward that reduces gradients. Each rank sends bytes, called
    votes, and receives the maximum over the ranks of each byte.

    Args:
        state: the state of the model's steps.
        rest: indices of the flat parameters whose reduction this rank has not started. These
            reductions follow the exchange, so their gradients do not count as left over.

    Raises:
        RuntimeError: the ranks do not run the same program, all-gathered units in different
            orders, or have frozen different parameters of a unit. All ranks raise.
    """
    handles = state.handles
    # Other parts of the engine add votes to the message: `BufferSync` and the extensions. The order
    # of these parts is the same on all ranks.
    voters: list[BufferSync | StepExtension] = [*filter(None, [state.buffers]), *state.extensions]
    # Collect votes before the exchange below, because `votes()` may itself run a collective.
    voter_votes = [one.votes() for one in voters]
    # Units in which this rank's program edited accumulated gradients, or parameters in forward. Do
    # not raise here: the other ranks would wait for this rank's reductions. Send a vote instead, so
    # that all ranks raise after the exchange.
    edited_here = {h.unit for h in handles if h.grads.was_edited or h in state.edits.found}
    # Some units (experts, for example) train only on the ranks of a smaller group. Other ranks have
    # a different unit at the same index, so for such units the maxima over all ranks are useless.
    # Therefore the ranks of the smaller group exchange their flags separately.
    used_within = {h: _used_within(h) for h in handles if h.topology.world.size < state.world.size}
    votes: list[Sequence[int]] = [
        [not all(is_alike for _, is_alike in used_within.values())],
        _program(state),
        _order(state),
        # For each flat parameter, whether the reduction was not started yet. If this differs
        # between ranks, the flat parameter is uneven.
        with_complements(number in rest for number in range(len(handles))),
        [unit in edited_here for unit in state.units],
        [
            not (number in rest and h.reduces) and h.grads.waits_for(h.unit.sync)
            for number, h in enumerate(handles)
        ],
        [i in h.grads.used_by_rank for h in handles for i in range(len(h.params))],
        *voter_votes,
    ]
    # Send all votes in one message, because each further message would cost a network latency.
    with state.span(Kind.RANKS_WAIT):
        also = "".join(one.exchange_name for one in state.extensions)
        op_name = f"used parameters of all units{also}, backward"
        numbers = iter(state.world.maxima(bytes(chain.from_iterable(votes)), op_name=op_name))
    maxima = (bytes(islice(numbers, len(part))) for part in votes)
    differ_within, program, orders, waiting, edited, left_over, used, *for_voters = maxima
    if any(differ_within):
        differing = [h.unit.name for h, (_, is_alike) in used_within.items() if not is_alike]
        units = ", ".join(map(unit_text, differing)) or "a unit of other ranks"
        raise RuntimeError(
            f"backward of {unit_text(state.root.name)}: the ranks that train {units} have frozen "
            "different parameters. Set requires_grad in the same way on each of these ranks."
        )
    _check_program(state, program)
    _check_order(state, orders)
    for voter, voter_maxima in zip(voters, for_voters, strict=True):
        voter.tally(voter_maxima)
    flags = map(bool, used)
    used_by = {handle: list(islice(flags, len(handle.params))) for handle in handles}
    used_by.update({handle: used for handle, (used, _) in used_within.items()})
    return Agreement(
        used=used_by,
        left_over=list(compress(handles, left_over)),
        uneven=list(compress(count(), differ(waiting))),
        edited=list(compress(state.units, edited)),
    )


def _used_within(handle: FlatParamHandle) -> tuple[list[bool], bool]:
    """Exchange flags of a flat parameter between the ranks that train its unit. Collective.

    Returns a list and a flag. The list says for each original parameter whether any of these ranks
    used the parameter. The flag says whether all of these ranks have frozen the same parameters.
    """
    number, used = len(handle.params), handle.grads.used_by_rank
    flags = bytes(index in used for index in range(number)) + with_complements(handle.trained)
    op_name = f"used parameters of {unit_text(handle.unit.name)}"
    maxima = handle.topology.world.maxima(flags, op_name=op_name)
    return [*map(bool, maxima[:number])], not any(differ(maxima[number:]))


def _program(state: RunState) -> bytes:
    """Return bytes that are equal on all ranks if all ranks run the same program.

    The bytes are a digest of: the model, the loads and writes of state (``Unit.loads``), the steps
    of optimizers, the flat parameters that this backward reduces, and the trained parameters. Each
    byte is followed by its complement (255 - byte): from the maxima of both over the ranks,
    ``differ`` finds the bytes in which ranks differ.
    """
    digest = sum([unit.loads_sum for unit in state.units])
    # Compare only the flat parameters that all ranks train. Experts may train only on some ranks.
    whole = [h for h in state.handles if h.topology.world.size == state.world.size]
    reduced = bytes([_SYNCS.index(h.unit.sync) * bool(h.num_trainable) for h in whole])
    trained = bytes(chain(*(h.trained for h in whole)))
    digest += crc32(reduced + trained) + (0 if state.steps is None else state.steps.digest)
    return with_complements([state.number, *(digest % 2**32).to_bytes(4, "big")])


def _check_program(state: RunState, maxima: bytes) -> None:
    """Raise RuntimeError on all ranks if ranks run different programs; see ``_program``.

    ``maxima``: the maximum over the ranks for each byte of ``_program``. Collective if the programs
    differ: the ranks exchange details, to name the difference.
    """
    if not any(differ(maxima)):
        if state.steps is not None:
            state.steps.facts.clear()
        return
    backward = f"backward of {unit_text(state.root.name)}"
    if differ(maxima)[0]:
        raise RuntimeError(
            f"{backward}: another rank is at the end of the backward of another model. If one "
            "backward() computes gradients of several ShardedWrappers, all ranks must reach the "
            "ShardedWrappers in the same order. Call backward() once for each ShardedWrapper."
        )
    loads = {f"{k} of {unit_text(u.name)}": str(n) for u in state.units for k, n in u.loads.items()}
    if difference := _difference(state, loads):
        raise RuntimeError(
            f"{backward}: ranks called load_state_dict(), or wrote to tensors of a state_dict(), "
            f"different numbers of times. The number for {difference}. The model now mixes shards "
            "of different states. Load or write the same state on every rank. If only one rank "
            "edits tensors of a state_dict(), clone() the tensors first. Do not broadcast tensors "
            "of a state_dict() to make ranks equal: a broadcast counts as a write."
        )
    if state.steps is not None:
        state.steps.raise_difference()
    trained = {
        f"requires_grad of {param.where}": str(trains)
        for handle in state.handles
        if handle.topology.world.size == state.world.size
        for param, trains in zip(handle.params, handle.trained, strict=False)
    }
    raise RuntimeError(
        f"{backward}: ranks reduce the gradients of different parameters. In the last forward, "
        f"{_difference(state, trained) or 'only some ranks were under no_sync()'}. Set "
        "requires_grad and use no_sync() in the same way on every rank."
    )


def _difference(state: RunState, facts: Facts) -> str:
    """Return a text about the first of ``facts`` that differs between ranks. Empty: none differs.

    Collective: all ranks of the model. All ranks return the same text.
    """
    everyone = state.world.host.gather(facts, "what differs between ranks")
    return differing_fact(everyone, state.world.ranks) or ""


def _order(state: RunState) -> bytes:
    """Return bytes that are equal on all ranks if the ranks all-gathered units in the same order.

    The first byte says whether the order differs within a smaller group (one node, for example).
    The rest is a digest of the all-gathers over all ranks, with complements. No bytes if the order
    does not matter, because the transport (sockets, for example) matches all-gathers by the flat
    parameter. Collective in each smaller group in which units all-gather.
    """
    world, device = state.world, state.device
    if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
        return b""
    # The ranks of each smaller group compare their order of all-gathers among themselves. If all
    # ranks compared the orders of all groups, the message would grow with the number of groups.
    differs = [
        len({*group.host.gather(group.history.to_compare(), "the order of all-gathers")}) > 1
        for group in state.gather_groups
        if group is not world
    ]
    return bytes([any(differs)]) + with_complements(world.history.to_compare())


def _check_order(state: RunState, maxima: bytes) -> None:
    """Raise RuntimeError on all ranks if ranks all-gathered units in different orders.

    ``maxima``: the maximum over the ranks for each byte of ``_order``. Collective if the orders
    differ: the ranks exchange descriptions of recent all-gathers, to name the first difference.
    """
    if not (any(maxima[:1]) or any(differ(maxima[1:]))):
        return
    mine = {group.history.name: group.history.recent() for group in state.gather_groups}
    of_group: dict[str, dict[int, list[Begun]]] = {}
    said = state.world.host.gather(mine, "what was all-gathered")
    for rank, groups in zip(state.world.ranks, said, strict=True):
        for name, recent in groups.items():
            of_group.setdefault(name, {})[rank] = recent
    known = map(first_difference, of_group.values())
    raise RuntimeError(
        f"backward of {unit_text(state.root.name)}: ranks all-gathered different units, or "
        "computed different norms or sums, so a rank may have received values of another "
        "parameter. "
        f"{next(filter(None, known), 'The first difference is too old to be recorded')}. "
        f"{REMEDY} Start again from a checkpoint. [FS-DEADLOCK]"
    )
