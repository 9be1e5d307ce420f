"""``FlatParameter``: parameters of a unit, flattened, padded, and divided among the ranks.

``OriginalParam``: one parameter of the unwrapped model that lies in a flat parameter.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from flatshard.comm.communicator import Topology
from flatshard.memory.offload_target import OffloadTarget
from flatshard.plan.layout import FlatLayout, view_of
from flatshard.plan.module_tree import ParamInfo, unit_text
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import (
    GRADIENT,
    OWN_ATTRIBUTES,
    FlatShardTensor,
    attributes_of,
)
from flatshard.tensor.unsharded import average_full_gradients


class FlatParameter(nn.Parameter):
    """Parameters of one unit as a padded 1-D parameter; each rank holds a chunk.

    The tensor's values are this rank's chunk, ``(flat_layout.shard_numel,)``. Optimizers update the
    chunk through the original parameters. ``print`` lists which parameters lie in which chunk.

    Example:
        ```python
        flat_param = model.flat_parameters()[0]
        print(flat_param)
        print([param.name for param in flat_param.params], flat_param.flat_layout.padding_numel)
        ```

    Attributes:
        flat_layout: where each original parameter lies, how much is padding, and the range of
            elements that each rank holds.
        rank: index of this rank's chunk, below ``flat_layout.world_size``.
    """

    flat_layout: FlatLayout
    rank: int
    _params: Sequence[weakref.ref[OriginalParam]]

    @staticmethod
    def __new__(
        cls, chunk: Tensor, layout: FlatLayout, rank: int, params: Sequence[OriginalParam]
    ) -> FlatParameter:
        """Make a flat parameter from this rank's ``chunk``, ``(layout.shard_numel,)``; no copy."""
        # The chunk requires no gradient: autograd works on the full parameters, which are views of
        # the unsharded buffer.
        self: FlatParameter = Tensor._make_subclass(cls, chunk, False)
        self.flat_layout, self.rank = layout, rank
        # Weak references: the parameters refer to views of the chunk. A cycle through a view would
        # never be freed, because Python's garbage collector cannot see it.
        self._params = [weakref.ref(param) for param in params]
        return self

    @property
    def params(self) -> list[OriginalParam]:
        """The original parameters, in the order of ``flat_layout.spans``.

        The list is empty if the model was deleted.
        """
        found = (param() for param in self._params)
        return [param for param in found if param is not None]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        layout = self.flat_layout
        chunks = f"{layout.world_size} chunk{'s' if layout.world_size > 1 else ''}"
        unit = unit_text(self.params[0].spec.unit) if self.params else "a model that is gone"
        lines = [
            f"FlatParameter of {unit}: {self.dtype} on {self.device}, "
            f"{layout.numel:,} elements + {layout.padding_numel:,} padding, "
            f"{chunks} of {layout.shard_numel:,}"
        ]
        for rank in range(layout.world_size):
            begin, end = layout.shard_range(rank)
            here = ", on this rank" if rank == self.rank else ""
            lines.append(f"  chunk {rank}: elements {begin:,} to {end:,}{here}")
            for param in self.params:
                local = layout.local_span(param.index, rank)
                if not local.numel:
                    continue
                line = f"    {local.start:,} to {local.end:,}: {param.name!r} {param.span.shape}"
                if local.numel < param.span.numel:
                    line += f", its elements {local.offset:,} to {local.offset + local.numel:,}"
                lines.append(line)
        return "\n".join(lines)


# A function that makes the post-accumulate-grad hook of a full parameter.
GradHook = Callable[["OriginalParam"], Callable[[Tensor], None]]


