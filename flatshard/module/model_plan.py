"""``ModelPlan``: a module that is being wrapped, the user's settings, and the units to make.

Making a plan changes no module and does not communicate, so the model may be on the meta device.
``construction`` makes the planned units, and ``extras.plan`` predicts their memory.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.unit import Unit
from flatshard.module import wrappers
from flatshard.module.settings import Settings
from flatshard.options.extras import extra
from flatshard.precision import PrecisionPlan
from flatshard.tensor.flat_parameter import FlatParamPlan, is_wrapped
from flatshard.units import module_tree
from flatshard.units.layout import FlatLayout
from flatshard.units.module_tree import Ignored, ModuleTree, ParamInfo, unit_text
from flatshard.units.policies import ChosenModule, Policy, find_units

# Minimum number of bytes for which a collective is limited by bandwidth, not by latency.
LARGE_BYTES = 4 << 20


@dataclass
class PlannedUnit:
    """A unit to make: one module, or several small modules, and the parameters of the unit."""

    members: Sequence[ChosenModule]
    settings: Settings
    number: int  # index of the unit in `ModelPlan.units`

    flats: list[FlatParamPlan] = field(default_factory=list)  # flat parameters, set by `flatten`

    def __post_init__(self) -> None:
        self.names = [member.name for member in self.members]
        self.name = module_tree.name_of(self.names)  # empty for the root unit

    def flatten(self, precision_plan: PrecisionPlan) -> None:
        """Divide the unit's parameters into flat parameters."""
        plans: dict[tuple[object, ...], FlatParamPlan] = {}
        # Each large parameter of the root gets its own flat parameter, so that a large gradient can
        # be reduced while other units compute. Exception: with boundary="tensor", each rank gets
        # whole parameters, and only a flat parameter with many parameters can balance the ranks.
        splits = not self.name and self.number > 0 and self.settings.boundary != "tensor"
        for info in (info for member in self.members for info in member.infos):
            param = info.param
            # Reduce large parameters separately: in backward, the head's gradient is complete
            # first, and the embedding's gradient last.
            is_apart = splits and param.requires_grad and param.nbytes >= LARGE_BYTES
            precision = precision_plan.of_param(param, self.settings.mixed_precision)
            kind = param.dtype, param.requires_grad, precision
            key = (*kind, is_apart and id(param))
            if key not in plans:
                plans[key] = FlatParamPlan(self.name, self.settings.device, *kind)
            plans[key].infos.append(info)
        self.flats = list(plans.values())

    def lay_out(self, num_shards: int) -> None:
        """Compute the layout of the flat parameters over ``num_shards`` ranks."""
        for plan in self.flats:
            params, itemsize = {one.name: one.param for one in plan.infos}, plan.dtype.itemsize
            plan.layout = FlatLayout.build(params, world_size=num_shards, itemsize=itemsize)
        if (boundary := self.settings.boundary) != "element":
            cuts = extra("boundary", f"ShardedWrapper(boundary={boundary!r})")
            cuts.move_all(self.flats, boundary, self.name, self.number)


