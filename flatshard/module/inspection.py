"""Inspects a module before wrapping: ignored tensors, and tensors that cannot be sharded."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.module.sharding import Sharding, other_roots, sharded_ids, shardings_in
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.ignored import Ignored, places_in
from flatshard.units.module_tree import unit_text
from flatshard.units.policies import Policy, check_policy

SHARED_REMEDY = (
    "Use one wrapper for two models that share modules: models = "
    "ShardedWrapper(nn.ModuleList([first, second])). Then call models[0] and models[1]."
)


def check_frozen(shared: Mapping[Sharding, Set[Sharding]]) -> None:
    """Raise ValueError if a wrapper that several outermost wrappers contain is not frozen.

    ``shared``: result of ``other_roots``.
    """
    for sharding, others in shared.items():
        params = [param for handle in sharding.unit.handles for param in handle.sharded]
        if others and any(param.requires_grad for param in params):
            # If the program has dropped the other outermost wrapper, it may be garbage on some
            # ranks, and freed on others. All ranks must get the same result.
            gc.collect()
            kinds = ", ".join(sorted(other.wrapper.__class__.__name__ for other in others))
            if kinds:
                raise ValueError(
                    f"ShardedWrapper: {unit_text(sharding.unit.name)} is trained, and is also in "
                    f"another outermost ShardedWrapper (around a {kinds}), which would reduce the "
                    f"same gradients. Freeze the unit, or wrap each module once. {SHARED_REMEDY}"
                )


def read_ignored(
    module: nn.Module,
    policy: Policy | None,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter | nn.Module] | None,
) -> Ignored:
    """Return the modules and tensors to be ignored by the wrapper of ``module``.

    The user passes modules and tensors to ignore in a keyword, or lists names in the attribute
    ``_ddp_params_and_buffers_to_ignore``, as for DistributedDataParallel.

    Args:
        module: the module to wrap.
        policy: the user's ``auto_wrap_policy``, or None.
        ignored_modules: modules from the user's keyword of this name, or None.
        ignored_states: modules and parameters from the user's keyword of this name, or None.

    Raises:
        TypeError: ``module`` is no module, ``policy`` is no policy, or a keyword is not an iterable
            of modules (or parameters).
        ValueError: both keywords are given, a parameter to ignore is already sharded, or ``policy``
            does not fit ``module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"ShardedWrapper: expected an nn.Module, got a {type(module).__name__}.")
    if policy is not None:
        check_policy(policy)
    shardings = shardings_in(module)
    _check_wrappers(module, policy, shardings)
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ShardedWrapper: pass either ignored_modules or ignored_states, not both. "
            "ignored_states takes modules and parameters."
        )
    chosen = [
        *_read("ignored_modules", ignored_modules, (nn.Module,)),
        *_read("ignored_states", ignored_states, (nn.Parameter, nn.Module)),
    ]
    tops = {top for top in chosen if isinstance(top, nn.Module)}
    # Names of the ignored modules and tensors, keyed by id: a shared module or a tied tensor has
    # several names, of which the first is used.
    names = {id(inner): name for name, inner in module.named_modules() if inner in tops}
    tensors = list(places_in(module))
    # Do not raise if some objects are not in `module`: a user may pass the same list to several
    # wrappers, each of which contains only some of the objects.
    present = {*map(id, module.modules()), *(id(tensor) for _, _, _, tensor in tensors)}
    is_elsewhere = bool(chosen) and present.isdisjoint(map(id, chosen))
    # Compare tensors by id, because `==` of tensors compares their elements. A tensor that the
    # module lists for DDP to ignore is ignored only if all names of the tensor are listed.
    listed = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    single = {id(tensor) for name, _, _, tensor in tensors if name in listed}
    single -= {id(tensor) for name, _, _, tensor in tensors if name not in listed}
    single |= {id(tensor) for tensor in chosen if isinstance(tensor, Tensor)}
    for name, _, _, tensor in tensors:
        if id(tensor) in single:
            names.setdefault(id(tensor), name)
    places = {(inner, attribute) for _, inner, attribute, tensor in tensors if id(tensor) in single}
    ignored = Ignored(
        frozenset[nn.Module]().union(
            *(inner.modules() for inner in tops),
            *(sharding.ignored.modules for sharding in shardings),
        ),
        frozenset(places).union(*(sharding.ignored.places for sharding in shardings)),
        tuple(names.values()),
        is_elsewhere,
    )
    # Raise if a wrapper inside the module has sharded an ignored tensor, alone or as a part of an
    # ignored module. A tensor that the inner wrapper ignores is not sharded, and may be ignored
    # here, too.
    sharded = sharded_ids(shardings) & ignored.ids()
    for name, _, _, tensor in tensors:
        if id(tensor) in sharded:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} cannot be ignored, because a ShardedWrapper "
                "inside the model has sharded it already. Let the inner ShardedWrapper ignore the "
                "parameter, or ignore only modules that contain no ShardedWrapper."
            )
    return ignored


