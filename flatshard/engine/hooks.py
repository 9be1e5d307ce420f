"""``UnitHooks``: torch's hooks of modules, tensors and parameters become calls of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flatshard.engine.backward import Backward
from flatshard.engine.forward import Forward
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.saved_tensors import tensors_in
from flatshard.engine.unit import Call, Unit


class UnitHooks:
    """The hooks of one unit; ``attach`` says whose step they belong to.

    Attributes:
        unit: the unit.
    """

    def __init__(self, unit: Unit) -> None:
        """Hook the forwards of the unit's modules."""
        self.unit = unit
        before, after = _ModuleHook(self, "_pre_forward"), _ModuleHook(self, "_post_forward")
        for module in unit.modules:
            # First: users' own hooks see unsharded parameters. After an exception, too: whoever
            # catches it may go on with the model.
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, always_call=True)

    def attach(self, forward: Forward, backward: Backward) -> None:
        """Call these from now on."""
        self._forward, self._backward = forward, backward

    def own(self, handles: Iterable[FlatParamHandle]) -> None:
        """Let the unit own flat parameters that call the methods below."""
        self.unit.own(handles)
        for handle in self.unit.lookups:
            handle.params.bring_back_by(self._bring_back)

    def copy_into(self, memo: dict[int, Any], twin: UnitHooks, unit: Unit) -> None:
        """Make ``twin``, which copied modules already call, the hooks of ``unit``, a copy."""
        self.unit.copy_into(memo, unit)
        # The copied modules have hooks already: torch copied them with everything else.
        twin.unit = unit
        twin.own(
            handle.copy_for(memo, twin.on_grad, twin.on_outside_grad)
            for handle in self.unit.handles
        )

    # ------------------------------------------------------------ of modules

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        unit = self.unit
        call = self._forward.enter(unit)
        changed = unit.casts[module].cast_inputs(args, kwargs, is_root=unit.is_root)
        if torch.is_grad_enabled():
            call.num_inputs = _hook_tensors(
                (args, kwargs) if changed is None else changed,
                lambda _: self._backward.receive_of_input(unit, call),
            )
        return changed

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs after an exception too, with ``output`` None."""
        unit = self.unit
        if not unit.running:  # the outermost forward raised before it began
            return None
        call = unit.running.pop()
        changed = output
        try:
            if output is not None:
                self._forward.check(unit, module)
                # The cast first: a copy in another dtype looks into no buffer.
                changed = unit.casts[module].cast_output(output)
                changed = self._forward.saved.protect(changed, unit.name)
                if torch.is_grad_enabled():
                    self._hook_outputs(call, changed)
        finally:
            failed = output is None and sys.exc_info()[0] is not None
            self._forward.leave(unit, has_output=output is not None, failed=failed)
        return changed

    def _hook_outputs(self, call: Call, output: Any) -> None:
        _hook_tensors(output, lambda _: self._backward.enter(self.unit, call))

    # ------------------------------------------------------------ of parameters

    def on_grad(self, handle: FlatParamHandle, index: int, grad: Tensor) -> None:
        """Autograd has the gradient of an unsharded parameter."""
        self._backward.receive(self.unit, handle, index, grad)

    def on_outside_grad(self) -> None:
        """A sharded parameter gets a gradient from its use outside of forward."""
        self._backward.begin()

    def _bring_back(self) -> bool:
        """What only lookups use is used otherwise; see ``Backward.bring_back``."""
        return self._backward.bring_back(self.unit)


def _hook_tensors(value: Any, hook: Callable[[Tensor], None]) -> int:
    """Call ``hook`` for the gradients of what ``value`` holds; returns of how many tensors."""
    num_hooked = 0
    for tensor in tensors_in(value):
        # A leaf outlives the graph, and would gather a hook in every step.
        if tensor.grad_fn is not None:
            tensor.register_hook(hook)
            num_hooked += 1
    return num_hooked


class _ModuleHook:
    """A method of ``UnitHooks`` as a module's hook; is copied with them, or not at all."""

    def __init__(self, hooks: UnitHooks, method: str) -> None:
        self._hooks, self._method = hooks, method
        # Compiled callers run it as it is, between two graphs.
        self._call = torch.compiler.disable(getattr(hooks, method))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleHook:
        twin = memo.get(id(self._hooks))
        return _ModuleHook(
            twin if twin is not None else self._hooks.unit.refuse_to_part(), self._method
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._hooks.unit.refuse_to_part()
