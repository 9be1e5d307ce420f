"""Full parameters of sharded ones: all-gathered copies, and modules that hold them for a while.

[Note: what a summon shows]
Copies in the shard's own dtype, not the unsharded buffer: that one may be cast, and may be
overwritten by an all-gather at any time. Where the sharded parameters are full and plain themselves
they are shown as they are, unless edits have to be undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.requests import Gather
from flatshard.engine.handle import FlatParamHandle
from flatshard.memory import disk
from flatshard.precision.casts import set_grad
from flatshard.tensor.flat_parameter import view_of
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range

# ---------------------------------------------------------------- full copies


def gather_full(
    handle: FlatParamHandle, device: torch.device, *, is_kept: bool = True
) -> list[Tensor]:
    """Copies of the original parameters, in the shard's own dtype.

    Collective: all ranks of the shard group, unless the buffer is current.

    Args:
        handle: whose parameters.
        device: where the copies lie.
        is_kept: False: this rank only helps the others, and gets nothing.

    Raises:
        RuntimeError: under a summon only rank 0 holds full parameters, and this is another rank.
    """
    summoned = handle.summoned
    if summoned is not None and not summoned.is_held and not handle.is_whole:
        rank = handle.topology.world.global_rank
        raise RuntimeError(
            f"unit {handle.unit_name!r}, rank {rank}: full tensors were asked for under "
            "summon_full_params(rank0_only=True), where only rank 0 has them and takes no "
            "part in another all-gather. Ask on rank 0 alone, or outside of the context."
        )
    # Users may write to the copies outside of inference mode, which its own tensors do not allow.
    with torch.inference_mode(False), torch.no_grad():
        flat = gather_flat(handle, handle.shard)
        return split(handle, flat, device) if is_kept else []


def gather_flat(handle: FlatParamHandle, shard: Tensor) -> Tensor:
    """All ranks' ``shard`` side by side, ``(padded_numel,)``; may be the handle's own memory.

    Collective: all ranks of the shard group, unless the buffer is current.

    Args:
        handle: whose parts these are.
        shard: its shard, or something of the same shape such as the shard's gradient.
    """
    if handle.is_whole:
        return shard.detach()
    if shard is handle.shard and handle.is_current and handle.buffer.dtype == shard.dtype:
        return handle.buffer
    flat = torch.empty(handle.layout.padded_numel, dtype=shard.dtype, device=handle.device)
    part, inter_group = shard.detach().to(handle.device), handle.topology.inter_group
    if inter_group.size > 1:  # first across nodes, then within
        source, part = part, part.new_empty(part.numel() * inter_group.size)
        _gather_exactly(handle, inter_group, source, part, handle.gather.full_tags[1])
    _gather_exactly(handle, handle.topology.intra_group, part, flat, handle.gather.full_tags[0])
    disk.release(shard)  # its pages were read for the all-gather alone
    return flat


def _gather_exactly(
    handle: FlatParamHandle, comm: Communicator, part: Tensor, out: Tensor, tag: int
) -> None:
    purpose = "full tensors, which all ranks must ask for together (state_dict(), say),"
    comm.all_gather(Gather(part, out, handle.unit_name, tag, purpose, exact=True)).finish()


def split(handle: FlatParamHandle, flat: Tensor, device: torch.device) -> list[Tensor]:
    """Copies on ``device`` of every original's range of ``flat``, in the true shapes."""
    return [view_of(flat, span).to(device, copy=True) for span in handle.layout.spans]


def join(
    handle: FlatParamHandle, parts: Iterable[tuple[int, Tensor]], dtype: torch.dtype
) -> Tensor:
    """This rank's parts of originals at their places in a shard, ``(shard_numel,)``; else zero.

    Args:
        handle: whose shard.
        parts: index of an original parameter, and this rank's range of it, 1-D.
        dtype: of the result.
    """
    shard = torch.zeros_like(handle.shard, dtype=dtype)
    for index, part in parts:
        local = handle.local_spans[index]
        shard[local.start : local.end].copy_(part)
    return shard


