"""The exchange between all ranks at the end of a backward.

A parameter may be used on one rank and unused on another. So at the end of a backward, all ranks
take part in one all-reduce of bytes, which say which parameters each rank used, and which
reductions each rank still has to do. The bytes also show whether all ranks run the same program,
and all-gathered the same units in the same order: transports that match all-gathers only by order
would deliver parameters of other units.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress, islice
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

    # For each flat parameter, a flag per original parameter: whether any rank that trains the unit
    # used the parameter.
    used: dict[FlatParamHandle, list[bool]]
    # Flat parameters for which some rank has gradients that no planned reduction includes. These
    # gradients arrived after the reduction, or were accumulated before the user froze the
    # parameters.
    left_over: list[FlatParamHandle]
    # Numbers of the flat parameters whose reduction only some ranks started before the end of
    # backward.
    uneven: list[int]
    # Units in which the user, on at least one rank, edited accumulated gradients, or edited
    # parameters during forward.
    edited: list[Unit]


def exchange_end_of_backward(state: RunState, rest: Set[int]) -> Agreement:
    """Exchange with all ranks what this backward did on each rank. Collective.

    All ranks call this after each backward that reduces gradients. Each rank sends bytes, called
    votes, and receives the maximum over the ranks of each byte.

    Args:
        state: the state of the model's steps.
        rest: numbers of the flat parameters whose reduction this rank has not started. They are
            reduced next if any rank used them, so their gradients do not count as left over.

    Raises:
        RuntimeError: the ranks do not run the same program, all-gathered units in different
            orders, or have frozen different parameters of a unit. All ranks raise.
    """
    handles = state.handles
    # Voters are parts that add votes of their own to the message: the broadcast of buffers, and the
    # extensions. Their order is the same on all ranks.
    buffers = [state.buffers] if state.buffers else []
    voters: list[BufferSync | StepExtension] = [*buffers, *state.extensions]
    # Collect these votes before the exchange below, because `votes()` may itself run a collective.
    voter_votes = [one.votes() for one in voters]
    # Units in which this rank's program edited accumulated gradients, or parameters in forward.
    # This rank only votes, and all ranks raise after the exchange: if this rank raised here, the
    # other ranks would wait for its reductions.
    edited_here = {h.unit for h in handles if h.grads.was_edited or h in state.edits.found}
    # Some units (experts, for example) train only on the ranks of a smaller group. Other ranks have
    # a different unit at this index, so the maxima over all ranks mix two units. The ranks of the
    # group exchange their flags first.
    smaller = [h for h in handles if h.topology.world.size < state.world.size]
    used_within = {handle: _used_within(handle) for handle in smaller}
    differing = [h.unit_name for h, (_, is_alike) in used_within.items() if not is_alike]
    engine_votes: list[Sequence[int]] = [
        [bool(differing)],
        _program(state),
        _order(state),
        # Two votes per flat parameter: "started on this rank" and "not started on this rank". The
        # flat parameter is uneven if the maxima of both votes are yes.
        [number not in rest for number in range(len(handles))],
        [number in rest for number in range(len(handles))],
        [unit in edited_here for unit in state.units],
        [
            not (number in rest and h.reduces) and h.grads.waits_for(h.unit.sync)
            for number, h in enumerate(handles)
        ],
        [i in h.grads.used_by_rank for h in handles for i in range(len(h.params))],
    ]
    all_votes = [*engine_votes, *voter_votes]
    # One message: the votes are small, and each further message costs a network latency.
    with state.span(Kind.RANKS_WAIT):
        also = "".join(one.exchange_name for one in state.extensions)
        op_name = f"used parameters of all units{also}, backward"
        numbers = iter(state.world.maxima(bytes(chain.from_iterable(all_votes)), op_name=op_name))
    maxima = [bytes(islice(numbers, len(votes))) for votes in all_votes]
    differ_within, program, orders, started, waiting, edited, left_over, used = maxima[
        : len(engine_votes)
    ]
    if any(differ_within):
        units = ", ".join(map(unit_text, differing)) or "a unit of other ranks"
        raise RuntimeError(
            f"backward of {unit_text(state.root.name)}: the ranks that train {units} have frozen "
            "different parameters. Set requires_grad in the same way on each of these ranks."
        )
    _check_program(state, program)
    _check_order(state, orders)
    for voter, voter_maxima in zip(voters, maxima[len(engine_votes) :], strict=True):
        voter.tally(voter_maxima)
    flags = map(bool, used)
    used_by = {handle: list(islice(flags, len(handle.params))) for handle in handles}
    used_by.update({handle: used for handle, (used, _) in used_within.items()})
    return Agreement(
        used=used_by,
        left_over=list(compress(handles, left_over)),
        uneven=[i for i, both in enumerate(zip(started, waiting, strict=True)) if all(both)],
        edited=list(compress(state.units, edited)),
    )


def _used_within(handle: FlatParamHandle) -> tuple[list[bool], bool]:
    """Return which original parameters a rank that trains the unit has used.

    Also returns whether all these ranks have frozen the same parameters. Collective: the ranks that
    train the unit.
    """
    number, used = len(handle.params), handle.grads.used_by_rank
    flags = bytes(index in used for index in range(number)) + with_complements(handle.trained)
    op_name = f"used parameters of {unit_text(handle.unit_name)}"
    maxima = handle.topology.world.maxima(flags, op_name=op_name)
    return [*map(bool, maxima[:number])], not any(differ(maxima[number:]))


def _program(state: RunState) -> bytes:
    """Return bytes that are equal on all ranks if all ranks run the same program.

    The bytes identify the model, the counts of loads and writes, the steps of optimizers, the flat
    parameters that this backward reduces, and the parameters that are trained. Each byte is
    followed by its complement. From the maxima of both over the ranks, ``differ`` finds the bytes
    in which ranks differ.
    """
    loads = sum([unit.loads_sum for unit in state.units])
    # Ranks outside of a smaller group have a different unit at the same index; see `_used_within`.
    whole = [h for h in state.handles if h.topology.world.size == state.world.size]
    reduced = bytes([_SYNCS.index(h.unit.sync) * bool(h.num_trainable) for h in whole])
    trained = bytes(chain(*(h.trained for h in whole)))
    steps = 0 if state.steps is None else state.steps.digest
    digest = (loads + crc32(reduced + trained) + steps) % 2**32
    return with_complements([state.number, *digest.to_bytes(4, "big")])


def _check_program(state: RunState, maxima: bytes) -> None:
    """Raise RuntimeError on all ranks if ranks run different programs; see ``_program``.

    Before the error, the ranks exchange details, to name the difference. Collective if the programs
    differ.
    """
    model, *digest = differ(maxima)
    if state.steps is not None and not any(digest):
        state.steps.facts.clear()
    if not (model or any(digest)):
        return
    backward = f"backward of {unit_text(state.root.name)}"
    if model:
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
            "edits tensors of a state_dict(), clone() the tensors first."
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
    """Return the first of ``facts`` that differs between ranks, for an error. Empty: none differs.

    Collective: all ranks of the model. All ranks return the same text.
    """
    everyone = state.world.host.gather(facts, "what differs between ranks")
    return (differing_fact(everyone, state.world.ranks) or ("", ""))[1]


def _order(state: RunState) -> bytes:
    """Return bytes that are equal on all ranks if the ranks all-gathered units in the same order.

    The first byte says whether the order differs within a smaller group (one node, for example).
    The rest is a digest of the all-gathers over all ranks, with complements. There are no bytes if
    the transport (sockets, for example) matches all-gathers by tag, because then the order does not
    matter. Collective in each smaller group in which units all-gather.
    """
    world, device = state.world, state.device
    if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
        return b""
    # Compare the digest of a smaller group's collectives inside the group: in the exchange of all
    # ranks, the message would grow with the number of groups.
    differs = [
        len({*group.host.gather(group.history.to_compare(), "the order of all-gathers")}) > 1
        for group in state.gather_groups
        if group is not world
    ]
    return bytes([any(differs)]) + with_complements(world.history.to_compare())


def _check_order(state: RunState, maxima: bytes) -> None:
    """Raise RuntimeError on all ranks if ranks all-gathered units in different orders.

    ``maxima``: the maximum over the ranks for each byte that ``_order`` returned, so that a set
    first byte or different digests show a difference. Collective if the orders differ: then the
    ranks exchange descriptions of their recent all-gathers, to name the first difference.
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