def _read(keyword: str, values: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return the ``values`` that the user passed in ``keyword``, as a list.

    Raises:
        TypeError: ``values`` is not an iterable, or contains an object of another kind.
    """
    expected = f"expected an iterable of {' or '.join(kind.__name__ for kind in kinds)}"
    try:
        found = [] if values is None else list(values)
    except TypeError:
        raise TypeError(f"{keyword}: {expected}, got a {type(values).__name__}.") from None
    for position, value in enumerate(found):
        if not isinstance(value, kinds):
            name = type(value).__name__
            raise TypeError(f"{keyword}: {expected}, got a {name} at position {position}.")
    return found


def check_tensors(
    params: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], *, drops_gradients: bool
) -> None:
    """Raise if parameters cannot be flattened, are on several devices, or would lose gradients.

    ``params`` and ``buffers`` are keyed by name.
    """
    first: tuple[str, torch.device] | None = None
    for name, buffer in buffers.items():
        _check_memory(f"buffer {name!r}", buffer)
    for name, param in params.items():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is not initialised (a lazy module). Run "
                "one forward on the unwrapped model first."
            )
        # With NO_SHARD, parameters stay plain, but have flatshard's hook.
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        is_ours = any(hasattr(hook, "of_flatshard") for hook in hooks.values())
        if is_ours or isinstance(param, FlatShardTensor):
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is already in another ShardedWrapper. Wrap "
                f"each module once. {SHARED_REMEDY}"
            )
        # Refuse subclasses of Tensor: a flat parameter keeps only the elements of a tensor, so the
        # state and behaviour of the subclass would be lost.
        if type(param.data) is not Tensor:
            raise TypeError(
                f"ShardedWrapper: parameter {name!r} is a {type(param.data).__name__}, but only "
                "plain tensors can be sharded. Pass its module in ignored_modules."
            )
        _check_memory(f"parameter {name!r}", param)
        if drops_gradients and param.grad is not None and bool(param.grad.any()):
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} has a gradient, which would be lost. Wrap "
                "the model before backward, or call zero_grad() before wrapping."
            )
        if param.is_meta:
            continue
        first = first or (name, param.device)
        if param.device != first[1]:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is on {str(param.device)!r}, but {first[0]!r} "
                f"is on {str(first[1])!r}. Move the module to one device before wrapping."
            )
    _check_shares_no_memory(params)


def _check_shares_no_memory(params: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if a trained parameter shares memory with another parameter."""
    placed = []
    for name, param in params.items():
        if not (param.is_meta or param.numel() == 0 or param.layout is not torch.strided):
            start, nbytes = param.data_ptr(), _extent(param) * param.element_size()
            placed.append((start, start + nbytes, name, param))
    placed.sort(key=lambda one: one[:2])
    for number, (_, end, name, param) in enumerate(placed):
        for start, _, other_name, other in placed[number + 1 :]:
            if start >= end:
                break
            if (param.requires_grad or other.requires_grad) and _share_elements(param, other):
                raise ValueError(
                    f"ShardedWrapper: parameters {name!r} and {other_name!r} are views of the same "
                    "memory, but would get separate shards. To tie the two weights, assign the "
                    "same nn.Parameter object to both attributes. To keep two weights, replace "
                    f"{other_name!r} by nn.Parameter(weight.detach().clone())."
                )


def _check_memory(where: str, tensor: Tensor) -> None:
    """Raise TypeError unless a tensor is dense, and its storage has memory for all elements."""
    problem = None
    if tensor.is_nested or tensor.is_quantized:
        problem = "nested" if tensor.is_nested else "quantized"
    elif tensor.layout is not torch.strided:
        problem = f"of layout {tensor.layout}"
    elif type(tensor.data) is Tensor and tensor.numel() and not tensor.is_meta:
        last = tensor.storage_offset() + _extent(tensor)
        if tensor.untyped_storage().nbytes() < last * tensor.element_size():
            problem = "freed"  # reading the freed memory would crash the process
    if problem is not None:
        raise TypeError(
            f"ShardedWrapper: {where} is {problem}, but only dense tensors with memory can be "
            "sharded or synchronised. Convert the tensor (to_dense(), dequantize()), or pass its "
            "module in ignored_modules."
        )


def _extent(tensor: Tensor) -> int:
    """Return how many elements fit into the memory between a tensor's first and last element."""
    return 1 + sum((tensor.size(d) - 1) * tensor.stride(d) for d in range(tensor.dim()))


def _share_elements(param: Tensor, other: Tensor) -> bool:
    """Whether two tensors, whose ranges of addresses overlap, have an element in common."""
    unit = min(param.element_size(), other.element_size())
    start = min(param.data_ptr(), other.data_ptr())

    def places(tensor: Tensor) -> Tensor:
        size = tensor.element_size() // unit
        shape, stride = (*tensor.shape, size), (*(size * s for s in tensor.stride()), 1)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return torch.arange(count).as_strided(shape, stride) + (tensor.data_ptr() - start) // unit

    return bool(torch.isin(places(param), places(other)).any())


def _check_wrappers(
    module: nn.Module, policy: Policy | None, shardings: Sequence[Sharding]
) -> None:
    """Raise ValueError if ``module`` contains a wrapper that another wrapper cannot contain."""
    for name, inner in module.named_modules():
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"ShardedWrapper: module {name or '(root)'!r} is a {type(inner).__name__}, which "
                "would reduce gradients by itself. Wrap its .module instead."
            )
    for sharding in shardings:
        for extension in sharding.context.extensions:
            if not extension.is_made_anew:
                raise ValueError(
                    f"ShardedWrapper: {extension.name}() was called on a part of the module. First "
                    f"make the outermost wrapper, then call {extension.name}() on that wrapper."
                )
    check_frozen(other_roots(shardings))
    if policy is not None and shardings:
        names = {inner: name for name, inner in module.named_modules()}
        name = names[shardings[0].wrapper]
        where = f"already contains, at {name!r}," if name else "is already"
        raise ValueError(
            f"ShardedWrapper: auto_wrap_policy cannot be applied, because the module {where} a "
            f"ShardedWrapper (around a {shardings[0].wrapper.__class__.__name__}; "
            f"{len(shardings)} ShardedWrappers in all). "
            "Leave out the policy: then the outer wrapper takes all parameters that are not in "
            "a unit. Or wrap the model once, with the policy."
        )
