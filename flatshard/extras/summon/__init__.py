"""Extra: lets modules hold full plain parameters for a while (``summon_full_params``, ``apply``).

Without this folder, both methods raise ``MissingExtraError``.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flatshard.comm.consistency import Facts, agreed
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import temporarily
from flatshard.memory import checksum
from flatshard.module.settings import as_flag
from flatshard.module.wrappers import handles_in, units_between_steps
from flatshard.precision import set_grad
from flatshard.state.model_state import gather_full, hosts_of
from flatshard.tensor import whole
from flatshard.tensor.sharded_tensor import GRADIENT, FlatShardTensor, local_grad, not_reduced
from flatshard.units.module_tree import unit_text


@dataclass(frozen=True)
class Request:
    """Arguments of one call of ``summon_full_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextlib.contextmanager
def summon(module: nn.Module, request: Request, *, recurse: bool) -> Iterator[None]:
    """Let modules hold full parameters; see ``ShardedWrapper.summon_full_params``.

    Collective at entry: one all-gather per flat parameter. Raises before the first all-gather if
    the request cannot be met, and at the end of the context if edits cannot be kept.
    """
    for keyword, value in {"recurse": recurse, **vars(request)}.items():
        as_flag(keyword, value)
    if request.rank0_only and request.writeback:
        raise ValueError(
            "summon_full_params: rank0_only=True needs writeback=False, got writeback=True: "
            "rank 0's edits would not reach the other ranks' shards. To edit parameters, pass "
            "rank0_only=False and make the same edit on every rank."
        )
    units = units_between_steps(module, "summon_full_params()", nested=recurse)
    _check_owns_parameters(module)
    handles = [handle for unit in units for handle in unit.handles]
    for handle in handles:
        for param in handle.params:
            param.spec.refuse_part("summon_full_params()")
        handle.check_places()
    if request.with_grads:
        _check_grads(handles)
    problems: list[str] = []
    with contextlib.ExitStack() as opened:
        for handle in handles:
            # As in an unwrapped model, edits that were made before an exception are kept.
            opened.callback(lambda one: problems.extend(one.close()), Summoned(handle, request))
        # Forwards start no all-gathers, because the modules hold full parameters.
        opened.enter_context(temporarily(units, is_summoned=True))
        yield
    if problems:
        raise RuntimeError(f"after summon_full_params(): {'; '.join(problems)}.")


def _check_owns_parameters(module: nn.Module) -> None:
    """Raise RuntimeError if a unit outside of ``module`` owns a parameter in ``module``."""
    inside = {id(param.spec) for handle in handles_in(module) for param in handle.params}
    for part in module.modules():
        for value in (*part._parameters.values(), *vars(part).values()):
            if isinstance(value, FlatShardTensor) and id(value.spec) not in inside:
                raise RuntimeError(
                    f"summon_full_params: parameter {value.spec.name!r} belongs to "
                    f"{unit_text(value.spec.unit)}, which is not in the given module. Pass the "
                    "unit's ShardedWrapper, or the whole model."
                )


def _check_grads(handles: Sequence[FlatParamHandle]) -> None:
    """Raise, on all ranks, if a gradient is not reduced, or exists only on some ranks.

    Collective: all ranks that train the units of ``handles``.
    """
    op_name = "summon_full_params(with_grads=True)"

    def prepare() -> tuple[Any, Facts]:
        facts: Facts = {}
        for handle in handles:
            for param in handle.params:
                is_there = param.sharded.grad is not None
                facts[f"the gradient of {param.where}"] = "present" if is_there else "None"
                if is_there and handle.grads.is_shown():
                    raise ValueError(not_reduced(param.where, op_name))
        return handles, facts

    try:
        remedy = "Set the gradient to None on every rank, or assign it on every rank."
        agreed(prepare, hosts_of(handles), op_name, remedy)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def _refuse_gradient(unit_name: str, _: Tensor) -> NoReturn:
    raise RuntimeError(
        f"{unit_text(unit_name)}: a backward computed gradients of full parameters from "
        "summon_full_params(). Nothing averages these gradients over the ranks. Run forward and "
        "backward outside of the context. If the loss reads a parameter outside of forward, use "
        "p.full_tensor() instead of this context."
    )


