"""``OutOfForwardUse``: runs operations on sharded parameters outside of their unit's forward.

A module may read a weight of a child module, and a user may call ``model.encoder(...)``. Outside of
its unit's forward, a module has sharded parameters. If an operation needs more than this rank's
part of a parameter, ``OutOfForwardUse`` runs the operation on the full parameter.

[Note: which full tensor]
If a forward of the model is running, the parameter's unit is unsharded until the forward that
contains the operation ends. Later operations then read plain tensors, and backward works as for the
unit's own forward. Between forwards, the unit is unsharded only for the operation. If no graph is
recorded (``generate``), only the parameter is all-gathered. A tensor that an earlier operation has
computed from sharded parameters (``1 + weight``) is sharded, too, and is all-gathered separately.

[Note: gathered copies]
An operation on a sharded parameter outside of forward computes with a full copy of the parameter. A
user's write to the copy would not reach the parameter. So results that share memory with the copy
become ``GatheredView``s, which raise on writes.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from flatshard.engine.backward import Backward
from flatshard.engine.forward import Forward
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Phase, Unit
from flatshard.memory import checksum
from flatshard.precision import get_grad, tensors_in
from flatshard.tensor.shard_spec import ParamOwner, ShardSpec
from flatshard.tensor.sharded_tensor import (
    FlatShardTensor,
    Source,
    is_collective,
    is_counted,
    is_unreduced,
    sharded_in,
    untraced,
)
from flatshard.units.module_tree import unit_text

Call: TypeAlias = Callable[[dict[int, Any]], Any]


class OutOfForwardUse(ParamOwner):
    """Runs operations on sharded parameters of one model, outside of their units' forwards."""

    def __init__(self, state: RunState, forward: Forward, backward: Backward) -> None:
        """Become the ``ParamOwner`` of all parameters, for operations outside of forward."""
        self._state, self._forward, self._backward = state, forward, backward
        # Maps the `ShardSpec` of each sharded parameter to the flat parameter.
        self._handles = {param.spec: one for one in state.handles for param in one.params}
        # Units for which a warning was given. The set contains None after the warning about
        # averages of weights.
        self._warned: set[Unit | None] = set()
        for spec in self._handles:
            # A `ShardSpec` keeps only a weak reference to its owner. Otherwise there would be a
            # cycle through autograd, which the garbage collector could not free.
            spec.owner = self

    def assign(self, tensor: FlatShardTensor, value: Tensor) -> None:
        if value.is_inference() or not tensor.is_unit_parameter:
            super().assign(tensor, value)
            if type(value) is Tensor and get_grad(tensor.spec.original.sharded) is tensor:
                # `p.grad.data = value`: later writes to `value` must change the gradient.
                tensor.spec.original.sharded.grad = value
            return
        if isinstance(value, Parameter):  # `model.to()` fails for parameters with weak references
            value = value.detach()
        handle = self._handles[tensor.spec]
        handle.unit.state_dict.writes.assign(handle, tensor.spec.original, value)

    def start_backward(self) -> None:
        self._backward.begin()

    def bring_back(self, spec: ShardSpec) -> bool:
        handle = self._handles[spec]
        # Backward does not unshard flat parameters that have only embedding tables, because the
        # backward of a lookup does not read the table. But operations other than lookups do.
        is_backward = handle.unit.phase is Phase.BACKWARD and self._backward.is_running
        if handle.is_lookup and is_backward:
            self._backward.unshard_again(handle.unit)
        return handle.is_lookup and is_backward

    @property
    def is_in_forward(self) -> bool:  # type: ignore[override]
        # Activation checkpointing recomputes a forward in backward, with gradients enabled.
        return self._state.depth > 0 or (torch.is_grad_enabled() and self._backward.is_running)

    def run_full(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with full tensors in place of sharded tensors. Collective.

        Returns NotImplemented for the cases that the caller handles: a sharded argument is an
        unreduced gradient, was computed from random numbers, or belongs to another model, or
        ``func`` writes to it in a forward. Raises RuntimeError if ``func`` writes to a full tensor
        that is not its first argument.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        sharded = [t for t in leaves if isinstance(t, FlatShardTensor)]
        writes = _writes(func, args)
        # Between steps, also accept sharded tensors that were computed with plain tensors, such as
        # a target network's new value. `full_tensor` raises if plain tensors differ between ranks.
        most = Source.GRADIENTS if writes or self._state.is_running else Source.OTHER
        if any(is_unreduced(t) or t.spec not in self._handles for t in sharded):
            return NotImplemented
        if any(t.shard_origin.is_arriving or t.shard_origin.source > most for t in sharded):
            return NotImplemented
        records = torch.is_grad_enabled() and any(t.requires_grad for t in sharded)
        is_one = writes and func.__name__ != "__set__" and isinstance(args[0], FlatShardTensor)
        if writes and (records or self.is_in_forward or not is_one):
            return NotImplemented
        name = _name(func)
        for tensor in sharded:
            tensor.spec.refuse_part(name)

        def run(full_of: dict[int, Tensor]) -> Any:
            full = pytree.tree_unflatten([full_of.get(id(t), t) for t in leaves], tree)
            return func(*full[0], **full[1])

        def call(full_of: dict[int, Tensor]) -> Any:
            before = states(func, full_of.values())
            result = run(full_of)
            if before != states(func, full_of.values()):
                sharded[0].spec.refuse(f"{name}, which writes to it,")
            return result

        def write(full_of: dict[int, Tensor]) -> Any:
            target: FlatShardTensor = args[0]
            full = full_of[id(target)]
            before = full.data_ptr(), full.shape, full.stride()
            try:
                run(full_of)
            except RuntimeError as error:
                where = target.spec.where(target.text)
                raise RuntimeError(f"{where}: {name} failed: {error}") from error
            if before != (full.data_ptr(), full.shape, full.stride()):
                target.refuse(name)
            if full.requires_grad:
                raise RuntimeError(
                    f"{target.spec.where(target.text)}: {name} writes values that require a "
                    "gradient, which no backward would reach. Write value.detach(), or write under "
                    "torch.no_grad()."
                )
            target.copy_(full)
            return None if func.__name__ == "__setitem__" else target

        if records or self.is_in_forward:
            result = self._run_unsharded(call, sharded)
        else:
            result = self._run_alone(write if writes else call, sharded, casts=not writes)
        # Warn after the collectives: if Python's filter turns the warning into an error, no other
        # rank waits for this rank.
        for tensor in sharded:
            self._warn(tensor, name, is_average=name[-1] == "_" != name[-2] and not writes)
        return result

    def _run_unsharded(self, call: Call, sharded: list[FlatShardTensor]) -> Any:
        of = sharded[0]
        units = dict.fromkeys(self._handles[t.spec].unit for t in sharded if t.is_unit_parameter)
        with self.unsharded(units) as is_outermost:
            apart = {id(t): t.full_tensor() for t in sharded if not t.is_unit_parameter}
            params = {id(t): t.spec.original.full for t in sharded if t.is_unit_parameter}
            result = as_views(call({**apart, **params}), apart.values(), of, copies=False)
            # Between forwards (`is_outermost`), return copies of views, because the unit is
            # resharded when this context ends. In a forward, views stay valid until its end.
            return as_views(result, params.values(), of, copies=True) if is_outermost else result

    def _run_alone(self, call: Call, sharded: list[FlatShardTensor], *, casts: bool) -> Any:
        if not self._state.has_run:  # `begin` runs the checks that precede the first forward
            self._forward.begin()
            self._forward.end(failed=False)
        for handle in {h for t in sharded for h in self._handles[t.spec].unit.handles}:
            if handle.summoned is not None:
                handle.summoned.refuse()
        copies = {}
        with torch.inference_mode(False), torch.no_grad():
            for t in sharded:
                # Copy a parameter to the device and dtype in which the unit computes.
                like = t.spec.original.full if casts and t.is_unit_parameter else t
                copies[id(t)] = t.full_tensor().to(like.device, like.dtype)
        return as_views(call(copies), copies.values(), sharded[0], copies=False)

    @contextlib.contextmanager
    def unsharded(self, units: Iterable[Unit]) -> Iterator[bool]:
        """Unshard ``units`` inside the context. Collective.

        Yields True if the units are resharded at the end of the context, and False if they stay
        unsharded, because the context is inside of a forward.
        """
        state, forward = self._state, self._forward
        is_outermost = not (self.is_in_forward or forward.begins_recomputation())
        if is_outermost:
            forward.begin()
            state.depth += 1
        packs = not is_counted()
        if packs:
            forward.saved.push()
        failed = True
        try:
            for unit in units:
                self._unshard(unit)
            yield is_outermost
            failed = False
        finally:
            if packs:
                forward.saved.pop()
            if is_outermost:
                state.depth -= 1
                forward.reshard_used_outside()
                forward.end(failed=failed)

    def _unshard(self, unit: Unit) -> None:
        unit.is_used_outside |= torch.is_grad_enabled()
        if self._backward.is_running:
            self._backward.unshard(unit)
            self._backward.unshard_again(unit)
        else:
            self._forward.unshard_outside(unit)

    def _warn(self, tensor: FlatShardTensor, name: str, *, is_average: bool) -> None:
        unit = self._handles[tensor.spec].unit
        # If an operation writes to a plain tensor and reads a parameter, it usually updates an
        # average of weights, in a loop over all parameters. So warn only once for all units.
        what = None if is_average else unit
        if what in self._warned or unit.topology.world.rank != 0:
            return
        self._warned.add(what)
        remedy = "The result is right, but the all-gather takes time, and all ranks must take part."
        if is_average:
            remedy = "To average without communication, use copy.deepcopy(model) after wrapping."
        elif tensor.shard_origin.source is Source.PARAMETERS:
            remedy += (
                " Make the module that uses the parameter a unit (auto_wrap_policy), or call the "
                "unit's module. For calls of parts of a model, such as generate(), use "
                "summon_full_params(model, writeback=False)."
            )
        warnings.warn(
            f"{unit_text(unit.name)}: {name} uses {tensor.text} outside of the unit's forward, so "
            f"the tensor is all-gathered. {remedy} This warning is given once"
            f"{'.' if is_average else ' for each unit.'}",
            stacklevel=5,
        )


def _writes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation, according to its name, writes in place to a sharded tensor."""
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and name[-2:] != "__")
    return in_place and next(sharded_in(args[:1]), None) is not None


# ------------------------------------------------------------ results that must not be written


def _version(tensor: FlatShardTensor) -> int:
    return 0 if tensor.local.is_inference() else tensor.local._version


# Functions that act on a tensor's node in the graph. `__torch_function__` calls them with the view
# itself, because an ordinary tensor with the view's memory has another node.
_OF_NODES = [Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, torch.autograd.grad]
_OF_NODES += [getattr(Tensor, name).__get__ for name in ("grad", "grad_fn", "is_leaf")]


class GatheredView(Tensor):
    """A tensor that shares memory with a full copy of a parameter; see [Note: gathered copies].

    Reads work until the parameter changes. Writes raise: they would not reach the parameter.
    """

    of: FlatShardTensor  # the sharded tensor that the view shows
    version: int  # version of the shard when the view was made

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            # An assignment to an attribute writes no element.
            if func.__name__ == "__set__" or func in _OF_NODES:
                return func(*args, **kwargs or {})
            # Replace each view by an ordinary tensor that shares the view's memory and version
            # counter. Below, the counter shows whether the function has written to the tensor.
            views = [t for t in leaves if isinstance(t, GatheredView)]
            plain = {id(t): t.as_subclass(Tensor) for t in views}
        for view in views:
            if _version(view.of) != view.version:
                raise RuntimeError(
                    f"parameter {view.of.spec.name!r}: {_name(func)} reads a view that was "
                    "taken outside of forward (p[0], p.detach().T), but parameters of the unit "
                    "were written since. The view shows a copy of the old values. Take the view "
                    "again, or keep a clone() of it for the old values."
                )
        before = states(func, plain.values())
        if is_collective(func):  # a collective may write without a change of the version counter
            raise _lost(func, views[0])
        args, kwargs = pytree.tree_unflatten([plain.get(id(t), t) for t in leaves], tree)
        result = func(*args, **kwargs)
        if before != states(func, plain.values()):
            raise _lost(func, views[0])
        if func is Tensor.numpy:
            result.flags.writeable = False
        return as_views(result, plain.values(), views[0].of, copies=False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator that C++ code, such as a ``ProcessGroup``, calls with this view.

        Raises RuntimeError if the operator is a collective, or writes to the view.
        """
        if is_collective(func) or (func._schema.is_mutable and isinstance(args[0], GatheredView)):
            raise _lost(func, next(t for t in tensors_in(args, depth=0) if type(t) is GatheredView))
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs or {})


