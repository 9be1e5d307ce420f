"""Wrap policies, and the units chosen by a policy in a model.

A policy has one of three forms:

- The string ``"auto"``: see ``flatshard.extras.auto_wrap``.
- A callable ``policy(module, recurse, nonwrapped_numel) -> bool``, called twice for each module.
  With ``recurse=True``, the policy returns whether to visit the children of the module. If the
  policy returns False, neither the module nor any module inside is a unit, and there is no second
  call. With ``recurse=False``, the policy returns whether the module is a unit. In this second
  call, ``nonwrapped_numel`` does not count elements of units below the module.
- An object with ``_run_policy(root_module, ignored_modules, root_kwargs)``. The method sees the
  whole model and returns the chosen modules, each with keywords.

The last two forms come from ``torch.distributed.fsdp.wrap``, so torch's policies work unchanged.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol, TypeAlias

from torch import nn

from flatshard.options.extras import extra
from flatshard.units.module_tree import ModuleTree, ParamInfo, has_forward, numel

# `flatshard.wrap` exports these names.
__all__ = ["CustomPolicy", "ModuleWrapPolicy", "always_wrap_policy", "enable_wrap", "wrap"]
__all__ += ["lambda_auto_wrap_policy", "size_based_auto_wrap_policy"]
__all__ += ["transformer_auto_wrap_policy"]

Keywords: TypeAlias = dict[str, Any]
Classes: TypeAlias = Iterable[type[nn.Module]]


class PolicyObject(Protocol):
    """A policy whose method ``_run_policy`` sees all modules at once."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Keywords
    ) -> dict[nn.Module, Keywords]: ...


Policy: TypeAlias = Callable[..., bool] | PolicyObject | Literal["auto"]


@dataclass(frozen=True)
class ChosenModule:
    """A module that will be a unit, or a part of a unit of several small modules."""

    name: str  # the first FQN of the module in the root
    module: nn.Module = field(repr=False)
    overrides: Keywords = field(default_factory=dict)  # keywords that replace the root's keywords
    reason: str = field(default="", compare=False, repr=False)  # the policy, and its reason
    # The parameters that the module owns, in registration order. Filled by `ModelPlan`.
    infos: list[ParamInfo] = field(default_factory=list, compare=False, repr=False)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Classes | None = None,
    exclude_wrap_modules: Classes | None = None,
) -> bool:
    """Make a unit of each module with at least ``min_num_params`` elements not in inner units.

    Set ``min_num_params`` by ``functools.partial``, as in the example.

    Example:
        ```python
        from flatshard.wrap import size_based_auto_wrap_policy

        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)
        model = ShardedWrapper(model, auto_wrap_policy=policy)
        ```

    Args:
        module: the module to decide about.
        recurse: whether to decide about the module's children (True), or about the module itself.
        nonwrapped_numel: number of elements in the module that are in no unit yet.
        min_num_params: minimum number of elements of a unit.
        force_leaf_modules: classes whose instances, and all modules inside, are never units.
            Default: this function's attribute ``FORCE_LEAF_MODULES``.
        exclude_wrap_modules: classes whose instances are never units; modules inside may be units.
            Default: this function's attribute ``EXCLUDE_WRAP_MODULES``.

    Raises:
        ValueError: ``min_num_params`` is negative or not an int.
    """
    bound = min_num_params
    if isinstance(bound, bool) or not isinstance(bound, Integral) or bound < 0:
        raise ValueError(
            f"min_num_params: expected an int >= 0, for example 20_000 or int(1e6), got {bound!r}."
        )
    if nonwrapped_numel < min_num_params:
        return False
    argument = "force_leaf_modules" if recurse else "exclude_wrap_modules"
    barred = force_leaf_modules if recurse else exclude_wrap_modules
    if barred is None:
        barred = getattr(size_based_auto_wrap_policy, argument.upper())
    return not isinstance(module, _class_tuple(barred, argument))


# mypy does not know that functions can have attributes, so ignore its error.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Classes
) -> bool:
    """Make a unit of each instance of ``transformer_layer_cls``, a set of classes.

    Example:
        ```python
        from flatshard.wrap import transformer_auto_wrap_policy

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        model = ShardedWrapper(model, auto_wrap_policy=policy)
        ```
    """
    classes = _class_tuple(transformer_layer_cls, "transformer_layer_cls")
    return recurse or isinstance(module, classes)


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Make a unit of each module for which ``lambda_fn(module)`` is true.

    Example:
        ```python
        from flatshard.wrap import lambda_auto_wrap_policy

        policy = functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)
        )
        model = ShardedWrapper(model, auto_wrap_policy=policy)
        ```
    """
    return recurse or lambda_fn(module)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make a unit of every module that can be a unit."""
    return True