class ModelPlan:
    """The plan of a model's construction: the module, and the units into which to divide it."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        ignored: Ignored = module_tree.NOTHING,
        *,
        predicts: bool = False,  # True: only to predict memory, so tensors may be fake
    ) -> None:
        settings.check()
        self.module, self.settings, self.ignored = module, settings, ignored
        # The modules that are sharded already, outermost first, with their units.
        self.sharded_before = wrappers.unit_modules(module)
        world_size = settings.ranks.world.size
        # Ids of the tensors that construction neither shards nor synchronises.
        self.left_alone = _sharded_ids(module) | ignored.ids()
        # Do not synchronise buffers of modules that the user wrapped with fewer ranks (experts),
        # because such buffers differ between groups of ranks.
        for inner in wrappers.modules_apart(wrappers.units_in(module), world_size):
            self.left_alone.update(id(buffer) for buffer in inner.buffers(recurse=False))
        infos = module_tree.find_params(module, self.left_alone)
        # Keyed by name: the parameters to shard, and the buffers to move to the device.
        self.params = {info.name: info.param for info in infos}
        named = module.named_buffers()
        self.buffers = {name: one for name, one in named if id(one) not in self.left_alone}
        if not predicts:
            is_sharded = world_size > 1 and settings.placement.sharded
            check_tensors(self.params, self.buffers, is_sharded=is_sharded)
            others = {**self.buffers, **dict(_tensor_attributes(module))}
            _check_shares_no_memory(self.params, others)
        self.divergent: Set[nn.Module] = frozenset()  # modules that ranks may skip
        if settings.allow_divergence is not False:
            divergence = extra("divergence", "ShardedWrapper(allow_divergence=...)")
            self.divergent = divergence.find_divergent(module, settings.allow_divergence)
        self._choose_units(infos)

    @cached_property
    def tree(self) -> ModuleTree:
        """The modules that a policy may choose. Computed on demand, for policies and warnings."""
        return ModuleTree(self.module, self.ignored)

    def _choose_units(self, infos: Sequence[ParamInfo]) -> None:
        root = ChosenModule("", self.module)
        self.chosen: list[ChosenModule] = []  # modules that the policy chose, in order
        if self.settings.auto_wrap_policy is not None:
            self.chosen = find_units(self.tree, self.settings.auto_wrap_policy)
        # The settings of each module that becomes a unit, beginning with the root module.
        members = {member.module: member for member in (root, *self.chosen)}
        override = self.settings.override
        self.settings_of = {m: override(one, self.divergent) for m, one in members.items()}
        precisions = {module: one.mixed_precision for module, one in self.settings_of.items()}
        self.precision_plan = PrecisionPlan(self.module, precisions, self.left_alone)
        for info in infos:
            members[info.owner(members)].infos.append(info)
        # The units in registration order, the root last.
        self.units: list[PlannedUnit] = []
        for group in [*self._coalesce(), [root]]:
            unit = PlannedUnit(group, self.settings_of[group[0].module], len(self.units))
            unit.flatten(self.precision_plan)
            self.units.append(unit)

    def _coalesce(self) -> list[list[ChosenModule]]:
        """Group small neighbouring modules with equal settings, dtypes and ``requires_grad``.

        Each group becomes one unit with one all-gather, because small all-gathers are
        latency-bound, and neighbours usually run one after the other.
        """
        members = {member.module: member for member in self.chosen if member.infos}

        def key_of(member: ChosenModule) -> tuple[Settings, set[tuple[torch.dtype, bool]]] | None:
            """Return the properties that modules of a group must share. None: do not group."""
            # Do not group a module that contains other units, which run inside of its forward.
            module = member.module
            if any(inner in members and inner != module for inner in module.modules()):
                return None
            # A unit needs one collective per kind (dtype and `requires_grad`) of its parameters. So
            # grouping modules with different kinds would save no collective.
            kinds = {(info.param.dtype, info.param.requires_grad) for info in member.infos}
            return self.settings_of[module], kinds

        groups: list[list[ChosenModule]] = []
        last, total = None, 0  # properties and number of bytes of the last group
        for member in members.values():
            key, nbytes = key_of(member), sum(info.param.nbytes for info in member.infos)
            if key is not None and key == last and total + nbytes <= self.settings.coalesce_bytes:
                groups[-1].append(member)
                total += nbytes
            else:
                groups.append([member])
                last, total = key, nbytes
        return groups


# ------------------------------------------------------------ checks of the module

SHARED_REMEDY = (
    "Wrap each module once. Use one wrapper for two models that share modules: models = "
    "ShardedWrapper(nn.ModuleList([first, second])). Then call models[0] and models[1]."
)


def _sharded_ids(module: nn.Module) -> set[int]:
    return {id(param) for handle in wrappers.handles_in(module) for param in handle.sharded}


def check_frozen(shared: Mapping[Unit, Set[nn.Module]]) -> None:
    """Raise ValueError if a unit is inside several outermost wrappers, and is not frozen."""
    for unit, others in shared.items():
        params = [param for handle in unit.handles for param in handle.sharded]
        if others and any(param.requires_grad for param in params):
            # On some ranks, a wrapper that the program no longer uses may not be garbage-collected
            # yet. Collect now, so that all ranks get the same result.
            gc.collect()
            kinds = ", ".join(sorted(other.__class__.__name__ for other in others))
            if kinds:
                raise ValueError(
                    f"ShardedWrapper: {unit_text(unit.name)} is trained, and is also in "
                    f"another outermost ShardedWrapper (around a {kinds}), which would reduce the "
                    f"same gradients. Freeze the unit, or do as follows. {SHARED_REMEDY}"
                )


def read_ignored(module: nn.Module, given: Mapping[str, Any]) -> Ignored:
    """Return the modules and tensors that the wrapper of ``module`` must ignore.

    The user passes them in the keywords ``given``, or, as for DistributedDataParallel, lists their
    names in the attribute ``_ddp_params_and_buffers_to_ignore``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"ShardedWrapper: expected an nn.Module, got a {type(module).__name__}.")
    _check_wrappers(module, given["auto_wrap_policy"])
    if given["ignored_modules"] is not None and given["ignored_states"] is not None:
        text = "pass either ignored_modules or ignored_states (modules and parameters), not both."
        raise ValueError(f"ShardedWrapper: {text}")
    chosen = _read(given, "ignored_modules", nn.Module)
    chosen += _read(given, "ignored_states", nn.Parameter, nn.Module)
    tops = {top for top in chosen if isinstance(top, nn.Module)}
    # The first names of the ignored modules and tensors, keyed by id.
    names = {id(inner): name for name, inner in module.named_modules() if inner in tops}
    tensors = list(module_tree.places_in(module))
    # If a tensor has several names, ignore it only if the attribute for DDP lists all its names.
    listed = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    single = {id(tensor) for name, _, _, tensor in tensors if name in listed}
    single -= {id(tensor) for name, _, _, tensor in tensors if name not in listed}
    single |= {id(tensor) for tensor in chosen if isinstance(tensor, Tensor)}
    for name, _, _, tensor in tensors:
        if id(tensor) in single:
            names.setdefault(id(tensor), name)
    # Do not raise if `is_elsewhere`: a user may pass the same list to wrappers of several modules.
    is_elsewhere = bool(chosen) and names.keys().isdisjoint(map(id, chosen))
    places = {(inner, attribute) for _, inner, attribute, tensor in tensors if id(tensor) in single}
    modules = {inner for top in tops for inner in top.modules()}
    for unit in wrappers.units_in(module):
        modules |= unit.ignored.modules
        places |= unit.ignored.places
    ignored = Ignored(frozenset(modules), frozenset(places), tuple(names.values()), is_elsewhere)
    # Raise if an inner wrapper has already sharded a tensor that this wrapper must ignore.
    sharded = _sharded_ids(module) & ignored.ids()
    for name, _, _, tensor in tensors:
        if id(tensor) in sharded:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} cannot be ignored, because a ShardedWrapper "
                "inside the model has sharded it already. Let the inner ShardedWrapper ignore the "
                "parameter, or ignore only modules that contain no ShardedWrapper."
            )
    return ignored


