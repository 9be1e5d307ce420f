"""``FlatParameter``: the parameters of a unit, flattened, padded, and cut over the ranks.

``OriginalParam``: one of these parameters, as it is in the unwrapped model.
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

from flatshard.plan.layout import FlatLayout, view_of
from flatshard.plan.module_tree import ParamInfo, unit_text
from flatshard.tensor import unsharded
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import (
    GRADIENT,
    OWN_ATTRIBUTES,
    FlatShardTensor,
    attributes_of,
)
from flatshard.tensor.unsharded import average_full_gradients


class FlatParameter(nn.Parameter):
    """Parameters of one unit as a padded 1-D parameter, of which each rank holds a chunk.

    As a tensor it is this rank's chunk, ``(flat_layout.shard_numel,)``, which optimizers update
    through the original parameters. ``print`` it to see what lies where.

    Attributes:
        flat_layout: where each original parameter lies, how much is padding, and who holds what.
        rank: which chunk this rank holds, of ``flat_layout.world_size``.
    """

    flat_layout: FlatLayout
    rank: int
    _params: Sequence[weakref.ref[OriginalParam]]

    @staticmethod
    def __new__(
        cls, chunk: Tensor, layout: FlatLayout, rank: int, params: Sequence[OriginalParam]
    ) -> FlatParameter:
        """Let ``chunk``, ``(layout.shard_numel,)``, be this rank's chunk, without copying."""
        # Autograd knows the full parameters over the unsharded buffer, and never the chunk.
        self: FlatParameter = Tensor._make_subclass(cls, chunk, False)
        self.flat_layout, self.rank = layout, rank
        # Weakly: they refer to views of the chunk, and Python's collector sees no such cycle.
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


# Makes what a full parameter calls once autograd has filled its ``.grad``.
GradHook = Callable[["OriginalParam"], Callable[[Tensor], None]]