class ModuleWrapPolicy:
    """Make a unit of each instance of the given classes.

    The policy is a callable, so another policy can combine this policy with further conditions.

    Example:
        ```python
        from flatshard.wrap import ModuleWrapPolicy

        model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}))
        ```

    Args:
        module_classes: the classes; instances of subclasses are units, too.

    Raises:
        TypeError: ``module_classes`` contains an object that is not a class.
    """

    def __init__(self, module_classes: Classes) -> None:
        self._module_classes = frozenset(_class_tuple(module_classes, "module_classes"))

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({show(self._module_classes)})"


class CustomPolicy:
    """Let a function choose the units. The function can also return keywords for a unit.

    Example:
        ```python
        def choose(module):
            if isinstance(module, nn.Embedding):
                return {"reshard_after_forward": False}  # this unit stays unsharded until backward
            return isinstance(module, Block)

        model = ShardedWrapper(model, auto_wrap_policy=CustomPolicy(choose))
        ```

    Args:
        lambda_fn: called once with each module. If the function returns ``True``, the module is a
            unit with the root's keywords. If it returns a dict, the module is a unit, and the dict
            overrides the root's keywords. If it returns ``False`` or an empty dict, the module is
            no unit.

    Raises:
        TypeError: ``lambda_fn`` cannot be called.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise TypeError(
                "CustomPolicy: expected a function of one module, for example "
                f"CustomPolicy(lambda module: isinstance(module, Block)), got {show(lambda_fn)}."
            )
        self._lambda_fn = lambda_fn

    def __repr__(self) -> str:
        return f"CustomPolicy({show(self._lambda_fn)})"

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Keywords
    ) -> dict[nn.Module, Keywords]:
        chosen = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ValueError(
                    f"CustomPolicy: the function must return True, False or a dict of keywords, "
                    f"got {show(answer)} for module {name!r} ({type(module).__name__})."
                )
            if answer:
                chosen[module] = root_kwargs | (answer if isinstance(answer, dict) else {})
        return chosen


def find_units(tree: ModuleTree, policy: Policy) -> list[ChosenModule]:
    """Return the modules below ``tree.module`` that become units, children before parents.

    Only a module with parameters that are not ignored can be a unit. Some modules are never units,
    see the note in ``flatshard.units.module_tree``.
    """
    reasons: dict[nn.Module, str] = {}
    chosen: dict[nn.Module, Keywords]
    if isinstance(policy, str):
        asked_for = f"ShardedWrapper(auto_wrap_policy={policy!r})"
        reasons = extra("auto_wrap", asked_for).AutoUnits(tree).reasons()
        chosen = {module: {} for module in reasons}
    elif hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(tree.module, set(tree.ignored.modules), {})
    else:
        chosen = _ask(tree, policy)
    names = {module: name for name, module in tree.module.named_modules()}
    # If a policy chose a block inside `torch.compile(block)`, the outer module becomes the unit, so
    # that the unit's hooks run outside of the compiled graph.
    for outer in tree.candidates():
        inner = dict(outer.named_children()).get("_orig_mod")
        if inner in chosen and outer not in chosen:
            chosen[outer] = chosen.pop(inner)
            reasons.update({outer: reasons[inner]} if inner in reasons else {})
    found = []
    for module in tree.candidates():
        if module in chosen:
            reason = f"policy {show(policy)}"
            reason += f": {reasons[module]}" if module in reasons else ""
            found.append(ChosenModule(names[module], module, dict(chosen[module]), reason))
    return found


def _ask(tree: ModuleTree, policy: Callable[..., bool]) -> dict[nn.Module, Keywords]:
    """Return the modules that a callable policy chooses."""
    chosen: dict[nn.Module, Keywords] = {}
    # For each visited module: the parameters that belong to units in the module. Each parent leaves
    # these parameters out of `nonwrapped_numel`.
    held_in: dict[nn.Module, set[nn.Parameter]] = {}

    def visit(module: nn.Module) -> set[nn.Parameter]:
        if module in held_in:
            return held_in[module]
        params = tree.params(module)
        held: set[nn.Parameter] = set()
        if policy(module=module, recurse=True, nonwrapped_numel=numel(params)):
            held = held.union(*(visit(child) for _, child in tree.open_children(module)))
            left = numel(params - held)
            can_be_unit = module is not tree.module and has_forward(module)
            if can_be_unit and policy(module=module, recurse=False, nonwrapped_numel=left):
                chosen[module] = {}
                held = params
        held_in[module] = held
        return held

    visit(tree.module)
    return chosen


# Keywords of the innermost active `enable_wrap`, or None if no `enable_wrap` is active.
_enabled: ContextVar[Keywords | None] = ContextVar("enabled", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **keywords: Any) -> Iterator[None]:
    """Let ``wrap`` make units inside a ``with`` statement.

    A model's constructor calls ``wrap`` on the layers that should be units. Outside of
    ``enable_wrap``, the same constructor makes an ordinary model. Inside a nested ``enable_wrap``,
    only the keywords of the inner ``enable_wrap`` apply.

    Example:
        ```python
        from flatshard.wrap import enable_wrap, wrap

        class Mlp(nn.Sequential):
            def __init__(self):
                super().__init__(wrap(nn.Linear(8, 16)), nn.ReLU(), wrap(nn.Linear(16, 8)))

        with enable_wrap(wrapper_cls=ShardedWrapper):
            model = ShardedWrapper(Mlp())  # each of the linear layers is a unit
        ```

    Args:
        wrapper_cls: ``ShardedWrapper``, or another callable that takes a module and keywords.
        keywords: keywords for ``wrapper_cls``, the same for each module.
    """
    token = _enabled.set({"wrapper_cls": wrapper_cls, **keywords})
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **overrides: Any) -> nn.Module:
    """Make ``module`` a unit, if an ``enable_wrap`` is active; otherwise return ``module``.

    Collective inside ``enable_wrap(wrapper_cls=ShardedWrapper)``: every rank must build the same
    model.

    Args:
        module: the module.
        overrides: keywords for this module, which override the keywords of ``enable_wrap``.
    """
    enabled = _enabled.get()
    if enabled is None:
        return module
    keywords = {**enabled, **overrides}
    wrapper_cls: Callable[..., nn.Module] = keywords.pop("wrapper_cls")
    return wrapper_cls(module, **keywords)


def as_policy(policy: Any) -> Policy | None:
    """Check the user's ``auto_wrap_policy``, and return it."""
    expected = (
        'expected "auto", a policy object such as ModuleWrapPolicy({Block}) or a callable such '
        "as functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)"
    )
    is_object = hasattr(policy, "_run_policy") and not isinstance(policy, type)
    if policy is None or policy == "auto" or is_object:
        return policy
    if isinstance(policy, str):
        is_name = policy.endswith(("_policy", "Policy"))
        hint = f" To use {policy}, pass the object, not its name." if is_name else ""
        raise ValueError(f"auto_wrap_policy: {expected}, got {policy!r}.{hint}")
    if isinstance(policy, type | nn.Module) or not callable(policy):
        kind = type(policy).__name__
        raise TypeError(f"auto_wrap_policy: {expected}, got {show(policy)} ({kind}).")
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"auto_wrap_policy: {expected}, got {show(policy)}, which cannot be called with the "
            f"keywords module, recurse and nonwrapped_numel ({error}). Bind all other arguments "
            "with functools.partial."
        ) from error
    return policy


def _class_tuple(classes: Any, argument: str) -> tuple[type, ...]:
    are_several = isinstance(classes, Iterable) and not isinstance(classes, type)
    found = tuple(classes) if are_several else (None,)
    if not all(isinstance(item, type) for item in found):
        raise TypeError(
            f"{argument}: expected a set of classes, for example {{Block}}, got {show(classes)}."
        )
    return found


def show(value: object) -> str:
    """Return a short text for a value in a message: a module's repr could fill pages."""
    if isinstance(value, nn.Module):
        return f"an instance of {type(value).__name__}"
    if isinstance(value, list | tuple | set | frozenset):
        return "{" + ", ".join(sorted(map(show, value))) + "}"
    if isinstance(value, functools.partial):
        settings = [show(item) for item in value.args]
        settings += [f"{key}={show(item)}" for key, item in value.keywords.items()]
        return f"{show(value.func)}({', '.join(settings)})"
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__name__
    return repr(value)