def _read(given: Mapping[str, Any], keyword: str, *kinds: type) -> list[Any]:
    """Return the objects that the user passed in ``keyword``, as a list."""
    values = given[keyword]
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
    params: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], *, is_sharded: bool
) -> None:
    """Raise if a tensor cannot be sharded, or parameters are on several devices."""
    for name, tensor in (*buffers.items(), *params.items()):
        if (problem := _problem(tensor, name in params, is_sharded)) is not None:
            kind = "parameter" if name in params else "buffer"
            raise type(problem)(f"ShardedWrapper: {kind} {name!r} {problem}")
    placed = [(name, param.device) for name, param in params.items() if not param.is_meta]
    for name, device in placed:
        first, expected = placed[0]
        if device != expected:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is on {str(device)!r}, but {first!r} is on "
                f"{str(expected)!r}. Move the module to one device before wrapping."
            )


def _problem(tensor: Tensor, is_param: bool, is_sharded: bool) -> Exception | None:
    """Return the error if a tensor cannot be sharded or broadcast, otherwise None."""
    kind, remedy = type(tensor.data), "pass its module in ignored_modules."
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        return ValueError("is not initialised (a lazy module). Run one forward before wrapping.")
    if is_wrapped(tensor):
        return ValueError(f"is already in another ShardedWrapper. {SHARED_REMEDY}")
    # Refuse subclasses: a flat parameter stores only elements, and would lose the subclass's state
    # and methods. Some code (an optimizer for manifolds) also chooses parameters by their class.
    loses_class = is_sharded and type(tensor) is not nn.Parameter
    if is_param and (kind is not Tensor or loses_class):
        name = (type(tensor) if kind is Tensor else kind).__name__
        text = f"is a {name}, but sharding keeps only the elements. Make it a plain nn.Parameter"
        return TypeError(f"{text} (which keeps its attributes), or {remedy}")
    what = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else ""
    if not what and tensor.layout is not torch.strided:
        what = f"of layout {tensor.layout}"
    elif not what and kind is Tensor and tensor.numel() and not tensor.is_meta:
        last = tensor.storage_offset() + _extent(tensor)
        # Reading a tensor whose storage was freed would crash the process.
        is_freed = tensor.untyped_storage().nbytes() < last * tensor.element_size()
        what = "freed" if is_freed else ""
    if what:
        needs = "only dense tensors with memory can be sharded or synchronised"
        return TypeError(f"is {what}, but {needs}. Call to_dense() or dequantize(), or {remedy}")
    if is_sharded and tensor.grad is not None and bool(tensor.grad.any()):
        return ValueError(
            "has a gradient, which would be lost. Wrap before backward, or call zero_grad() first."
        )
    return None


