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
        # No gradient is required here: autograd works on the full parameters over the unsharded
        # buffer, and never on the chunk.
        self: FlatParameter = Tensor._make_subclass(cls, chunk, False)
        self.flat_layout, self.rank = layout, rank
        # Weak references: the parameters refer to views of the chunk, and Python's collector cannot
        # see a cycle through views.
        self._params = [weakref.ref(param) for param in params]
        return self

    @property
    def params(self) -> list[OriginalParam]:
        """The original parameters, in the order of ``flat_layout.spans``; none without a model."""
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


# Makes the function that a full parameter calls once autograd has filled ``.grad``.
GradHook = Callable[["OriginalParam"], Callable[[Tensor], None]]


class OriginalParam:
    """One parameter of the unwrapped model, inside of a flat parameter.

    Attributes:
        index: index of the parameter in the flat parameter.
        span: where the elements lie in the flat parameter; the same on all ranks.
        local: which of the elements lie in this rank's chunk, and where.
        spec: the same facts in the form that a ``FlatShardTensor`` needs; gradients and optimizer
            state share the object.
        locations: the modules and attributes that hold the parameter; the first location names the
            parameter.
        sharded: the parameter that users and optimizers hold: a true-shape ``FlatShardTensor`` over
            this rank's chunk, or a plain parameter if one rank holds all elements.
        full: a plain parameter over the unsharded buffer. Modules hold ``full`` while they compute.
            ``full`` is ``sharded`` if the chunk is the unsharded buffer.
        held: the object that modules hold in place of the parameter; None: ``sharded``.
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
            # Where optimizers keep state of the parameter's shape. None: in memory.
            state_target=state_target,
        )
        self.held: Any = None
        self.post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        # Tensor hooks and post-accumulate hooks that users registered before wrapping. The hooks
        # wait here until the full parameter exists. The dictionaries are torch's own, so that a
        # ``RemovableHandle`` still works.
        self._waiting_hooks: tuple[Any, Any] | None = None
        self._grad_hook: GradHook | None = None
        self.spec.original = self

    @property
    def name(self) -> str:
        """The parameter's name in the unwrapped model."""
        return self.spec.name

    @property
    def where(self) -> str:
        """The parameter in words, with its unit."""
        return f"parameter {self.spec.name!r} ({unit_text(self.spec.unit)})"

    @property
    def is_sharded(self) -> bool:
        """Whether ``sharded`` is a ``FlatShardTensor``."""
        return isinstance(self.sharded, FlatShardTensor)

    # ------------------------------------------------------------ the sharded parameter

    def show_chunk(self, chunk: Tensor, *, is_whole: bool) -> None:
        """Let the sharded parameter show ``chunk``, ``(shard_numel,)``, of a flat parameter.

        ``is_whole``: the chunk is the whole flat parameter.
        """
        if not is_whole:
            sharded = FlatShardTensor.parameter(chunk, self.spec, self.requires_grad)
            average_full_gradients(sharded)
            self._swap_into(sharded)
            return
        if self.sharded.is_meta:
            self._swap_into(nn.Parameter(view_of(chunk, self.span), self.requires_grad))
        else:
            # Only the memory moves. The parameter object keeps its hooks and attributes.
            self.sharded.data = view_of(chunk, self.span)
        if self.spec.state_target is not None:
            self.spec.state_target.keep_state_of(self.sharded)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharded.requires_grad

    def _swap_into(self, view: Tensor) -> None:
        """Turn the parameter into ``view``, in place. Identity and attributes stay the same."""
        param = self.sharded
        is_first = not isinstance(param, FlatShardTensor)
        clashing = OWN_ATTRIBUTES & param.__dict__.keys()
        if is_first and clashing:
            raise ValueError(
                f"parameter {self.span.name!r} has an attribute {min(clashing)!r}, which a sharded "
                "parameter needs for itself. Give yours another name before wrapping."
            )
        for place in self.locations:
            if isinstance(place.module, nn.RNNBase):
                # ``torch.utils.swap_tensors`` refuses a tensor that has weak references, and the
                # module keeps weak references to its weights. For the module, None in this list
                # means an unchanged weight.
                place.module._flat_weight_refs = [None] * len(place.module._flat_weights_names)
                place.module.__dict__["_flat_weights"] = []
            for hook in place.module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):  # the hook computes the weight before each forward
                    # The weight must not be stored in a local variable: the weight's graph would
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
                f"parameter {self.span.name!r} cannot be sharded: a graph, a view or a weak "
                "reference still holds it (a loss kept from before wrapping, say). Drop that, or "
                f"wrap the model earlier. ({error})"
            ) from error
        param.__dict__.update(attributes)
        if not self.is_sharded:
            # The swap moved the hooks away with the memory. This parameter itself takes part in
            # forward, so the hooks must be on it.
            self._move_hooks(param)

    def _move_hooks(self, full: nn.Parameter) -> None:
        """Move hooks from before wrapping to where they must run: tensor hooks to ``full``."""
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
        """Make ``full`` from its view of an unsharded buffer; None: ``full`` is ``sharded``."""
        before: nn.Parameter | None = getattr(self, "full", None)
        if view is None:
            self.full = self.sharded
        else:
            self.full = nn.Parameter(view, False)
            # Errors about the full parameter name it with the spec. A weak reference: the spec
            # refers to the parameter, and a cycle would live until the collector runs.
            self.full._full_of = weakref.ref(self.spec)  # type: ignore[attr-defined]
        # Integer parameters never require a gradient.
        self.full.requires_grad_(self.requires_grad)
        # Without a buffer, ``full`` and ``sharded`` are one object. `model.to()` then keeps this
        # object with its hooks, and there are no hooks to move.
        if before is not None and before is not self.full:
            # The new parameter shares the dictionary itself, so that handles can still remove
            # hooks.
            self.full._backward_hooks = before._backward_hooks
            self._hook_grad()
        if self.is_sharded:
            self._move_hooks(self.full)

    def connect(self, grad_hook: GradHook) -> None:
        """Let the full parameter call a hook of ``grad_hook`` once autograd has filled ``.grad``.

        Autograd holds the hook, so the hook must not keep the unit alive.
        """
        self._grad_hook = grad_hook
        self._hook_grad()

    def _hook_grad(self) -> None:
        watched = [self.full]
        if not self.is_sharded and self.full is not self.sharded:
            # The plain parameter may be used outside of forward, and such gradients are averaged
            # too.
            watched.append(self.sharded)
        for param in watched:
            if self._grad_hook is not None and (param.is_floating_point() or param.is_complex()):
                is_trained = param.requires_grad
                # A frozen tensor refuses hooks, but users may unfreeze the tensor later.
                param.requires_grad_(True)
                param.register_post_accumulate_grad_hook(self._grad_hook(self))
                param.requires_grad_(is_trained)

    def copied(self, memo: dict[int, Any]) -> ParamInfo:
        """The parameter's counterpart in deep-copied modules, with the same name."""
        places = [replace(place, module=memo[id(place.module)]) for place in self.locations]
        places[0] = replace(places[0], name=self.name)
        return ParamInfo(memo.get(id(self.sharded), self.sharded), places)

    # ------------------------------------------------------------ gradients

    def of_chunk(self, chunk: Tensor) -> Tensor:
        """The view of a chunk of gradients, ``(shard_numel,)``, that ``.grad`` shows."""
        if not self.is_sharded:
            return view_of(chunk, self.span)
        return FlatShardTensor.in_flat(chunk, self.spec, role=GRADIENT)

    def hold_hooks(self) -> None:
        """Take users' post-accumulate hooks off the parameter until ``give_hooks_back``."""
        # Users' hooks expect the reduced gradient, so autograd must not call them.
        hooks = getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}
        for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
            self.post_accumulate_hooks[key] = hooks.pop(key)

    def run_hooks(self) -> None:
        """Call users' post-accumulate hooks."""
        for hook in list(self.post_accumulate_hooks.values()):
            hook(self.sharded)

    def give_hooks_back(self) -> None:
        """Put the hooks back where users registered them, because users may remove hooks there."""
        if self.post_accumulate_hooks:
            hooks = self.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            hooks.update(self.post_accumulate_hooks)
            self.post_accumulate_hooks.clear()