def index_of(handle: FlatParamHandle, tensor: Tensor) -> int | None:
    """Which original parameter ``tensor`` shows, or None."""
    if isinstance(tensor, FlatShardTensor):
        return next((i for i, spec in enumerate(handle.params.specs) if spec is tensor.spec), None)
    storage = tensor.untyped_storage()._cdata
    if storage != handle.buffer.untyped_storage()._cdata:
        return None
    start = tensor.storage_offset()
    return next(
        (
            index
            for index, span in enumerate(handle.layout.spans)
            if span.start == start and span.shape == tuple(tensor.shape)
        ),
        None,
    )


# ---------------------------------------------------------------- summon_full_params


@dataclass(frozen=True)
class Request:
    """Arguments of ``summon_full_params``.

    Attributes:
        writeback: keep what is written.
        rank0_only: ranks other than rank 0 keep their sharded parameters.
        offload_to_cpu: the full tensors lie in CPU memory.
        with_grads: show the full reduced gradients too.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


def _present_grads(handle: FlatParamHandle) -> list[bool]:
    with torch._C.DisableTorchFunctionSubclass():
        found = [param.grad is not None for param in handle.sharded]
    return found if handle.params.use_orig_params else found * len(handle.params.specs)


def _grad_shard(handle: FlatParamHandle) -> Tensor:
    """This rank's part of the gradients, ``(shard_numel,)``; zero where there is none."""
    with torch._C.DisableTorchFunctionSubclass():
        grads = [param.grad for param in handle.sharded]
    if not handle.params.use_orig_params:
        assert grads[0] is not None, "only asked for where there is one"
        return local_range(grads[0]).to(handle.shard, copy=True)
    parts = []
    for index, grad in enumerate(grads):
        if grad is not None:
            # A plain one is full: the user's own.
            is_full = not isinstance(grad, FlatShardTensor)
            spec = handle.params.specs[index]
            parts.append((index, spec.slice(grad) if is_full else local_range(grad)))
    return join(handle, parts, handle.shard.dtype)


def _check_request(handle: FlatParamHandle, request: Request) -> None:
    """Raise for what cannot be shown, alike on all ranks."""
    if handle.summoned is None:
        handle.params.check_places()
        return
    outer = handle.summoned.request
    lacking = [
        name
        for name, missing in (
            ("rank0_only=False", outer.rank0_only and not request.rank0_only),
            ("with_grads=True", request.with_grads and not outer.with_grads),
            (
                "offload_to_cpu=True",
                request.offload_to_cpu and not outer.offload_to_cpu and handle.device.type != "cpu",
            ),
        )
        if missing
    ]
    if lacking:
        raise RuntimeError(
            f"unit {handle.unit_name!r}: summon_full_params({lacking[0]}) inside another summon "
            "without it. Say it in the outer one."
        )


def _check_grads(handles: Sequence[FlatParamHandle]) -> None:
    """Raise on all ranks for gradients that are not reduced, or that only some ranks have.

    Collective: all ranks; a small reduction per group.
    """
    groups: dict[tuple[Communicator, Communicator], list[FlatParamHandle]] = {}
    for handle in handles:
        if handle.summoned is None:
            groups.setdefault((handle.topology.shard, handle.topology.replicate), []).append(handle)
    for comms, members in groups.items():
        rows = [row for handle in members for row in _grad_facts(handle)]
        facts = torch.tensor(rows, dtype=torch.uint8).view(-1, 3)
        for comm in comms:
            facts = facts.to(comm.control_device)
            comm.reduce_scalars(facts, "MAX", op_name="gradients to show")
        names = [(handle, spec.name) for handle in members for spec in handle.params.specs]
        for (handle, name), (unreduced, present, absent) in zip(names, facts.tolist(), strict=True):
            rank = handle.topology.world.global_rank
            where = f"parameter {name!r} (unit {handle.unit_name!r}, rank {rank})"
            if unreduced:
                raise RuntimeError(
                    f"{where}: summon_full_params(with_grads=True) on gradients that were "
                    "accumulated under no_sync and not reduced. Run the last backward before it "
                    "outside of no_sync."
                )
            if present and absent:
                raise RuntimeError(
                    f"{where}: summon_full_params(with_grads=True), and some ranks have a "
                    "gradient while others have none. Drop or assign it on every rank."
                )


def _grad_facts(handle: FlatParamHandle) -> list[tuple[bool, bool, bool]]:
    """Per original parameter: whether its gradient is not reduced, present, absent.

    Both of the latter, since the ranks' MAX of each then tells whether they differ.
    """
    unreduced = handle.grad_publish.unreduced.is_shown()
    return [(unreduced and there, there, not there) for there in _present_grads(handle)]