def _tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules have as attributes, other than parameters and buffers."""
    for prefix, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            # Skip `weight` if `nn.utils.spectral_norm` sets it from `weight_orig` in each forward.
            if type(value) is Tensor and f"{name}_orig" not in submodule._parameters:
                yield f"{prefix}.{name}".lstrip("."), value


def _check_shares_no_memory(params: Mapping[str, nn.Parameter], others: dict[str, Tensor]) -> None:
    """Raise ValueError if a trained parameter shares memory with another tensor of the module."""
    placed = []
    for name, tensor in (*others.items(), *params.items()):
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.numel() == 0):
            start, nbytes = tensor.data_ptr(), _extent(tensor) * tensor.element_size()
            placed.append((start, start + nbytes, name, tensor))
    placed.sort(key=lambda one: one[:2])
    for number, (_, end, name, tensor) in enumerate(placed):
        for start, _, other_name, other in placed[number + 1 :]:
            if start >= end:
                break
            is_trained = tensor.requires_grad or other.requires_grad
            if is_trained and {name, other_name} & params.keys() and _share_elements(tensor, other):
                raise _shared_memory(name, other_name, params)


def _shared_memory(name: str, other_name: str, params: Mapping[str, nn.Parameter]) -> ValueError:
    """Return the error for two tensors, at least one of them a parameter, in the same memory."""
    if name in params and other_name in params:
        return ValueError(
            f"ShardedWrapper: parameters {name!r} and {other_name!r} are views of the same "
            "memory, but would get separate shards. Tie them (one nn.Parameter object), or "
            f"replace {other_name!r} by nn.Parameter(weight.detach().clone())."
        )
    other, param = (other_name, name) if name in params else (name, other_name)
    return ValueError(
        f"ShardedWrapper: the tensor {other!r} is a view of parameter {param!r}, but would keep "
        "the present values, because sharding moves the parameter to other memory. Read the "
        "parameter itself in forward, or store a detach().clone() if you want the present values."
    )


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first element in memory to its last."""
    return 1 + sum((tensor.size(d) - 1) * tensor.stride(d) for d in range(tensor.dim()))


def _share_elements(param: Tensor, other: Tensor) -> bool:
    """Whether two tensors with overlapping ranges of addresses share the memory of an element."""
    unit = min(param.element_size(), other.element_size())
    start = min(param.data_ptr(), other.data_ptr())

    def places(tensor: Tensor) -> Tensor:
        size = tensor.element_size() // unit
        shape, stride = (*tensor.shape, size), (*(size * s for s in tensor.stride()), 1)
        first = (tensor.data_ptr() - start) // unit
        return first + torch.arange(_extent(tensor) * size).as_strided(shape, stride)

    return bool(torch.isin(places(param), places(other)).any())


def _check_wrappers(module: nn.Module, policy: Policy | None) -> None:
    """Raise ValueError if ``module`` contains a wrapper that ``ShardedWrapper`` cannot contain."""
    for name, inner in module.named_modules():
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"ShardedWrapper: module {name or '(root)'!r} is a {type(inner).__name__}, which "
                "would reduce gradients by itself. Wrap its .module instead."
            )
    for unit in wrappers.units_in(module):
        for extension in unit.context.extensions:
            if not extension.is_made_anew:
                raise ValueError(
                    f"ShardedWrapper: {extension.name}() was called on a part of the module. First "
                    f"make the outermost wrapper, then call {extension.name}() on that wrapper."
                )
    check_frozen(wrappers.other_roots(module))
    if policy is not None and (inside := wrappers.named_unit_modules(module)):
        first, name = next(iter(inside.items()))
        where = f"already contains, at {name!r}," if name else "is already"
        raise ValueError(
            f"ShardedWrapper: auto_wrap_policy cannot be applied, because the module {where} a "
            f"ShardedWrapper (around a {first.__class__.__name__}; {len(inside)} ShardedWrappers "
            "in all). Leave out the policy: then the outer wrapper takes all parameters that are "
            "not in a unit. Or wrap the model once, with the policy."
        )