def states(func: Any, tensors: Iterable[Tensor]) -> list[object]:
    """Return a version or checksum of each tensor, which changes if ``func`` writes to it."""
    # Some operators of torch write without a change of the version counter: batch norm to its
    # running statistics, and a randomised ReLU to its noise.
    if any(part in func.__name__ for part in ("batch_norm", "rrelu")):
        return [checksum(tensor) for tensor in tensors]
    return [tensor._version for tensor in tensors]


def _lost(func: Any, view: GatheredView) -> RuntimeError:
    """Return the error for a function that writes, or may write, to a ``GatheredView``."""
    return RuntimeError(
        f"{view.of.text}: {_name(func)} writes to a view that was taken outside of forward. The "
        "view shows a copy, so the edit would be lost. To edit, change a full copy on all ranks, "
        "and write it back under torch.no_grad(): full = p.full_tensor(); full[0] = 0; "
        "p.copy_(full), and likewise for p.grad. If the edit need not reach the model, edit a "
        "clone() of the view."
    )


def _name(func: Any) -> str:
    return torch.overrides.resolve_name(func) or func.__name__  # type: ignore[no-any-return]


def as_views(result: Any, full: Collection[Tensor], of: FlatShardTensor, *, copies: bool) -> Any:
    """Return ``result`` with ``GatheredView``s in place of tensors that share memory with ``full``.

    ``full``: full copies of the parameter ``of``. ``copies``: whether to clone the tensors that
    share memory with ``full``, because the memory is about to be freed.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in full}

    def view(tensor: Tensor) -> Tensor:
        if tensor.is_sparse or tensor.untyped_storage()._cdata not in storages:
            return tensor
        if copies:
            # `GatheredView` notices writes by the version counter, which a tensor that is made in
            # inference mode does not have.
            with torch.inference_mode(False):
                tensor = tensor.clone()
        # `as_subclass` would return another node of the graph: no leaf, and without hooks.
        if tensor.requires_grad and (tensor.is_leaf or tensor._backward_hooks):
            return tensor
        shown = tensor.as_subclass(GatheredView)
        shown.of, shown.version = of, _version(of)
        return shown

    # `tree_map_only` would turn a torch.Size into a plain tuple.
    is_size = isinstance(result, torch.Size)
    return result if is_size else pytree.tree_map_only(Tensor, view, result)
