"""``Join``: ranks that have no input left follow the steps of those that have.

[Note: what a rank that has joined does]
It computes nothing, but takes part in all that needs every rank. The others say on a group apart
what they begin next: a forward, an all-gather, the end of a backward, a step of an optimizer. It
does likewise with gradients of zero, so that its shards, and its optimizers' state, stay a part of
the same model. DistributedDataParallel instead lets it keep old parameters and sends it the last
ones at the end. As long as nobody has joined, ranks say one thing per forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatshard.engine.buffer_sync import BufferSync
from flatshard.engine.context import RunContext
from flatshard.engine.events import Kind, StepObserver
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import ShardState
from flatshard.engine.unit import Unit
from flatshard.module.sharding import Sharding, shardings_in
from flatshard.optimizer import in_backward, step
from flatshard.tensor.sharded_tensor import local_range

_WAITS = "join(): this rank has no input left, and waits for what the others do next"
_FOLLOWS = (
    "A rank that has no input left follows forward, backward, model.clip_grad_norm_() and the "
    "steps of element-wise optimizers."
)
# What a failure of one rank is sent as.
_FAILED = "failed"


class Doing(NamedTuple):
    """What a rank begins."""

    kind: str
    detail: tuple[Any, ...] = ()
    options: tuple[Any, ...] = ()  # of the optimizers that stepped, to compare


@contextlib.contextmanager
def joining(
    sharding: Sharding,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    by_initial_size: bool,
    throws: bool,
) -> Iterator[None]:
    """See ``ShardedWrapper.join``. Collective: all ranks, at entry and at the end."""
    context = sharding.check_between_steps("join()")
    _check(sharding, context)
    known = [*optimizers, *step.stepped()]
    join = Join(sharding, known, by_initial_size=by_initial_size, throws=throws)
    hooks = (
        register_optimizer_step_pre_hook(join.before_step),
        register_optimizer_step_post_hook(join.after_step),
    )
    context.observers.add(join, first=True)
    try:
        yield
        join.follow()
    finally:
        context.observers.remove(join)
        for hook in hooks:
            hook.remove()
        join.end()


def following(sharding: Sharding, *arguments: Any) -> AbstractContextManager[None]:
    """Around ``clip_grad_norm_(*arguments)`` of a wrapper: ranks that have joined do the same."""
    join = sharding.context.observers.find(Join)
    return contextlib.nullcontext() if join is None else join.clipping(sharding, arguments)


def _check(root: Sharding, context: RunContext) -> None:
    """Raise where a rank could not follow; alike on all ranks."""
    if context.root is not root.unit:
        raise RuntimeError(f"join(): unit {root.unit.name!r} is not the outermost wrapper.")
    in_backward.refuse(context, "join()")
    world = context.state.world
    for unit in context.units:
        reason = ""
        if unit.may_diverge:
            reason = "may be skipped by some ranks (allow_divergence)"
        elif unit.topology.world.size < world.size:
            reason = "trains on some of the ranks alone"
        elif any(handle.gather.secondary.is_kept for handle in unit.handles):
            reason = "keeps secondary shards (reshard_after_forward=k, HYBRID_SHARD_OP)"
        elif any(handle.comm_hook is not None for handle in unit.handles):
            reason = "has a communication hook"
        if reason:
            raise NotImplementedError(
                f"join(): unit {unit.name!r} {reason}. Give every rank equally many batches: "
                "DistributedSampler(drop_last=True)."
            )


class Join(StepObserver):
    """What one rank says and does inside ``join()``."""

    def __init__(
        self,
        root: Sharding,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        by_initial_size: bool,
        throws: bool,
    ) -> None:
        self._root, self._state = root, root.context.state
        self._by_initial_size, self._throws = by_initial_size, throws
        self._comm = self._state.world.apart
        self._buffers = self._state.observers.find(BufferSync)
        self._handles = [handle for _, handle in self._state.handles]
        self._params = [param for handle in self._handles for param in handle.sharded]
        self._numbers = {id(param): number for number, param in enumerate(self._params)}
        self._active = list(range(self._comm.size))  # that had input at the last exchange
        self._is_following = False
        self._grad_enabled = False
        self._syncs = self._state.syncs, self._state.under_no_sync
        self._optimizers = weakref.WeakSet(one for one in optimizers if self._holds(one))
        self._options: dict[str, Any] = {}  # of the step that runs
        # Of each gradient that backward, or clipping, left: which tensor, and its version.
        self._published = dict.fromkeys(range(len(self._params)), (0, 0))
        self._kept: tuple[str, ...] = ()
        self._versions: list[int] = []
        self._note_grads()

    @property
    def _leads(self) -> bool:
        """Whether this rank has input, and others follow it."""
        return len(self._active) < self._comm.size and not self._is_following

    # ------------------------------------------------------------ what ranks tell each other

    def _exchange(self, mine: Doing | None) -> Doing | None:
        """Say what this rank begins, None: it has joined; returns what the others begin.

        Collective: all ranks. Raises RuntimeError, on all of them, where they differ or one failed.
        """
        name = _WAITS if mine is None else f"join(): what follows is {mine.kind}"
        heard: list[Doing | None] = self._comm.gather_objects(mine, op_name=name)
        doing = {rank: one for rank, one in enumerate(heard) if one is not None}
        for rank, one in doing.items():
            if one.kind == _FAILED:
                raise RuntimeError(f"join(), rank {rank}: {one.detail[0]}")
        if not doing:
            return None
        self._active = list(doing)
        first = doing[self._active[0]]
        for rank, one in doing.items():
            if one[:2] != first[:2]:
                raise RuntimeError(
                    f"join(): rank {self._active[0]} begins {first.kind} {first.detail}, rank "
                    f"{rank} begins {one.kind} {one.detail}. Ranks that have input must do alike."
                )
            self._check_options(rank, dict(one.options), dict(first.options))
        return first

    def _check_options(self, rank: int, theirs: dict[Any, Any], first: dict[Any, Any]) -> None:
        for key in theirs.keys() & first.keys():
            if theirs[key] != first[key]:
                raise RuntimeError(
                    f"join(): options of {key[0]} are {first[key]} on rank {self._active[0]} and "
                    f"{theirs[key]} on rank {rank}. A scheduler that steps with every batch falls "
                    "behind on a rank that has no input left: step it once per epoch, or load the "
                    "state of another rank's."
                )

    def _fail(self, message: str) -> None:
        self._exchange(Doing(_FAILED, (f"{message} {_FOLLOWS}",)))

    # ------------------------------------------------------------ a rank that has input

    def begin_forward(self) -> None:
        if self._is_following:
            return
        state = self._state
        if self._leads:
            self._check_unedited()
        syncs = tuple(sync.value for sync in state.syncs)
        detail = (torch.is_grad_enabled(), syncs, state.under_no_sync)
        options = tuple((self._key(one), _options_of(one)) for one in self._optimizers)
        self._exchange(Doing("a forward", detail, options))
        if self._throws and self._leads:
            raise RuntimeError(
                "join(throw_on_early_termination=True): ranks "
                f"{sorted(set(range(self._comm.size)) - set(self._active))} have no input left."
            )
        self._begin()

    def _begin(self) -> None:
        """A forward begins, with or without this rank."""
        size, num_active = self._comm.size, len(self._active)
        self._state.lacks_ranks = num_active < size
        for handle in self._handles:
            handle.grad_publish.scale = 1.0 if self._by_initial_size else size / num_active
        if self._buffers is not None:
            self._buffers.source = self._active[-1]  # as DistributedDataParallel
        self._note_versions()

    def enter_forward(self, unit: Unit, recomputes: bool) -> None:
        state = self._state
        if self._leads and unit is state.root and not (state.depth or recomputes):
            self._exchange(Doing("the root's forward"))

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[None]:
        if kind is Kind.STARTING and self._leads and unit is not None and purpose != "reduce":
            return self._announcing(unit, purpose)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _announcing(self, unit: Unit, purpose: str) -> Iterator[None]:
        """Say which all-gathers were started inside."""
        before = [handle.state for handle in unit.handles]
        yield
        for handle, was in zip(unit.handles, before, strict=True):
            if handle.state is ShardState.UNSHARDING and was is not ShardState.UNSHARDING:
                self._exchange(Doing("an all-gather", (self._handles.index(handle), purpose)))

    def begin_backward(self) -> None:
        if self._leads:
            self._kept = self._look()

    def votes(self) -> list[int]:
        if self._leads:  # before the exchange at the end of backward, in which all take part
            self._exchange(Doing("the end of a backward", (self._kept,)))
        return []

    def end_backward(self) -> None:
        self._note_grads(reduced_only=True)

    @contextlib.contextmanager
    def clipping(self, sharding: Sharding, arguments: tuple[Any, ...]) -> Iterator[None]:
        if self._leads:
            number = shardings_in(self._root.wrapper).index(sharding)
            self._exchange(Doing("clip_grad_norm_()", (self._look(), number, arguments)))
        yield
        self._note_grads()

    # ------------------------------------------------------------ optimizers

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_following or not self._holds(optimizer):
            return
        self._optimizers.add(optimizer)
        self._options[self._key(optimizer)] = _options_of(optimizer)
        if self._leads:
            self._check_unedited()
            if not step.is_elementwise(optimizer):
                self._fail(f"{type(optimizer).__name__} is not known to be element-wise.")

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # In a backward a hook of the user's steps, as it does on ranks that follow.
        in_hook = torch._C._current_graph_task_id() != -1
        if self._leads and not in_hook and self._holds(optimizer):
            key = self._key(optimizer)
            self._exchange(Doing("a step", (key, self._options.pop(key), self._look())))
        self._note_versions()

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(param) in self._numbers for group in groups for param in group["params"])

    def _key(self, optimizer: torch.optim.Optimizer) -> Any:
        """What the same optimizer has on every rank."""
        groups = optimizer.param_groups
        numbers = tuple(tuple(self._numbers.get(id(p), -1) for p in g["params"]) for g in groups)
        return type(optimizer).__name__, numbers

    # ------------------------------------------------------------ what nobody follows

    def _note_grads(self, *, reduced_only: bool = False) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for unit, handle in self._state.handles:
                # What `no_sync` accumulates is this rank's own, and not with the others.
                if unit.sync is Sync.ALL or not reduced_only:
                    for param in handle.sharded:
                        grad = param.grad
                        key = (0, 0) if grad is None else (id(grad), local_range(grad)._version)
                        self._published[self._numbers[id(param)]] = key

    def _look(self) -> tuple[str, ...]:
        """What became of each gradient; raises, on all ranks, where some were edited."""
        found, is_changed = [], False
        with torch._C.DisableTorchFunctionSubclass():
            for number, param in enumerate(self._params):
                grad, (key, version) = param.grad, self._published[number]
                is_kept = grad is not None and id(grad) == key
                found.append("kept" if is_kept else "dropped")
                is_changed |= grad is not None and is_kept and local_range(grad)._version != version
            if not is_changed:
                return tuple(found)
            grads = [param.grad for param in self._params]
            is_zero = not any(grad is not None and local_range(grad).any() for grad in grads)
        if not is_zero:
            self._fail("gradients were edited after backward.")
        # By `zero_grad(set_to_none=False)`.
        return tuple("zeroed" if one == "kept" else one for one in found)

    def _note_versions(self) -> None:
        self._versions = [handle.version for handle in self._handles]

    def _check_unedited(self) -> None:
        if self._versions != [handle.version for handle in self._handles]:
            self._fail("parameters were edited between steps.")

    # ------------------------------------------------------------ a rank that has none

    def follow(self) -> None:
        """Do what the others do until all have joined."""
        self._is_following, failure = True, None
        while doing := self._exchange(failure):
            if self._throws:
                raise RuntimeError(
                    "join(throw_on_early_termination=True): this rank has no input left."
                )
            try:
                self._do(doing)
            except Exception as error:
                failure = Doing(_FAILED, (f"{type(error).__name__}: {error}",))
        if self._buffers is not None:
            self._buffers.source = self._active[-1]
            self._buffers.broadcast("join(): buffers of the last rank that had input")

    def _do(self, doing: Doing) -> None:
        actions: dict[str, Callable[..., None]] = {
            "a forward": self._follow_forward,
            "the root's forward": self._follow_root,
            "an all-gather": self._follow_gather,
            "the end of a backward": self._follow_backward,
            "clip_grad_norm_()": self._follow_clipping,
            "a step": self._follow_step,
        }
        actions[doing.kind](*doing.detail)

    def _follow_forward(self, grad_enabled: bool, syncs: list[str], under_no_sync: bool) -> None:
        state = self._state
        state.pending_sends.wait_sends()
        self._grad_enabled = state.expects_backward = grad_enabled
        state.syncs, state.under_no_sync = [Sync(sync) for sync in syncs], under_no_sync
        if grad_enabled:
            state.plan_syncs()
        self._begin()

    def _follow_root(self) -> None:
        if self._buffers is not None:
            with torch.set_grad_enabled(self._grad_enabled):
                self._buffers.enter_forward(self._state.root, False)

    def _follow_gather(self, number: int, purpose: str) -> None:
        handle = self._handles[number]
        handle.unshard(purpose)
        handle.wait_unshard()
        handle.reshard()

    def _follow_backward(self, kept: tuple[str, ...]) -> None:
        self._treat_grads(kept)
        for unit in self._state.units:
            unit.count_trainable()
        begin = self._handles[0].params.specs[0].on_outside_grad

        def hook(_: torch.Tensor) -> None:
            assert begin is not None, "every handle has a run"
            begin()

        with torch.enable_grad():
            # A backward without gradients, of which all remains to be done at its end.
            nothing = torch.zeros((), requires_grad=True) * 1
            nothing.register_hook(hook)
            nothing.backward()

    def _follow_clipping(self, kept: tuple[str, ...], number: int, arguments: Any) -> None:
        self._treat_grads(kept)
        shardings_in(self._root.wrapper)[number].wrapper.clip_grad_norm_(*arguments)

    def _follow_step(self, key: Any, options: list[Any], kept: tuple[str, ...]) -> None:
        self._treat_grads(kept)
        found = [one for one in self._optimizers if self._key(one) == key]
        if len(found) != 1:
            raise RuntimeError(
                f"{key[0]} has stepped on other ranks, and this one knows {len(found)} such over "
                "the same parameters, of those that have stepped here. Where a rank may have no "
                "input at all, pass them: join(optimizers=[optimizer])."
            )
        self._state.pending_sends.wait_sends()
        optimizer = found[0]
        others = []
        for group, theirs in zip(optimizer.param_groups, options, strict=True):
            for name, value in theirs.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
            others += [one for one in group["params"] if id(one) not in self._numbers]
        grads = [one.grad for one in others]
        for one in others:  # this rank's own, which has no input to be trained with
            one.grad = None
        optimizer.step()
        for one, grad in zip(others, grads, strict=True):
            one.grad = grad

    def _treat_grads(self, kept: tuple[str, ...]) -> None:
        """As the ranks that have input did, between their backwards and steps."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param, what in zip(self._params, kept, strict=True):
                if what == "dropped":
                    param.grad = None
                elif what == "zeroed" and param.grad is not None:
                    local_range(param.grad).zero_()

    def end(self) -> None:
        """Leave the model as it was before the context."""
        self._state.syncs, self._state.under_no_sync = self._syncs
        self._state.lacks_ranks = False
        for handle in self._handles:
            handle.grad_publish.scale = 1.0
        if self._buffers is not None:
            self._buffers.source = 0


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, per group; what is no number is alike anyway."""
    return [
        {name: _plain(value) for name, value in group.items() if _is_plain(value)}
        for group in ({**one, "params": None} for one in optimizer.param_groups)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value