class Summoned:
    """Full copies of the parameters in one flat parameter, which modules hold until ``close``."""

    def __init__(self, handle: FlatParamHandle, request: Request) -> None:
        """All-gather the parameters, and let the modules hold full copies.

        Collective: all ranks of the shard group.
        """
        self.request = request
        # Full copies that the modules hold. Empty if the modules hold the sharded parameters.
        self.copies: list[nn.Parameter] = []
        self.is_held = not request.rank0_only or handle.topology.world.rank == 0
        self._handle = handle
        moves = request.offload_to_cpu and handle.flat_param.device.type != "cpu"
        with torch.inference_mode(False), torch.no_grad():
            # Under NO_SHARD, the sharded parameters may be plain full parameters. If edits are kept
            # (`writeback`), the user edits these parameters directly, and no copies are needed.
            if moves or not (handle.shard_is_buffer and request.writeback):
                self._gather()
        self._version = handle.version
        handle.summoned = self
        # The full parameters that the modules hold on this rank, if any.
        self.shown = self.copies or (handle.sharded if handle.shard_is_buffer else [])
        refuse: Any = partial(_refuse_gradient, handle.unit.name)
        # Mark the hook as a hook of flatshard, because `OriginalParam.hold_hooks` removes users'
        # hooks.
        refuse.of_flatshard = True
        trained = (param for param in self.shown if param.requires_grad)
        self._guards = [one.register_post_accumulate_grad_hook(refuse) for one in trained]

    def check_shown(self) -> None:
        """Raise RuntimeError if the modules do not hold full parameters on this rank."""
        if not self.shown:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raise RuntimeError: an operation used sharded parameters under ``summon_full_params``."""
        handle = self._handle
        raise RuntimeError(
            f"{unit_text(handle.unit.name)}, rank {handle.topology.world.global_rank}: its sharded "
            "parameters were used under summon_full_params(). Use the full parameters that the "
            "modules hold inside the context (with rank0_only=True only on rank 0), or leave the "
            "context first."
        )

    def _gather(self) -> None:
        handle, request = self._handle, self.request
        handle.absorb_replaced()
        device = torch.device("cpu") if request.offload_to_cpu else handle.device
        # Make copies, because the unsharded buffer may have another dtype than the shard, and the
        # next all-gather overwrites the buffer.
        values, full = gather_full(handle, device, is_kept=self.is_held), []
        present = {p: grad for p in handle.params if (grad := p.sharded.grad) is not None}
        if request.with_grads and present:
            dtype = handle.flat_param.dtype
            parts = [(p.spec, local_grad(g, p.spec).to(dtype), None) for p, g in present.items()]
            full = whole.start_gather(parts, "summon_full_params, gradients")()
        if not self.is_held:
            return
        grads = dict(zip(present, full, strict=False))
        for one in handle.params:
            copy = nn.Parameter(values[one.index], one.sharded.requires_grad)
            copy.__dict__ = one.sharded.__dict__  # attributes that users set
            grad = grads.get(one)
            set_grad(copy, None if grad is None else grad.to(device))
            self.copies.append(copy)
        # Compute checksums of the full parameters, and not only of this rank's part, so that all
        # ranks find the same edits. Some strategies (SHARD_OP) keep the unsharded buffer between
        # steps, and `_write_back` frees the buffer if it finds an edit. A rank that found no edit
        # would keep its buffer, and would not take part in the next all-gather.
        self._sums = [checksum(param) for param in self.copies] if self.request.writeback else []
        handle.put(self.copies)

    def close(self) -> list[str]:
        """Let the modules hold sharded parameters again, and write edits into the shard.

        Returns the reasons why edits are not kept. An empty list: all edits are kept.
        """
        # `close` needs no communication: all ranks must make the same edits, and each rank copies
        # its own part of the full parameters into its shard.
        handle, request = self._handle, self.request
        # Reset `summoned` first, so that the handle can be used even if the code below raises.
        handle.summoned = None
        # The hooks on copies stay: a backward that reaches a copy after the context must raise.
        for guard in () if self.copies else self._guards:
            guard.remove()
        replaced = self._replaced() if request.writeback else []
        if self.copies or replaced:
            handle.put_back()
        was_edited = handle.version != self._version
        if not self.is_held and was_edited:
            rank = handle.topology.world.global_rank
            return [
                f"{unit_text(handle.unit.name)}, rank {rank}: parameters were edited with "
                "rank0_only=True. With this option, this rank holds only sharded parameters, and "
                "rank 0 drops its edits. Edit with rank0_only=False"
            ]
        if not self.copies or not request.writeback:
            return replaced
        if was_edited:
            return [
                f"{unit_text(handle.unit.name)}: its sharded parameters were written while the "
                "modules held full parameters (by an optimizer step, or through parameters from "
                "before the context). Edits of the full parameters are dropped. Edit only the "
                "parameters that the modules hold, or pass writeback=False"
            ]
        problems = replaced or self._misfits()
        # Write all edits or none: only some of the edits would leave the model inconsistent.
        if not problems:
            with torch.inference_mode(False), torch.no_grad():
                self._write_back()
        return problems

    def _replaced(self) -> list[str]:
        handle = self._handle
        return [
            f"{param.where} was replaced by another object, and has its earlier value again. "
            "Assign values with p.copy_(...)"
            for module, attribute, param in handle.places
            if module._parameters.get(attribute) is not (self.copies or handle.sharded)[param.index]
        ]

    def _misfits(self) -> list[str]:
        """Return the reasons why edited full parameters cannot be written into the shard."""
        handle, problems = self._handle, []
        for original in handle.params:
            spec, where, param = original.spec, original.where, self.copies[original.index]
            if tuple(param.shape) != spec.shape or param.dtype != handle.flat_param.dtype:
                problems.append(
                    f"{where}: expected data of shape {spec.shape}, {handle.flat_param.dtype}, got "
                    f"{tuple(param.shape)}, {param.dtype}. Convert the whole wrapper: model.to(...)"
                )
            if param.grad is not None and not self.request.with_grads:
                problems.append(
                    f"{where}: its .grad was set, but gradients are kept only with with_grads=True"
                )
        return problems

    def _write_back(self) -> None:
        """Copy changed values, gradients and ``requires_grad`` into the sharded parameters."""
        handle = self._handle
        edited = {p for p in handle.params if checksum(self.copies[p.index]) != self._sums[p.index]}
        if edited:
            handle.reshard()  # the writes below make the unsharded buffer stale
        # Outside of `DisableTorchFunctionSubclass`, which would hide these writes from the handle.
        for original in handle.params:
            original.sharded.requires_grad_(self.copies[original.index].requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            for original in edited:
                # Write into the sharded parameters. A write into the flat parameter would not
                # increase the version counters of sharded parameters that are plain tensors.
                original.sharded.copy_(self.copies[original.index])
            if self.request.with_grads:
                self._write_grads()
        handle.page_out()

    def _write_grads(self) -> None:
        handle = self._handle
        # Read all gradients first: setting one `.grad` may change a gradient that is read later.
        grads = [param.grad for param in self.copies]
        for original, grad in zip(handle.params, grads, strict=True):
            original.sharded.grad = None
            if grad is not None:
                part = grad if handle.is_whole else original.spec.slice(grad)
                part = part.to(handle.flat_param.device, copy=True)
                if not handle.is_whole:
                    part = FlatShardTensor(part, original.spec, role=GRADIENT)
                set_grad(original.sharded, part)
