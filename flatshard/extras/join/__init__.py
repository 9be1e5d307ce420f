"""Extra: ranks without input follow the steps of the ranks with input.

Without this folder, ``ShardedWrapper.join()`` raises ``MissingExtraError``.

[Note: a rank without input]
A rank without input still holds shards and optimizer state, so it must take part in all
collectives. The ranks with input announce each action (a forward, an all-gather, the end of a
backward, clipping, an optimizer's step) in a separate process group, and the ranks without input
take the same action with gradients of zero. As long as all ranks have input, the ranks announce
only forwards.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer as torch_optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from flatshard.comm.process_groups import ranks_text
from flatshard.engine.events import StepExtension
from flatshard.engine.forward import calls_wrapper
from flatshard.engine.gradients import GradSync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import temporarily
from flatshard.engine.unit import Unit
from flatshard.module.wrappers import unit_of
from flatshard.optimizer import adapter
from flatshard.tensor.sharded_tensor import local_range
from flatshard.units.module_tree import unit_text

_FAILED = "failed"


class Doing(NamedTuple):
    """An announced action (a ``follow_`` method of ``Join``, and its arguments), or a failure."""

    kind: str
    detail: tuple[Any, ...] = ()


@contextlib.contextmanager
def joining(root: Any, optimizers: Any, by_initial_size: bool, throws: bool) -> Iterator[None]:
    """Implement ``ShardedWrapper.join``. Collective: all ranks, at entry and at exit."""
    unit = unit_of(root)
    state = unit.context.check_between_steps("join()")
    _check(unit)
    join = Join(root, [*optimizers, *adapter.stepped_optimizers()], by_initial_size, throws)
    state.extend(join)
    histories = [group.history for group in state.gather_groups]
    try:
        with (
            torch_optimizer.register_optimizer_step_pre_hook(join.before_step),
            torch_optimizer.register_optimizer_step_post_hook(join.after_step),
            # With gloo, ranks may compare the names of all-gathers before the all-gathers begin. A
            # rank without input learns of an all-gather too late to take part: compare no names.
            temporarily(histories, announces=False),
            # At the end, restore these settings of the model, which `Join` changes.
            temporarily(
                [state], lacks_ranks=False, syncs=state.syncs, under_no_sync=state.under_no_sync
            ),
            temporarily([handle.grads for handle in state.handles], scale=1.0),
            temporarily(filter(None, [state.buffers]), source=0),
        ):
            yield
            join.follow()
    finally:
        state.drop(join)


def _check(root: Unit) -> None:
    """Raise if ``join`` does not support a setting of the model. All ranks raise the same error."""
    if not root.is_root:
        name = unit_text(root.name)
        raise RuntimeError(f"join(): {name} is inside a wrapper. Call join() on the root wrapper.")
    for extension in root.context.extensions:
        extension.needs_gradients("join()")
    for unit in root.context.units:
        reasons = {
            "may be skipped by some ranks (allow_divergence)": unit.may_diverge,
            "trains only on some of the ranks": unit.topology.world.size < root.context.world.size,
            "keeps secondary shards": any(h.gather.secondary is not None for h in unit.handles),
            "has a communication hook": any(h.grads.plan.comm_hook for h in unit.handles),
        }
        if reason := next((text for text, holds in reasons.items() if holds), None):
            raise NotImplementedError(
                f"join() cannot be used: {unit_text(unit.name)} {reason}. Give every rank the "
                "same number of batches, for example by DistributedSampler(drop_last=True)."
            )


class Join(StepExtension):
    """Acts for this rank inside ``join()``: announces actions, or follows other ranks."""

    name = "join"

    def __init__(self, root: Any, optimizers: Any, by_initial_size: bool, throws: bool) -> None:
        self._root, self._state, self._throws = root, unit_of(root).context, throws
        self._by_initial_size = by_initial_size
        self._comm = self._state.world.side_group
        self._buffers = self._state.buffers
        self._handles = self._state.handles
        params = [param for handle in self._handles for param in handle.sharded]
        self._numbers = {param: number for number, param in enumerate(params)}
        self._active = list(range(self._comm.size))  # ranks that had input at the last exchange
        self._is_following = False
        self._optimizers = weakref.WeakSet(one for one in optimizers if self._holds(one))
        # Result of `_options_of` at the beginning of an optimizer's last step, keyed by `_key`.
        self._options: dict[Any, Any] = {}

        # The version of each gradient after backward or clipping, to find edits by the program.
        self._published: Any = WeakTensorKeyDictionary()
        self._grads: tuple[str, ...] = ()  # result of `_look` when the current backward began
        self._versions: list[int] = []  # versions of the flat parameters after the last step
        self._note_grads()

    @property
    def _leads(self) -> bool:
        """Whether this rank has input, and must announce its actions to ranks without input."""
        return len(self._active) < self._comm.size and not self._is_following

    def _exchange(self, mine: Doing | None) -> Doing | None:
        """Announce this rank's next action, and return the action of the ranks with input.

        ``mine`` is None if this rank has no input. The result is None if no rank has input. All
        ranks raise RuntimeError if ranks announce different actions, or if a rank has failed.
        Collective: all ranks.
        """
        name = "join(): without input, waiting for other ranks' actions" if mine is None else ""
        heard = self._comm.host.gather(mine, name or f"join(): about to {mine}")
        doing: dict[int, Doing] = {rank: one for rank, one in enumerate(heard) if one is not None}
        for rank, one in doing.items():
            if one.kind == _FAILED:
                raise RuntimeError(f"join(), rank {rank}: {one.detail[0]}")
        if not doing:
            return None
        self._active, first = list(doing), next(iter(doing.values()))
        for rank, one in doing.items():
            if one != first:
                raise RuntimeError(
                    "join(): ranks with input must take the same action with the same arguments. "
                    f"Rank {rank}: {one}. Rank {self._active[0]}: {first}. If only 'lr' differs, a "
                    "rank was without input in an earlier join(), and missed scheduler steps. "
                    "After each join(), copy the scheduler's state from a rank with all steps."
                )
        if self._throws and len(self._active) < self._comm.size:
            ranks = ranks_text(sorted({*range(self._comm.size)} - doing.keys()))
            raise RuntimeError(
                f"join(): no input is left on ranks {ranks}, and throw_on_early_termination=True "
                "ends the loop. To let these ranks follow the others, leave that argument out."
            )
        return first

    def _fail(self, message: str) -> None:
        can = "forward, backward, model.clip_grad_norm_() and steps of element-wise optimizers"
        text = f"{message} Ranks without input can follow only {can}."
        self._exchange(Doing(_FAILED, (text,)))

    # ------------------------------------------------------------ a rank that has input

    def begin_forward(self, unit: Unit | None) -> None:
        state = self._state
        if self._leads:
            self._check_unedited()
        syncs = tuple(sync.value for sync in state.syncs)
        options = sorted((self._key(one), _options_of(one)) for one in self._optimizers)
        of_root = unit is state.root and calls_wrapper(unit, recomputes=False)
        detail = torch.is_grad_enabled(), syncs, state.under_no_sync, of_root, options
        self._exchange(Doing("forward", detail))
        self._begin()

    def _begin(self) -> None:
        """Prepare gradients and buffers for a forward in which only the active ranks have input."""
        size, num_active = self._comm.size, len(self._active)
        self._state.lacks_ranks = num_active < size
        for handle in self._handles:
            handle.grads.scale = 1.0 if self._by_initial_size else size / num_active
        if self._buffers is not None:
            # As in DistributedDataParallel, buffers come from the last rank that has input.
            self._buffers.source = self._active[-1]
        self._note_versions()

    def gathering(self, handle: FlatParamHandle, purpose: str) -> None:
        if self._leads:
            self._exchange(Doing("gather", (self._handles.index(handle), purpose)))

    def begin_backward(self) -> None:
        if self._leads:
            self._grads = self._look()

    def votes(self) -> bytes:
        if self._leads:  # `votes` is called just before the exchange at the end of backward
            self._exchange(Doing("backward", (self._grads,)))
        return b""

    def end_backward(self, has_gradients: bool) -> None:
        self._note_grads(reduced_only=True)

    @contextlib.contextmanager
    def clipping(self, module: Any, arguments: tuple[Any, ...]) -> Iterator[None]:
        if self._leads:
            modules = [wrapper.module for wrapper in self._root.fsdp_modules(self._root)]
            number = modules.index(module.module)
            self._exchange(Doing("clipping", (self._look(), number, arguments)))
        yield
        self._note_grads()

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_following or not self._holds(optimizer):
            return
        self._optimizers.add(optimizer)
        self._options[self._key(optimizer)] = _options_of(optimizer)
        if self._leads:
            self._check_unedited()
            if not adapter.is_elementwise(optimizer):
                self._fail(f"{type(optimizer).__name__} is not known to be element-wise.")

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # If a hook steps the optimizer in backward, do not announce the step: ranks without input
        # run the hook, too.
        in_hook = torch._C._current_graph_task_id() != -1
        if self._leads and not in_hook and self._holds(optimizer):
            key = self._key(optimizer)
            self._exchange(Doing("step", (self._look(), key, self._options[key])))
        self._note_versions()

    def _holds(self, optimizer: Optimizer) -> bool:
        return any(p in self._numbers for group in optimizer.param_groups for p in group["params"])

    def _key(self, optimizer: Optimizer) -> Any:
        """Return a key that is the same on all ranks: class name, and indices of parameters."""
        groups = (group["params"] for group in optimizer.param_groups)
        numbers = tuple(tuple(self._numbers.get(p, -1) for p in params) for params in groups)
        return type(optimizer).__name__, numbers

    # --------------------------------------------- edits that ranks without input cannot follow

    def _note_grads(self, *, reduced_only: bool = False) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for handle in self._handles:
                # Skip gradients accumulated under `no_sync`, which differ between ranks.
                is_reduced = handle.unit.sync is GradSync.FULL
                for param in handle.sharded if is_reduced or not reduced_only else ():
                    if param.grad is not None:
                        self._published[param.grad] = local_range(param.grad)._version

    def _look(self) -> tuple[str, ...]:
        """Return what the program did to each gradient: kept, zeroed, or dropped (set to None).

        Raises RuntimeError, on all ranks, if the program edited gradients in another way, because
        ranks without input cannot repeat the edit.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in self._numbers]
            parts: list[Any] = [None if grad is None else local_range(grad) for grad in grads]
            # An entry is None if the program has dropped or replaced the gradient.
            versions = [None if grad is None else self._published.get(grad) for grad in grads]
            both = zip(parts, versions, strict=True)
            # Whether the program called `zero_grad(set_to_none=False)`, or edited a gradient.
            is_changed = any(v is not None and part._version != v for part, v in both)
            is_edited = is_changed and any(part is not None and part.any() for part in parts)
        if is_edited:
            self._fail("gradients were edited after backward.")
        kept = "zeroed" if is_changed else "kept"
        return tuple("dropped" if version is None else kept for version in versions)

    def _note_versions(self) -> None:
        self._versions = [handle.version for handle in self._handles]

    def _check_unedited(self) -> None:
        if self._versions != [handle.version for handle in self._handles]:
            self._fail("parameters were edited between steps.")

    # ------------------------------------------------------------ a rank without input

    def follow(self) -> None:
        """Take the same actions as the ranks with input, until no rank has input."""
        grads: tuple[str, ...] = ()
        if self._leads:
            self._check_unedited()
            grads = self._look()
        self._is_following, failure = True, None
        while doing := self._exchange(failure):
            try:
                getattr(self, f"follow_{doing.kind}")(*doing.detail)
            except Exception as error:
                failure = Doing(_FAILED, (f"{type(error).__name__}: {error}",))
        if len(self._active) < self._comm.size:
            # The last rank that had input may have called `zero_grad()` after its last step.
            name = "join(): what the last rank with input did to its gradients"
            self._treat(self._comm.host.gather(grads, name)[self._active[-1]])
        if self._buffers is not None:
            self._buffers.source = self._active[-1]
            self._buffers.broadcast("join(): buffers of the last rank that had input")

    def follow_forward(
        self, grad_enabled: bool, syncs: Any, under_no_sync: bool, of_root: bool, _: Any
    ) -> None:
        state = self._state
        state.pending_sends.wait_sends()
        state.expects_backward = grad_enabled
        state.syncs, state.under_no_sync = [GradSync(sync) for sync in syncs], under_no_sync
        if grad_enabled:
            state.plan_syncs()
        self._begin()
        if of_root and self._buffers is not None:
            with torch.set_grad_enabled(grad_enabled):
                self._buffers.before_forward(under_no_sync, True)

    def follow_gather(self, number: int, purpose: str) -> None:
        self._handles[number].unshard(purpose)
        self._handles[number].reshard()

    def follow_backward(self, grads: tuple[str, ...]) -> None:
        self._treat(grads)
        self._state.backward.run_empty()

    def follow_clipping(self, grads: tuple[str, ...], number: int, arguments: Any) -> None:
        self._treat(grads)
        self._root.fsdp_modules(self._root)[number].clip_grad_norm_(*arguments)

    def follow_step(self, grads: tuple[str, ...], key: Any, options: list[Any]) -> None:
        self._treat(grads)
        found = [one for one in self._optimizers if self._key(one) == key]
        if len(found) != 1:
            raise RuntimeError(
                f"join(): ranks with input stepped {key[0]}. This rank must step it, too, but has "
                f"{len(found)} optimizers of this class with the same parameters. If a rank may "
                "have no input at all, name the optimizer: join(optimizers=[optimizer])."
            )
        self._state.pending_sends.wait_sends()
        groups = found[0].param_groups
        for group, theirs in zip(groups, options, strict=True):
            for name, value in theirs:
                old = group[name]
                group[name] = old.fill_(value) if isinstance(old, Tensor) else value
        params = (param for group in groups for param in group["params"])
        # Hide gradients of parameters outside of the model, which on this rank are out of date.
        with temporarily((one for one in params if one not in self._numbers), grad=None):
            found[0].step()

    def _treat(self, grads: tuple[str, ...]) -> None:
        """Drop or zero the same gradients as the ranks with input."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param, what in zip(self._numbers, grads, strict=True):
                if what == "dropped":
                    param.grad = None
                elif what == "zeroed" and param.grad is not None:
                    local_range(param.grad).zero_()


def _options_of(optimizer: Optimizer) -> list[tuple[tuple[str, Any], ...]]:
    """Return the numeric options (such as ``lr``) of each parameter group."""
    return [
        tuple(
            (name, value.item() if isinstance(value, Tensor) else value)
            for name, value in group.items()
            if isinstance(value, int | float | tuple | Tensor)
        )
        for group in optimizer.param_groups
    ]