class OriginalParam:
    """One parameter of the unwrapped model, inside of a flat parameter.

    Attributes:
        index: its place among the parameters of the flat parameter.
        span: where its elements lie in the flat parameter; the same on all ranks.
        local: which of them lie in this rank's chunk, and where.
        spec: the same as ``FlatShardTensor``s know it; gradients and optimizer state share it.
        locations: the places in modules where the parameter stands; the first one names it.
        sharded: what users and optimizers hold, a true-shape ``FlatShardTensor`` over this rank's
            chunk; a plain parameter where one rank holds everything.
        full: a plain parameter over the unsharded buffer, which modules hold while they compute.
            ``sharded`` itself where the chunk is the unsharded buffer.
        held: what modules hold in its place; None: ``sharded``.
        post_accumulate_hooks: users' hooks, which run once the reduced gradient is in ``.grad``.
    """

    full: nn.Parameter

    def __init__(self, info: ParamInfo, index: int, spec: ShardSpec) -> None:
        self.index, self.spec, self.span, self.local = index, spec, spec.span, spec.local
        self.sharded, self.locations = info.param, info.locations
        self.held: Any = None
        self.post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        # Tensor hooks and post-accumulate hooks from before wrapping, until the full parameter
        # exists. The dictionaries are torch's own, so that a ``RemovableHandle`` still works.
        self._waiting_hooks: tuple[Any, Any] | None = None
        self._grad_hook: GradHook | None = None
        spec.original = self

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

        ``is_whole``: the chunk is all of it.
        """
        if not is_whole:
            sharded = FlatShardTensor.parameter(chunk, self.spec, self.requires_grad)
            average_full_gradients(sharded)
            self._swap_into(sharded)
            return
        if self.sharded.is_meta:
            self._swap_into(nn.Parameter(view_of(chunk, self.span), self.requires_grad))
        else:
            # Hooks and attributes stay where they are: only the memory moves.
            self.sharded.data = view_of(chunk, self.span)
        if self.spec.state_target is not None:
            self.spec.state_target.keep_state_of(self.sharded)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharded.requires_grad

    def _swap_into(self, view: Tensor) -> None:
        """Turn the parameter, in place, into ``view``; it keeps identity and attributes."""
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
                # module keeps some to its weights. None in this list means an unchanged weight.
                place.module._flat_weight_refs = [None] * len(place.module._flat_weights_names)
                place.module.__dict__["_flat_weights"] = []
            for hook in place.module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):  # it computes the weight before each forward
                    # Not through a local variable, whose graph would hold the parameter below.
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
            # The swap moved the hooks away with the memory; this one computes, so they stay.
            self._move_hooks(param)

    def _move_hooks(self, full: nn.Parameter) -> None:
        """Let hooks from before wrapping fire where they must: tensor hooks on ``full``."""
        tensor_hooks, post_hooks = self._waiting_hooks or (None, None)
        self._waiting_hooks = None
        if tensor_hooks is not None:
            full._backward_hooks = tensor_hooks
        if post_hooks is not None and self.is_sharded:
            self.post_accumulate_hooks = post_hooks
        elif post_hooks is not None:
            full._post_accumulate_grad_hooks = post_hooks  # type: ignore[attr-defined]

    # ------------------------------------------------------------ the full parameter

    def make_full(self, buffer: Tensor | None) -> None:
        """Make ``full`` over an unsharded buffer, ``(padded_numel,)``; None: ``sharded`` is it."""
        before: nn.Parameter | None = getattr(self, "full", None)
        if buffer is None:
            self.full = self.sharded
        else:
            self.full = nn.Parameter(view_of(buffer, self.span), False)
            unsharded.name(self.full, self.spec)
        self.full.requires_grad_(self.requires_grad)  # False for integers
        # Originals that compute themselves are the same objects after a conversion.
        if before is not None and before is not self.full:
            # The dictionary, so that handles can still remove what is in it.
            self.full._backward_hooks = before._backward_hooks
            self._hook_grad()
        if self.is_sharded:
            self._move_hooks(self.full)

    def connect(self, grad_hook: GradHook) -> None:
        """Let the full parameter call what ``grad_hook`` makes once autograd filled its ``.grad``.

        Autograd holds what it makes, which must not keep the unit alive.
        """
        self._grad_hook = grad_hook
        self._hook_grad()

    def _hook_grad(self) -> None:
        watched = [self.full]
        if not self.is_sharded and self.full is not self.sharded:
            # Plain ones may be used outside of forward, and those gradients are averaged, too.
            watched.append(self.sharded)
        for param in watched:
            if self._grad_hook is not None and (param.is_floating_point() or param.is_complex()):
                is_trained = param.requires_grad
                # A frozen tensor refuses hooks; it may be unfrozen later.
                param.requires_grad_(True)
                param.register_post_accumulate_grad_hook(self._grad_hook(self))
                param.requires_grad_(is_trained)

    def copied(self, memo: dict[int, Any]) -> ParamInfo:
        """The same parameter of modules that were deep-copied."""
        places = [replace(place, module=memo[id(place.module)]) for place in self.locations]
        return ParamInfo(memo.get(id(self.sharded), self.sharded), places)

    # ------------------------------------------------------------ gradients

    def of_chunk(self, chunk: Tensor) -> Tensor:
        """What ``.grad`` shows of a chunk of gradients, ``(shard_numel,)``: a view."""
        if not self.is_sharded:
            return view_of(chunk, self.span)
        return FlatShardTensor.in_flat(chunk, self.spec, role=GRADIENT)

    def hold_hooks(self) -> None:
        """Keep users' post-accumulate hooks of a parameter that computes until ``give_back``."""
        # They want the reduced gradient.
        hooks = getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}
        for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
            self.post_accumulate_hooks[key] = hooks.pop(key)

    def run_hooks(self) -> None:
        """Call users' post-accumulate hooks."""
        for hook in list(self.post_accumulate_hooks.values()):
            hook(self.sharded)

    def give_hooks_back(self) -> None:
        """Put hooks that waited where users registered, and may remove, them."""
        if self.post_accumulate_hooks:
            hooks = self.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            hooks.update(self.post_accumulate_hooks)
            self.post_accumulate_hooks.clear()
