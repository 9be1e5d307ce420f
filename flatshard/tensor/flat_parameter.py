"""``FlatParameter``: parameters of a unit, flattened, padded, and divided among the ranks.

``OriginalParam``: one parameter of the unwrapped model, whose elements are in a flat parameter.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from flatshard.comm.communicator import Topology
from flatshard.comm.work import PendingSends
from flatshard.memory import OffloadTargets
from flatshard.options.precision import ParamPrecision
from flatshard.tensor import sharded_tensor
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, Origin
from flatshard.tensor.unsharded import averaged, register_hook
from flatshard.units.layout import FlatLayout, view_of
from flatshard.units.module_tree import ParamInfo, unit_text


@dataclass(eq=False)
class FlatParamPlan:
    """How to make one flat parameter: its layout, process groups, devices and dtypes.

    A conversion (``model.to(...)``) does not change the plan. ``unit_name`` and ``pending_sends``
    change if the user later wraps a module that contains the unit.
    """

    unit_name: str  # name of the unit, for errors
    device: torch.device  # device on which modules compute
    # All parameters in a flat parameter have the same dtype, `requires_grad` and precision.
    dtype: torch.dtype  # dtype of the shards
    requires_grad: bool
    precision: ParamPrecision
    # The parameters before wrapping. `lay_out` puts them in the layout's order.
    infos: list[ParamInfo] = field(default_factory=list)
    layout: FlatLayout = field(init=False)  # set once the number of ranks is known
    topology: Topology = field(init=False)  # set when the unit is made, like `targets`
    targets: OffloadTargets = field(init=False)
    # The model's collectives whose sent tensors other ranks may still be reading.
    pending_sends: PendingSends = field(init=False, default_factory=PendingSends)

    def take_params(self) -> list[OriginalParam]:
        """Make an ``OriginalParam`` for each of ``infos``, and remove ``infos`` to free memory."""
        infos, self.infos = self.infos, []
        return [OriginalParam(info, index, self) for index, info in enumerate(infos)]


class FlatParameter(nn.Parameter):
    """Parameters of one unit as a padded 1-D parameter, of which each rank stores an equal chunk.

    The tensor contains only this rank's chunk, ``(flat_layout.shard_numel,)``. Optimizers get the
    original parameters instead, which are views of the chunk.

    Example:
        ```python
        flat_param = model.flat_parameters()[0]
        print(flat_param.flat_layout.spans)  # where each original parameter lies
        print([param.name for param in flat_param.params], flat_param.flat_layout.padding_numel)
        ```

    Attributes:
        flat_layout: the position of each original parameter in the flat parameter, the number of
            padding elements, and the range of each rank.
        rank: index of this rank's chunk, below ``flat_layout.world_size``.
    """

    flat_layout: FlatLayout
    rank: int
    _params: Sequence[weakref.ref[OriginalParam]]
    data = sharded_tensor.LocalView.data  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, chunk: Tensor, layout: FlatLayout, rank: int, params: Sequence[OriginalParam]
    ) -> FlatParameter:
        """Make a flat parameter that shares the memory of ``chunk``, ``(layout.shard_numel,)``."""
        # No `requires_grad`: autograd computes gradients of the full parameters, not of the chunk.
        self: FlatParameter = Tensor._make_subclass(cls, chunk, False)
        self.flat_layout, self.rank = layout, rank
        # Use weak references: each original parameter refers to a view of the chunk, and the view
        # refers to this object. Python's garbage collector does not see the view's reference, so it
        # would never free a cycle of these objects.
        self._params = [weakref.ref(param) for param in params]
        return self

    @property
    def params(self) -> list[OriginalParam]:
        """The original parameters in the flat parameter. Empty if the model was deleted."""
        return [param for known in self._params if (param := known()) is not None]


def is_wrapped(param: Tensor) -> bool:
    """Whether a parameter belongs to a wrapped model, sharded or not."""
    # Recognise a parameter that is not sharded (NO_SHARD) by a hook that flatshard registers.
    hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
    return isinstance(param, FlatShardTensor) or any(hasattr(h, "of_flatshard") for h in hooks)


class OriginalParam:
    """One parameter of the unwrapped model, and its position in a flat parameter.

    Attributes:
        index: number of the parameter within the flat parameter.
        span: range of the parameter's elements in the flat parameter. The same on all ranks.
        spec: ``span``, and this rank's part of ``span``. The parameter's sharded tensor, gradients
            and optimizer state share this object.
        locations: the modules and attributes that refer to the parameter. The name of the first
            location is the parameter's name.
        sharded: the parameter object for users and optimizers. If the model is sharded, a
            ``FlatShardTensor`` that is a view of this rank's chunk. If this rank stores all
            elements, a plain parameter.
        full: the plain parameter with which modules compute, a view of the unsharded buffer.
            ``full`` and ``sharded`` have the same ``__dict__``. If the chunk itself is the
            unsharded buffer (this rank stores all elements, and forward computes in the same
            dtype), ``full`` is ``sharded``.
        kept_grad: the tensor object that was last put into ``.grad``. `Gradients.publish` reuses
            the object if the program does not refer to it. While the object waits for reuse, its
            ``__dict__`` is empty.
        taken_grad: weak reference to the tensor that the running backward has taken out of
            ``.grad``, or a function that returns None. If the program still refers to the tensor,
            the next gradient is stored in the same Python object.
        published: if the parameter is not sharded, weak reference to the gradient that was last put
            into ``.grad``. Otherwise, and before the first gradient, a function that returns None.
        post_accumulate_hooks: users' hooks (``register_post_accumulate_grad_hook``), to call
            once the reduced gradient is in ``.grad``.
    """

    full: nn.Parameter

    def __init__(self, info: ParamInfo, index: int, plan: FlatParamPlan) -> None:
        self.index, self.sharded, self.locations = index, info.param, info.locations
        layout, topology = plan.layout, plan.topology
        self.span = layout.spans[index]
        self.spec = ShardSpec(
            info.name,
            plan.unit_name,
            self.span,
            layout.local_span(index, topology.index),
            comm=topology.shard,
            replicas=topology.replicate,
            # Set by `extras/tensor_parallel`, if the parameter was a DTensor before wrapping.
            tensor_parallel=getattr(info.param, "dtensor_split", None),
            # Where to store optimizer state with one value per element. None: beside the shard.
            state_target=plan.targets.state,
            holders=lambda: layout.holders(index, topology.holders),
            division=(layout.division(index), topology.shard.ranks, topology.inter_group.size),
        )
        self.kept_grad: Any = None
        self.taken_grad: Callable[[], object] = NoneType
        self.published: Callable[[], object] = NoneType
        self.post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        # Tensor hooks from before wrapping, until `make_full` moves the hooks to `full`.
        self._waiting_hooks: Any = None
        self._grad_hook: Any = None
        self.spec._original = weakref.ref(self)

    @property
    def name(self) -> str:
        """The parameter's name in the unwrapped model."""
        return self.spec.name

    @property
    def where(self) -> str:
        """Text for messages, with the names of the parameter and its unit."""
        return f"parameter {self.spec.name!r} ({unit_text(self.spec.unit)})"

    @property
    def is_sharded(self) -> bool:
        """Whether ``sharded`` is a ``FlatShardTensor``."""
        return isinstance(self.sharded, FlatShardTensor)

    # ------------------------------------------------------------ the sharded parameter

    def show_chunk(self, chunk: Tensor, *, is_whole: bool) -> None:
        """Make ``sharded`` a view of its range of ``chunk``, this rank's shard ``(shard_numel,)``.

        ``is_whole``: whether the chunk is the whole flat parameter. Then ``sharded`` is a plain
        parameter.
        """
        # Until the first forward, `weight` of a module with `nn.utils.spectral_norm` is
        # `weight_orig.data`, and programs may initialize `weight`.
        address, views = self.sharded.data_ptr(), list[tuple[nn.Module, str]]()
        for module in (place.module for place in self.locations):
            names = (h.name for h in module._forward_pre_hooks.values() if type(h) is SpectralNorm)
            views += [(module, n) for n in names if getattr(module, n).data_ptr() == address != 0]
        if not is_whole:
            sharded = FlatShardTensor.parameter(chunk, self.spec, self.sharded.requires_grad)
            # A user's `torch.autograd.Function` returns a full gradient for this rank's batch. All
            # other gradients of sharded parameters are averaged already.
            with torch._C.DisableTorchFunctionSubclass():
                register_hook(sharded, Tensor.register_hook, partial(averaged, self.spec))
            self._swap_into(sharded)
        elif self.sharded.is_meta:
            self._swap_into(nn.Parameter(view_of(chunk, self.span), self.sharded.requires_grad))
        else:
            # An assignment to `.data` replaces only the memory, not the hooks and attributes.
            self.sharded.data = view_of(chunk, self.span)
        for module, name in views:
            setattr(module, name, self.sharded.data)
        if is_whole and self.spec.state_target is not None:
            self.spec.state_target.keep_state_of(self.sharded)

    def _swap_into(self, view: Tensor, *, tries: int = 2) -> None:
        """Turn the parameter object ``sharded`` into the tensor ``view``.

        Modules, optimizers and users keep the same Python object, with the same attributes.
        """
        param = self.sharded
        is_first = not isinstance(param, FlatShardTensor)
        if is_first and (clashing := vars(FlatShardTensor).keys() & param.__dict__.keys()):
            raise ValueError(
                f"parameter {self.span.name!r} has an attribute {min(clashing)!r}, but sharded "
                "parameters use this name. Rename your attribute before wrapping."
            )
        for place in self.locations:
            if isinstance(place.module, nn.RNNBase):
                # ``swap_tensors`` raises if a tensor has weak references, so remove the RNN's
                # references. The RNN takes None for a weight that has not changed.
                place.module._flat_weight_refs = [None] * len(place.module._flat_weights_names)
                place.module.__dict__["_flat_weights"] = []
            for hook in place.module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):
                    # The hook computes the weight before each forward. The weight's autograd graph
                    # refers to the parameter, so the swap below would fail. Detach the weight.
                    setattr(place.module, hook.name, getattr(place.module, hook.name).detach())
        attributes = sharded_tensor.attributes_of(param)
        # Keep torch's own dictionaries, so that users' handles can still remove the hooks.
        hooks = param._backward_hooks
        post_hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        param.grad = None
        try:
            torch.utils.swap_tensors(param, view)
        except RuntimeError as error:
            # Try again, because another thread (of a profiler or the deadlock detection) may refer
            # to the parameter for a moment.
            if tries > 1:
                time.sleep(0.2)
                return self._swap_into(view, tries=tries - 1)
            raise RuntimeError(
                f"parameter {self.span.name!r} cannot be sharded: an autograd graph, a view or a "
                "weak reference still refers to the parameter (for example a loss from before "
                "wrapping, or a module of torch.jit). Delete the reference, wrap the model "
                f"earlier, or replace the scripted module by the original module. ({error})"
            ) from error
        param.__dict__.update(attributes)
        # ``swap_tensors`` has removed the hooks that users registered before wrapping.
        if not self.is_sharded:
            # Modules compute with this parameter itself, so autograd must call the hooks.
            param._backward_hooks = hooks
            if post_hooks is not None:
                param._post_accumulate_grad_hooks = post_hooks  # type: ignore[attr-defined]
        elif is_first:
            # Tensor hooks get this rank's gradient of `full`, before the reduction. The other hooks
            # are called once the reduced gradient is in ``.grad``.
            self._waiting_hooks = hooks
            self.post_accumulate_hooks = post_hooks or self.post_accumulate_hooks

    # ------------------------------------------------------------ the full parameter

    def make_full(self, view: Tensor | None) -> None:
        """Set ``full`` to a new parameter in the memory of ``view``, or to ``sharded`` if None."""
        before: nn.Parameter | None = getattr(self, "full", None)
        self.full = self.sharded if view is None else nn.Parameter(view, False)
        if view is not None:
            # Share the attributes: users may set an attribute in a forward, and read it between
            # steps.
            self.full.__dict__ = self.sharded.__dict__
            # While the unit is resharded, the class of `full` is `FreedParameter`. Its errors get
            # the parameter's name from this reference. The reference is weak, because Python would
            # free a cycle of references late.
            self.full._full_of = weakref.ref(self.spec)  # type: ignore[attr-defined]
        # For integer parameters `requires_grad` is always False, so this call does not raise.
        self.full.requires_grad_(self.sharded.requires_grad)
        # If `full` is a new object, move the hooks to the new object.
        if before is not None and before is not self.full:
            # Share torch's dictionary of hooks, so that users' handles can still remove the hooks.
            self.full._backward_hooks = before._backward_hooks
            self._hook_grad()
        if self._waiting_hooks is not None:
            self.full._backward_hooks, self._waiting_hooks = self._waiting_hooks, None

    def connect(self, grad_hook: Callable[[Tensor], None]) -> None:
        """Register a hook that autograd calls once ``.grad`` of the full parameter is complete.

        The hook must not refer to the unit, because autograd would keep the unit alive.
        """
        self._grad_hook = grad_hook
        self._grad_hook.of_flatshard = True
        self._hook_grad()

    def _hook_grad(self) -> None:
        register = nn.Parameter.register_post_accumulate_grad_hook
        register_hook(self.full, register, self._grad_hook)
        if not self.is_sharded and self.full is not self.sharded:
            # Outside of forward, users compute with `sharded`. The hook averages these gradients.
            register_hook(self.sharded, register, self._grad_hook)

    # ------------------------------------------------------------ gradients

    def of_chunk(self, chunk: Tensor) -> Tensor:
        """Return a tensor for ``.grad``: a view of ``chunk``, this rank's flat gradient."""
        if not self.is_sharded:
            # Return `.data`, which is not a view: torch refuses `p.grad.detach_()` for views.
            return self._in_taken(view_of(chunk, self.span).data)
        spec, origin = self.spec, FlatShardTensor.shard_origin
        local, role = chunk.narrow(0, spec.start, spec.numel), sharded_tensor.GRADIENT
        return self._in_taken(FlatShardTensor(local, spec, role=role, flat=chunk, origin=origin))

    def _in_taken(self, grad: Tensor) -> Tensor:
        """Return ``grad``, in the Python object of ``taken_grad`` if this tensor still exists."""
        taken: Any = self.taken_grad()
        self.taken_grad = NoneType
        if taken is None:
            return grad
        # Only a swap changes the class, too. If weak references prevent the swap, return `grad`.
        put: Any = torch.utils.swap_tensors if self.is_sharded else Tensor.data.__set__  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            put(taken, grad)
            return taken
        return grad

    def of_unreduced(self, grad: Tensor, grad_dtype: torch.dtype) -> Tensor:
        """Return a tensor for ``.grad`` with the values of this rank's unreduced gradient ``grad``.

        ``grad_dtype``: the dtype of reduced gradients in ``.grad``.
        """
        dtype, device, kept = self.sharded.dtype, self.sharded.device, self.kept_grad
        if not self.is_sharded:
            return self._in_taken(grad.to(device, dtype).view(grad.shape))
        # If reduced gradients have the same dtype, they will reuse this Python object.
        keeps = dtype is grad_dtype
        if not keeps or kept is None or kept.__dict__:
            empty = torch.empty(0, dtype=dtype, device=device)
            kept = self._in_taken(FlatShardTensor(empty, self.spec, role=sharded_tensor.GRADIENT))
            self.kept_grad = kept if keeps else None
        kept.__dict__ = {"shard_unreduced": grad, "shard_spec": self.spec, "shard_origin": Origin()}
        if keeps:
            kept.is_kept = True
        return kept  # type: ignore[no-any-return]

    def hold_hooks(self) -> None:
        """Take users' post-accumulate-grad hooks from autograd, until ``give_hooks_back``.

        The hooks need the reduced gradient, but autograd would call them before the reduction.
        """
        hooks = getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}
        for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
            self.post_accumulate_hooks[key] = hooks.pop(key)

    def run_hooks(self) -> None:
        """Call users' post-accumulate-grad hooks with ``sharded``, whose ``.grad`` is reduced."""
        for hook in list(self.post_accumulate_hooks.values()):
            hook(self.sharded)

    def give_hooks_back(self) -> None:
        """Undo ``hold_hooks``, so that users' handles can remove the hooks."""
        if self.post_accumulate_hooks:
            self.sharded._post_accumulate_grad_hooks.update(self.post_accumulate_hooks)  # type: ignore[attr-defined]
            self.post_accumulate_hooks.clear()


# Users' hooks run in backward, but after averaging: treat their operations as the program's.
sharded_tensor.CALLERS[id(OriginalParam.run_hooks.__code__)] = sharded_tensor.Caller.PROGRAM