class OriginalParam:
    """One parameter of the unwrapped model, and its range of a flat parameter.

    Attributes:
        index: index of the parameter in the flat parameter.
        span: range of the parameter's elements in the flat parameter; the same on all ranks.
        local: the part of this range that lies in this rank's chunk.
        spec: ``span`` and ``local`` in the form that a ``FlatShardTensor`` needs. The parameter's
            gradients and optimizer state share this object.
        locations: the modules and attributes that hold the parameter. The name of the first
            location is the parameter's name.
        sharded: the parameter that users and optimizers hold: a ``FlatShardTensor`` over this
            rank's chunk, or a plain parameter if this rank holds all elements.
        full: a plain parameter, a view of the unsharded buffer. Modules hold ``full`` while they
            compute. If the chunk is the unsharded buffer, ``full`` is ``sharded``.
        held: the object that modules hold now instead of ``sharded``; None: they hold ``sharded``.
        post_accumulate_hooks: users' hooks that run once the reduced gradient is in ``.grad``.
    """

    full: nn.Parameter

    def __init__(
        self,
        info: ParamInfo,
        index: int,
        layout: FlatLayout,
        topology: Topology,
        unit_name: str,
        state_target: OffloadTarget | None,
    ) -> None:
        self.index, self.sharded, self.locations = index, info.param, info.locations
        self.span, self.local = layout.spans[index], layout.local_span(index, topology.index)
        self.spec = ShardSpec(
            info.name,
            unit_name,
            self.span,
            self.local,
            comm=topology.shard,
            replicas=topology.replicate,
            # Layout of a former DTensor, set by `extras/tensor_parallel`.
            tensor_parallel=getattr(info.param, "tensor_parallel", None),
            # Offload target of optimizer state with one value per element. None: in memory.
            state_target=state_target,
        )
        self.held: Any = None
        self.post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        # Tensor hooks and post-accumulate hooks that users registered before wrapping, kept here
        # until the full parameter exists. These are torch's own dictionaries, so that the handles
        # which users got from torch can still remove the hooks.
        self._waiting_hooks: tuple[Any, Any] | None = None
        self._grad_hook: GradHook | None = None
        self.spec.original = self

    @property
    def name(self) -> str:
        """The parameter's name in the unwrapped model."""
        return self.spec.name

    @property
    def where(self) -> str:
        """A text that names the parameter and its unit, for messages."""
        return f"parameter {self.spec.name!r} ({unit_text(self.spec.unit)})"

    @property
    def is_sharded(self) -> bool:
        """Whether ``sharded`` is a ``FlatShardTensor``."""
        return isinstance(self.sharded, FlatShardTensor)

    # ------------------------------------------------------------ the sharded parameter

    def show_chunk(self, chunk: Tensor, *, is_whole: bool) -> None:
        """Make the sharded parameter a view of ``chunk``, ``(shard_numel,)``.

        ``is_whole``: whether the chunk is the whole flat parameter.
        """
        if not is_whole:
            sharded = FlatShardTensor.parameter(chunk, self.spec, self.requires_grad)
            average_full_gradients(sharded)
            self._swap_into(sharded)
            return
        if self.sharded.is_meta:
            self._swap_into(nn.Parameter(view_of(chunk, self.span), self.requires_grad))
        else:
            # Replace only the memory, so that the parameter object keeps its hooks and attributes.
            self.sharded.data = view_of(chunk, self.span)
        if self.spec.state_target is not None:
            self.spec.state_target.keep_state_of(self.sharded)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharded.requires_grad

    def _swap_into(self, view: Tensor) -> None:
        """Swap ``view`` into the parameter object, which keeps its identity and attributes."""
        param = self.sharded
        is_first = not isinstance(param, FlatShardTensor)
        clashing = OWN_ATTRIBUTES & param.__dict__.keys()
        if is_first and clashing:
            raise ValueError(
                f"parameter {self.span.name!r} has an attribute {min(clashing)!r}, but sharded "
                "parameters use this name. Rename your attribute before wrapping."
            )
        for place in self.locations:
            if isinstance(place.module, nn.RNNBase):
                # ``torch.utils.swap_tensors`` refuses a tensor with weak references, and an RNN
                # keeps weak references to its weights. Replace them by None, which an RNN reads as
                # "this weight has not changed".
                place.module._flat_weight_refs = [None] * len(place.module._flat_weights_names)
                place.module.__dict__["_flat_weights"] = []
            for hook in place.module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):  # the hook computes the weight before each forward
                    # Do not store the weight in a local variable: the weight's autograd graph would
                    # keep a reference to the parameter, and the swap below would fail.
                    setattr(place.module, hook.name, getattr(place.module, hook.name).detach())
        attributes = attributes_of(param)
        if is_first:
            post_hooks = getattr(param, "_post_accumulate_grad_hooks", None)
            self._waiting_hooks = param._backward_hooks, post_hooks
        param.grad = None
        try:
            torch.utils.swap_tensors(param, view)
        except RuntimeError as error:
            raise RuntimeError(
                f"parameter {self.span.name!r} cannot be sharded: an autograd graph, a view or a "
                "weak reference still refers to the parameter (for example a loss from before "
                f"wrapping). Delete the reference, or wrap the model earlier. ({error})"
            ) from error
        param.__dict__.update(attributes)
        if not self.is_sharded:
            # ``swap_tensors`` also swapped the hooks away. Register them on this parameter again,
            # because a parameter that is not sharded takes part in forward itself.
            self._move_hooks(param)

    def _move_hooks(self, full: nn.Parameter) -> None:
        """Register the hooks from before wrapping on the objects on which they must run.

        Tensor hooks run on ``full``, with this rank's gradient. Post-accumulate hooks of a sharded
        parameter run once the reduced gradient is in ``.grad``.
        """
        tensor_hooks, post_hooks = self._waiting_hooks or (None, None)
        self._waiting_hooks = None
        if tensor_hooks is not None:
            full._backward_hooks = tensor_hooks
        if post_hooks is not None and self.is_sharded:
            self.post_accumulate_hooks = post_hooks
        elif post_hooks is not None:
            full._post_accumulate_grad_hooks = post_hooks  # type: ignore[attr-defined]

    # ------------------------------------------------------------ the full parameter

    def make_full(self, view: Tensor | None) -> None:
        """Make ``full`` from a view of the unsharded buffer. None: ``full`` is ``sharded``."""
        before: nn.Parameter | None = getattr(self, "full", None)
        if view is None:
            self.full = self.sharded
        else:
            self.full = nn.Parameter(view, False)
            # The spec names the parameter in errors. The reference is weak, because the spec refers
            # to the parameter, and a cycle would be freed only by Python's garbage collector.
            self.full._full_of = weakref.ref(self.spec)  # type: ignore[attr-defined]
        # This call does not raise for integer parameters, because they never require a gradient.
        self.full.requires_grad_(self.requires_grad)
        # Without a buffer, ``full`` and ``sharded`` are the same object. `model.to()` keeps this
        # object and its hooks, so there are no hooks to move.
        if before is not None and before is not self.full:
            # Share the dictionary instead of copying the hooks, so that users' handles can still
            # remove hooks.
            self.full._backward_hooks = before._backward_hooks
            self._hook_grad()
        if self.is_sharded:
            self._move_hooks(self.full)

    def connect(self, grad_hook: GradHook) -> None:
        """Make the full parameter call a hook once autograd has filled its ``.grad``.

        ``grad_hook``: returns the hook for a parameter. The hook must not hold a reference to the
        unit, because autograd holds the hook and would keep the unit alive.
        """
        self._grad_hook = grad_hook
        self._hook_grad()

    def _hook_grad(self) -> None:
        watched = [self.full]
        if not self.is_sharded and self.full is not self.sharded:
            # Users may compute with the plain parameter outside of forward. The hook also averages
            # gradients from such uses.
            watched.append(self.sharded)
        for param in watched:
            if self._grad_hook is not None and (param.is_floating_point() or param.is_complex()):
                is_trained = param.requires_grad
                # Register the hook even on a frozen tensor, because users may unfreeze it later.
                # torch refuses hooks on a frozen tensor, so unfreeze the tensor for the call.
                param.requires_grad_(True)
                param.register_post_accumulate_grad_hook(self._grad_hook(self))
                param.requires_grad_(is_trained)

    def copied(self, memo: dict[int, Any]) -> ParamInfo:
        """Return the deep copy of the parameter, with its locations in the copied modules.

        The copy keeps the parameter's name. ``memo`` is the dictionary of ``copy.deepcopy``.
        """
        places = [replace(place, module=memo[id(place.module)]) for place in self.locations]
        places[0] = replace(places[0], name=self.name)
        return ParamInfo(memo.get(id(self.sharded), self.sharded), places)

    # ------------------------------------------------------------ gradients

    def of_chunk(self, chunk: Tensor) -> Tensor:
        """Return the parameter's ``.grad``, a view of a chunk of gradients, ``(shard_numel,)``."""
        if not self.is_sharded:
            return view_of(chunk, self.span)
        return FlatShardTensor.in_flat(chunk, self.spec, role=GRADIENT)

    def hold_hooks(self) -> None:
        """Remove users' post-accumulate hooks from the parameter until ``give_hooks_back``."""
        # Users' hooks expect the reduced gradient, but autograd would call them before the
        # reduction.
        hooks = getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}
        for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
            self.post_accumulate_hooks[key] = hooks.pop(key)

    def run_hooks(self) -> None:
        """Call users' post-accumulate hooks."""
        for hook in list(self.post_accumulate_hooks.values()):
            hook(self.sharded)

    def give_hooks_back(self) -> None:
        """Register users' hooks on the parameter again, where users may remove them."""
        if self.post_accumulate_hooks:
            hooks = self.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            hooks.update(self.post_accumulate_hooks)
            self.post_accumulate_hooks.clear()
