"""``FlatParameter``: one rank's shard of a unit's parameters, as one 1-D parameter."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import hooks as torch_hooks

from flatshard.plan.layout import FlatLayout, LocalSpan, ParamSpan
from flatshard.plan.module_tree import unit_text
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, check_data, tensors_in


def view_of(flat: Tensor, span: ParamSpan) -> Tensor:
    """The part of ``flat``, ``(padded_numel,)``, in the original's shape and strides."""
    return flat.as_strided(span.shape, span.strides, flat.storage_offset() + span.start)


def part_of(tensor: Tensor, span: ParamSpan, local: LocalSpan) -> Tensor:
    """The range ``local`` of an original, of any strides, 1-D in memory order; a view if it can."""
    return tensor.permute(span.order).reshape(-1)[local.offset : local.offset + local.numel]


class FlatParameter(nn.Parameter):
    """The parameter that ``parameters()`` yields with ``use_orig_params=False``.

    A plain 1-D tensor, ``(flat_layout.shard_numel,)``.

    Attributes:
        flat_layout: where the original parameters lie in the concatenation of all shards.
        rank: whose shard this is, within the shard group.
        flat: the tensor whose memory it shows.
    """

    flat_layout: FlatLayout
    rank: int
    flat: Tensor
    post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]]
    _aliases: weakref.WeakValueDictionary[int, Tensor]

    def __new__(
        cls, data: Tensor, requires_grad: bool, layout: FlatLayout, rank: int
    ) -> FlatParameter:
        """Count ``data``, ``(flat_layout.shard_numel,)``, as a parameter without copying."""
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.flat_layout, self.rank, self.flat = layout, rank, data
        self.post_accumulate_hooks = OrderedDict()
        self._aliases = weakref.WeakValueDictionary()
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard without autograd, sharing the version counter. Assigning copies."""
        alias = self.detach()
        self._aliases[id(alias)] = alias
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        check_data(repr(self), self, value)
        with torch.no_grad():
            # What `.data` gave before keeps its values, as it does where data is replaced.
            for alias in list(self._aliases.values()):
                torch._C.TensorBase.data.__set__(alias, alias.clone())  # type: ignore[attr-defined]
            self._aliases.clear()
            self.copy_(value)

    def point_at(self, shard: Tensor) -> None:
        # The base class's setter keeps identity, and takes any dtype and device; ours copies.
        torch._C.TensorBase.data.__set__(self, shard)  # type: ignore[attr-defined]
        self.flat = shard

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> NoReturn:  # type: ignore[override]
        """Raises: a flat parameter takes no part in autograd, its originals do."""
        raise RuntimeError(
            f"{self!r} never meets autograd, so the hook would not be called. Hook the original "
            "parameters: wrap with use_orig_params=True."
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this parameter once its reduced gradient is in ``.grad``."""
        handle = torch_hooks.RemovableHandle(self.post_accumulate_hooks)
        self.post_accumulate_hooks[handle.id] = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        if id(self) not in memo:
            data = self.detach().clone()
            memo[id(self)] = type(self)(data, self.requires_grad, self.flat_layout, self.rank)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        names = ", ".join(span.name for span in self.flat_layout.spans)
        return (
            f"FlatParameter(rank {self.rank} of {self.flat_layout.world_size}, {self.numel()} of "
            f"{self.flat_layout.padded_numel} elements, {self.dtype}: {names})"
        )


class FlatParameterPart(FlatShardTensor):
    """Placeholder in a module for an original parameter that a ``FlatParameter`` holds."""

    is_parameter = True

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec, requires_grad: bool) -> FlatParameterPart:
        differentiable = local.is_floating_point() or local.is_complex()
        # Frozen or trained with the flat parameter, and without a gradient of its own.
        self = FlatShardTensor.__new__(cls, local, spec, differentiable)
        if differentiable:
            with torch._C.DisableTorchFunctionSubclass():
                # First, as a frozen tensor refuses hooks, and it may be unfrozen later.
                Tensor.register_hook(self, partial(_refuse_gradient, spec))
                self.requires_grad_(requires_grad)
        return self  # type: ignore[return-value]

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> NoReturn:
        _refuse_gradient(self.spec)

    register_post_accumulate_grad_hook = register_hook

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        setters = Tensor.requires_grad_, Tensor.requires_grad.__set__  # type: ignore[attr-defined]
        if func in setters and isinstance(args[0], FlatParameterPart):
            spec = args[0].spec
            raise RuntimeError(
                f"parameter {spec.name!r} ({unit_text(spec.unit)}) is a part of a flat parameter "
                "and cannot be frozen or unfrozen alone. Wrap with use_orig_params=True, freeze it "
                "before wrapping, or call requires_grad_() on the unit's ShardedWrapper."
            )
        result = super().__torch_function__(func, types, args, kwargs)
        # What wrote into a part returns it.
        is_computed = isinstance(result, FlatShardTensor) and type(result) is not cls
        if is_computed and result.requires_grad and torch.is_grad_enabled():
            # The part has no gradient of its own, the full one has.
            given = tensors_in((*args, *(kwargs or {}).values()))
            spec = next(t.spec for t in given if isinstance(t, FlatParameterPart))
            full = spec.run_full(func, args, kwargs or {})
            return result if full is NotImplemented else full
        return result


def _refuse_gradient(spec: ShardSpec, *_: Tensor) -> NoReturn:
    raise RuntimeError(
        f"parameter {spec.name!r} ({unit_text(spec.unit)}) is a part of a flat parameter, and gets "
        "gradients from the forward of its unit alone: those of a penalty outside of it, and "
        "hooks, would be lost. Wrap with use_orig_params=True, or compute it in forward."
    )