@contextlib.contextmanager
def summoned(handles: Sequence[FlatParamHandle], request: Request) -> Iterator[None]:
    """Let the modules of ``handles`` hold full plain parameters.

    Collective: all ranks, at entry; one flat parameter at a time.

    Raises:
        RuntimeError: the request cannot be met (before the first all-gather), or, at the end,
            something that was written cannot be kept.
    """
    for handle in handles:
        _check_request(handle, request)
    if request.with_grads:
        _check_grads(handles)
    opened: list[Summoned] = []
    problems: list[str] = []
    try:
        for handle in handles:
            opened.append(Summoned(handle, request))
        yield
    finally:
        # After an exception too: what was written up to it is kept, as in an unwrapped model.
        for one in reversed(opened):
            problems += one.close()
    if problems:
        raise RuntimeError(f"after summon_full_params(): {'; '.join(problems)}")


class Summoned:
    """The full parameters of one handle, in its modules from construction to ``close``.

    Attributes:
        request: what was asked for.
        is_held: whether this rank's modules hold full parameters.
        params: what the modules hold, in the order of ``layout.spans``; empty where the sharded
            parameters stay in place.
    """

    def __init__(self, handle: FlatParamHandle, request: Request) -> None:
        """Gather and show.

        Collective: all ranks of the shard group, unless a summon of the handle is open already.
        """
        self.request = request
        self.params: list[nn.Parameter] = []
        self._handle = handle
        self._outer = handle.summoned
        self._shows = False
        on_rank0 = handle.topology.world.rank == 0
        self.is_held = on_rank0 or not request.rank0_only
        with torch.inference_mode(False), torch.no_grad():
            if self._outer is not None:
                self._join(self._outer)
            elif not self._is_shown_already():
                self._gather()
        self._version = handle.version
        handle.summoned = self

    def _is_shown_already(self) -> bool:
        """Whether the sharded parameters are full, plain, and what is to be edited."""
        moves = self.request.offload_to_cpu and self._handle.shard.device.type != "cpu"
        return self._handle.params.are_full and self.request.writeback and not moves

    def _join(self, outer: Summoned) -> None:
        """Inside another summon: without an all-gather, share or copy what that one shows."""
        self.is_held = outer.is_held
        self.params = outer.params
        shown = outer.params or (self._handle.sharded if self._handle.params.are_full else [])
        if self.is_held and not self.request.writeback:
            values = [param.detach().clone() for param in shown]
            self._show(values, [None if p.grad is None else p.grad.clone() for p in shown])

    def _gather(self) -> None:
        handle, request = self._handle, self.request
        handle.absorb_replaced()
        if request.writeback:
            handle.reshard()  # what it holds is about to become stale
        device = torch.device("cpu") if request.offload_to_cpu else handle.device
        flat = gather_flat(handle, handle.shard)
        # Only a rank that shows them splits them: elsewhere one unit at a time is in memory.
        values = split(handle, flat, device) if self.is_held else []
        grads: list[Tensor | None] = [None] * len(values)
        present = _present_grads(handle)
        if request.with_grads and any(present):
            flat = gather_flat(handle, _grad_shard(handle))
            if self.is_held:
                full = split(handle, flat, device)
                grads = [g if there else None for g, there in zip(full, present, strict=True)]
        if self.is_held:
            self._show(values, grads)

    def _show(self, values: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Let the modules hold parameters over ``values``, which nobody else has."""
        requires_grad = self._handle.params.requires_grad()
        self.params = [
            nn.Parameter(value, requires_grad=asks)
            for value, asks in zip(values, requires_grad, strict=True)
        ]
        for param, grad in zip(self.params, grads, strict=True):
            set_grad(param, grad)
        self._handle.params.put(self.params)
        self._shows = True

    # ------------------------------------------------------------ the end

    def close(self) -> list[str]:
        """Give the modules back what they held before, and keep what was written.

        No communication: every rank keeps its own slice of what it wrote itself.

        Returns:
            Reasons why something that was written is not kept.
        """
        handle, request = self._handle, self.request
        # From here on, also where something below raises, the handle is as before this summon.
        handle.summoned = self._outer
        replaced = self._replaced() if request.writeback and self._outer is None else []
        if self._shows or replaced:
            self._show_before()
        was_edited = handle.version != self._version
        if not self.is_held and was_edited and self._outer is None:
            rank = handle.topology.world.global_rank
            return [
                f"unit {handle.unit_name!r}, rank {rank}: parameters were edited with "
                "rank0_only=True, where this rank holds sharded ones and rank 0 drops its edits. "
                "Edit with rank0_only=False"
            ]
        if not self._shows or not request.writeback:
            return replaced
        if was_edited:
            return [
                f"unit {handle.unit_name!r}: its sharded parameters were written while full ones "
                "were shown (an optimizer step, or parameters from before the context), so the "
                "full ones are dropped. Edit what the modules hold, or pass writeback=False"
            ]
        if replaced:
            return replaced
        with torch.inference_mode(False), torch.no_grad():
            return self._write_back()

    def _replaced(self) -> list[str]:
        handle = self._handle
        held = self.params or handle.sharded
        return [
            f"parameter {handle.params.specs[index].name!r} (unit {handle.unit_name!r}) was "
            "replaced by another object and is what it was before. Assign values with p.copy_(...)"
            for module, attribute, index in handle.params.places
            if module._parameters.get(attribute) is not held[index]
        ]

    def _show_before(self) -> None:
        handle = self._handle
        if self._outer is not None and self._outer.params:
            handle.params.put(self._outer.params)
        elif handle.params.are_full:
            handle.params.put(handle.sharded)
        else:
            handle.params.use_sharded_views()

    def _write_back(self) -> list[str]:
        """Copy values, gradients and ``requires_grad`` into this rank's part."""
        problems = self._misfits()
        if problems:  # all or nothing: some edits without the others are no model
            return problems
        handle = self._handle
        with torch._C.DisableTorchFunctionSubclass():
            for index, param in enumerate(self.params):
                if handle.params.use_orig_params:
                    sharded = handle.sharded[index]
                    sharded.copy_(param)
                    if sharded.requires_grad is not param.requires_grad:
                        sharded.requires_grad_(param.requires_grad)
                else:
                    local = handle.local_spans[index]
                    place = handle.shard[local.start : local.end]
                    place.copy_(handle.params.specs[index].slice(param))
            if self.request.with_grads:
                self._write_grads()
        handle.page_out()
        return []

    def _misfits(self) -> list[str]:
        """Errors for full parameters that do not fit the shard; if any, nothing is written."""
        problems = []
        handle = self._handle
        requires_grad = handle.params.requires_grad()
        for index, param in enumerate(self.params):
            spec = handle.params.specs[index]
            where = f"parameter {spec.name!r} (unit {handle.unit_name!r})"
            if tuple(param.shape) != spec.shape or param.dtype != handle.shard.dtype:
                problems.append(
                    f"{where}: expected data of shape {spec.shape}, {handle.shard.dtype}, got "
                    f"{tuple(param.shape)}, {param.dtype}. Convert the whole wrapper: model.to(...)"
                )
            if param.grad is not None and not self.request.with_grads:
                problems.append(
                    f"{where}: its .grad was set, which is kept only with with_grads=True"
                )
            if (
                not handle.params.use_orig_params
                and param.requires_grad is not requires_grad[index]
            ):
                problems.append(
                    f"{where}: requires_grad was changed, which a flat parameter cannot do for a "
                    "part of it. Wrap with use_orig_params=True"
                )
        return problems

    def _write_grads(self) -> None:
        handle = self._handle
        grads = [param.grad for param in self.params]
        if handle.params.use_orig_params:
            for sharded, spec, grad in zip(handle.sharded, handle.params.specs, grads, strict=True):
                if grad is None:
                    sharded.grad = None
                elif handle.is_whole:
                    set_grad(sharded, grad.to(handle.shard.device, copy=True))
                else:
                    part = spec.slice(grad).to(handle.shard.device, copy=True)
                    sharded.grad = FlatShardTensor(part, spec)
            return
        flat = handle.sharded[0]
        flat.grad = None
        present = [
            (index, spec.slice(grad))
            for index, (spec, grad) in enumerate(zip(handle.params.specs, grads, strict=True))
            if grad is not None
        ]
        if present:
            merged = join(handle, present, handle.shard.dtype)
            flat.grad = FlatShardTensor(merged, handle.params.flat_spec)
