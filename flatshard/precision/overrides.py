"""``PrecisionPlan``: in which dtype each parameter, module and unit of a model computes.

A policy is one unit's; what deviates from it inside the unit is decided here, by class and by name,
before anything is sharded. Parameters that deviate become flat parameters of their own, and
modules get hooks that cast at their boundary (``casts``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from flatshard.options.precision import MixedPrecision, ParamPrecision, ReduceMode
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.module_tree import paths
from flatshard.precision.casts import ModuleCasts, UnitCasts, cast_buffers


@dataclass(frozen=True)
class Override:
    """Another dtype than the policy's; None: the parameter's own."""

    dtype: torch.dtype | None

    @classmethod
    def of(cls, dtype: torch.dtype, params: Iterable[nn.Parameter]) -> Override:
        # Where it is their own, they share a flat parameter with others that keep their own.
        own = {param.dtype for param in params if param.is_floating_point()}
        return cls(None if own == {dtype} else dtype)


class PrecisionPlan:
    """The model's precision, before it is changed."""

    def __init__(
        self,
        root: nn.Module,
        # Of every unit that is to be made, the root too. A unit inside another one with a policy of
        # its own takes no overrides from around it.
        policies: Mapping[nn.Module, MixedPrecision],
        left_alone: Collection[int],  # ids of parameters and buffers: ignored, or another unit's
    ) -> None:
        """Decide.

        Raises:
            TypeError: a function in ``overrides`` gives something else than a floating point dtype.
            ValueError: tied parameters would have to be in several dtypes.
        """
        self._policies, self._left_alone = policies, left_alone
        self._names: dict[nn.Module, list[str]] = {}
        self._policy_of: dict[nn.Module, MixedPrecision] = {}
        self._override_of: dict[nn.Module, Override | None] = {}
        self._casts: dict[nn.Module, ModuleCasts] = {}
        # By id: the name that it had first, and what overrides the policy.
        self._params: dict[int, tuple[str, Override | None]] = {}
        self._not_linear: set[int] = set()
        self._by_function: dict[str, torch.dtype] = {}
        self._untouched: dict[str, torch.dtype] = {}
        self._matched: set[str] = set()
        if all(policy.changes_nothing for policy in policies.values()):
            return
        chains = []
        for name, chain in paths(root):
            if not any(isinstance(module, ModuleProxy) for module in chain):
                self._names.setdefault(chain[-1], []).append(name)
                chains.append(chain)
        # Not before: of a module's names, any may be the one that is overridden.
        for chain in chains:
            self._plan_module(chain)

    def _plan_module(self, chain: tuple[nn.Module, ...]) -> None:
        module, outer = chain[-1], chain[-2] if len(chain) > 1 else None
        if module in self._policy_of:
            return
        policy, around = self._policies.get(module), None
        if outer is not None and policy in (None, self._policy_of[outer]):
            policy, around = self._policy_of[outer], self._override_of[outer]
        assert policy is not None, "the root has a policy"
        if isinstance(module, tuple(policy.module_classes_to_ignore)):
            override: Override | None = Override(None)
        else:
            override = self._by_name(self._names[module], policy, module.parameters()) or around
        self._policy_of[module], self._override_of[module] = policy, override
        outside = _dtype_of(policy, around)
        if override is not None and override.dtype != outside:
            self._casts[module] = ModuleCasts(override.dtype, outside)
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in self._left_alone:
                self._plan_param(module, attribute, param)

    def _plan_param(self, module: nn.Module, attribute: str, param: nn.Parameter) -> None:
        policy = self._policy_of[module]
        names = [f"{name}.{attribute}" if name else attribute for name in self._names[module]]
        if not param.is_floating_point():
            if policy.param_dtype is not None or policy.reduce_dtype is not None:
                self._untouched[names[0]] = param.dtype
            return
        if not (isinstance(module, nn.Linear) and attribute == "weight"):
            self._not_linear.add(id(param))
        # The innermost decides: the parameter's own name, then its module's override.
        override = self._by_name(names, policy, [param])
        override = override or self._by_call(names[0], param, policy)
        override = override or self._override_of[module]
        first, before = self._params.setdefault(id(param), (names[0], override))
        if before != override:
            raise ValueError(
                f"mixed_precision: parameters {first!r} and {names[0]!r} are tied, and would be "
                f"unsharded in {_describe(before)} and in {_describe(override)}. Name both in "
                "overrides."
            )

    def _by_name(
        self, names: list[str], policy: MixedPrecision, params: Iterable[nn.Parameter]
    ) -> Override | None:
        if isinstance(policy.overrides, Mapping):
            for pattern, dtype in policy.overrides.items():
                if any(fnmatchcase(name, pattern) for name in names):
                    self._matched.add(pattern)
                    return Override.of(dtype, params)
        return None

    def _by_call(self, name: str, param: nn.Parameter, policy: MixedPrecision) -> Override | None:
        if policy.overrides is None or isinstance(policy.overrides, Mapping):
            return None
        dtype = policy.overrides(param)
        if dtype is None or dtype == policy.param_dtype:
            return None
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"mixed_precision: overrides({name!r}) must give a floating point torch.dtype or "
                f"None, got {dtype!r}"
            )
        self._by_function[name] = dtype
        return Override.of(dtype, [param])

    def describe(self) -> str:
        """The answers of functions, which must be the same on every rank."""
        return f", overrides by function: {self._by_function}" if self._by_function else ""

    def warnings(self) -> list[str]:
        """Warnings about settings that have no effect."""
        found = []
        if self._untouched:
            listed = ", ".join(f"{name!r} ({dtype})" for name, dtype in self._untouched.items())
            found.append(
                "mixed_precision: only floating point parameters are cast; these stay as they are: "
                + listed
            )
        if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" and any(
            policy.param_dtype or policy.buffer_dtype for policy in self._policies.values()
        ):
            found.append(
                "mixed_precision: FSDP_USE_FULL_PREC_IN_EVAL=1 has no effect: after model.eval() "
                "param_dtype and buffer_dtype are used as in training. To evaluate in full "
                "precision, wrap without them, and train under torch.autocast"
            )
        given = [policy.overrides for policy in self._policies.values()]
        patterns = {name for one in given if isinstance(one, Mapping) for name in one}
        found.extend(
            f"mixed_precision: overrides: no module or parameter is called {pattern!r}"
            for pattern in sorted(patterns - self._matched)
        )
        return found

    def of_param(self, param: nn.Parameter, policy: MixedPrecision) -> ParamPrecision:
        """The dtypes of a parameter and its gradient; ``policy`` is its unit's."""
        own = ParamPrecision(
            keeps_reduce_dtype=policy.keep_low_precision_grads,
            fixed_order=policy.reduce_mode is ReduceMode.FIXED_ORDER,
        )
        if not param.is_floating_point():
            return own
        _, override = self._params.get(id(param), ("", None))
        if override is None:
            return replace(
                own,
                compute_dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype,
                gather_dtype=None if id(param) in self._not_linear else policy.gather_dtype,
            )
        computed, reduce_dtype = override.dtype or param.dtype, None
        if policy.reduce_dtype is not None:
            # A parameter kept in fp32, say, is not to have its gradient rounded to bf16.
            wider = torch.promote_types(computed, policy.reduce_dtype)
            reduce_dtype = None if wider == computed else wider
        return replace(own, compute_dtype=override.dtype, reduce_dtype=reduce_dtype)

    def of_unit(self, module: nn.Module, policy: MixedPrecision) -> UnitCasts:
        """The casts of a unit's inputs and outputs."""
        # What the module casts itself, the unit must not cast before.
        override = self._override_of.get(module)
        inputs = None if module in self._casts else _dtype_of(policy, override)
        return UnitCasts(
            as_root=inputs if policy.cast_root_forward_inputs else None,
            below_root=inputs if policy.cast_forward_inputs else None,
            outputs=policy.output_dtype,
        )

    def install(self) -> None:
        """Hook modules, and cast buffers."""
        for module, casts in self._casts.items():
            casts.install(module)
        wanted = {
            module: policy.buffer_dtype
            for module, policy in self._policy_of.items()
            if policy.buffer_dtype is not None and self._override_of[module] is None
        }
        cast_buffers(wanted, self._left_alone)


def _dtype_of(policy: MixedPrecision, override: Override | None) -> torch.dtype | None:
    """The dtype of unsharded parameters; None: their own."""
    return policy.param_dtype if override is None else override.dtype


def _describe(override: Override | None) -> str:
    if override is None:
        return "param_dtype"
    return "its own dtype" if override.dtype is None else str(override.dtype)
