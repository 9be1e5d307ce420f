"""Extra: converts (``model.to()``) and copies (``copy.deepcopy(model)``) sharded models.

Without this folder, both raise ``MissingExtraError``.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.engine.backward import Backward
from flatshard.engine.forward import surround_calls
from flatshard.engine.gradients import edited
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import temporarily
from flatshard.engine.unit import Unit
from flatshard.extras.model_shards import check_has_all_modules
from flatshard.module.run import start_run
from flatshard.module.wrappers import check_not_summoned, unit_of, units_in
from flatshard.precision import CAST_BUFFERS, cast_again, set_grad
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.module_tree import ParamInfo, unit_text


def convert(root: ModuleProxy, fn: Callable[..., Any], *, recurse: bool) -> None:
    """Convert a sharded model, by converting the shards instead of the parameters."""
    context = unit_of(root).context
    # If an outer wrapper's `_apply` has called this wrapper, the outer wrapper converts all shards.
    if context.is_converting:
        root.module._apply(fn, recurse)
        return
    context.forward.recover()
    check_not_summoned(units_in(root), "converted")
    units = units_in(root) if recurse else [unit_of(root)]
    handles = [handle for unit in units for handle in unit.handles]
    # The checks below raise, for example for a part of a unit. Skip them if the conversion has no
    # effect: teardown code calls `.cpu()` on parts of a model that are already on the CPU.
    if any(_changes(handle.flat_param, fn) for handle in handles):
        context.check_between_steps("a conversion of the model")
        check_has_all_modules(root, "converted")
        for handle in handles:
            handle.check_places()  # the conversion would drop a parameter that was replaced
    with temporarily([context], is_converting=True), contextlib.ExitStack() as hidden:
        for module, name, _ in (place for handle in handles for place in handle.places):
            # Hide the parameter from torch, which would convert the parameter. The same object is
            # put back, because `check_places` reports any other object as a user's replacement.
            hidden.callback(module._parameters.__setitem__, name, module._parameters[name])
            module._parameters[name] = None
        root.module._apply(fn, recurse)
        for module in root.modules():
            # A mixed precision policy has cast buffers, and `module.to(dtype)` must not undo the
            # cast. Change only the buffers' recorded original dtypes, which state dicts use.
            _, own = module.__dict__.get(CAST_BUFFERS, (None, {}))
            own |= {name: fn(torch.empty(0, dtype=dtype)).dtype for name, dtype in own.items()}
            cast_again(module)
    for handle in handles:
        _convert_handle(handle, fn)
        if handle.installed is None:
            handle.put_back()  # RNN modules have listed their weights while the weights were hidden
    context.refresh()


def _changes(shard: Tensor, fn: Callable[[Tensor], Tensor]) -> bool:
    with torch.inference_mode(False), torch.no_grad():
        probe = torch.ones(1, dtype=shard.dtype, device=shard.device)
        before = probe.data_ptr()
        after = fn(probe)
        return after is not probe or after.data_ptr() != before or bool(after != 1)


def _convert_handle(handle: FlatParamHandle, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace the shard and the gradients of ``handle`` with the tensors that ``fn`` returns."""
    handle.reshard()
    # Wait for the all-gather that refreshes secondary shards (of a hybrid strategy). In this
    # all-gather, other ranks read the memory of this rank's shard, which the code below frees.
    if handle.gather.secondary is not None:
        handle.gather.secondary.finish_refresh()
    handle.absorb_replaced()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        before = handle.flat_param.data_ptr()
        converted = fn(handle.flat_param)
        if converted is handle.flat_param and converted.data_ptr() == before:
            return
        if converted.device.type == "meta":
            raise RuntimeError(
                f"{unit_text(handle.unit.name)}: a sharded model cannot move to the meta device, "
                "where its weights would be lost. To free its memory, delete the model."
            )
        if converted.device != handle.flat_param.device:
            handle.device = converted.device
        handle.gather.move_to(handle.device, converted.dtype)
        handle.grads.take_all_back()
        if handle.grads.was_edited:
            raise edited(handle.unit.name)
        grads = [param.grad for param in handle.sharded]
        for param in handle.sharded:
            param.grad = None
        handle.adopt(converted)
        handle.page_out()
        take_in = handle.plan.targets.gradient.take_in
        for original, grad in zip(handle.params, grads, strict=True):
            if isinstance(grad, FlatShardTensor):
                local, origin = take_in(fn(grad.local)), grad.shard_origin
                twin = FlatShardTensor(local, original.spec, role=grad.shard_role, origin=origin)
                set_grad(original.sharded, twin)
            elif grad is not None:
                set_grad(original.sharded, take_in(fn(grad)))
    handle.grads.use(handle.plan_gradients(converted.dtype, handle.grads.plan.comm_hook))


def copy_model(root: ModuleProxy, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a wrapper, with all units inside. No communication."""
    check_not_summoned(units_in(root), "copied")
    # The outermost wrapper puts all units into `memo`, where the inner wrappers find their units.
    is_outermost, units = id(unit_of(root)) not in memo, list[Unit]()
    if is_outermost:
        check_has_all_modules(root, "copied")
        # Leave out units that were copied with another model in the same `copy.deepcopy`.
        units = [unit for unit in units_in(root) if id(unit) not in memo]
    for unit in units:
        unit.context.forward.recover()
        # Hooks of copied modules refer to the copied unit, which is filled below.
        memo[id(unit)] = Unit.__new__(Unit)
    twin: ModuleProxy = type(root).__new__(type(root))
    memo[id(root)] = twin
    twin.__dict__.update(copy.deepcopy(root.__dict__, memo))
    # If a module defines `__reduce__`, `deepcopy` copies the module's hooks first. The weak
    # references in these hooks then refer to a temporary copy of the module: set them again.
    hook: Any
    for module in twin.modules():
        for hook in module._load_state_dict_pre_hooks.values():
            hook.module = weakref.ref(module)
    with temporarily([Communicator], is_copying=True):
        for unit in units:
            handles = [_copied(handle, memo) for handle in unit.handles]
            # A copy of the unit, without a running step's state.
            copied, ignored = memo[id(unit)], copy.deepcopy(unit.ignored, memo)
            casts = {memo[id(module)]: casts for module, casts in unit.casts.items()}
            Unit.__init__(copied, casts, unit.names, unit.settings, ignored)
            copied.state_dict = copy.deepcopy(unit.state_dict, memo)
            copied.reasons, copied.check_loaded = unit.reasons, unit.check_loaded
            copied.loads, copied.loads_sum = unit.loads.copy(), unit.loads_sum
            copied.own(handles, Backward.receive)
            for module in copied.modules:
                surround_calls(copied, module)
    if is_outermost:
        # Give the copy the number of the original model. The numbers of models must be the same on
        # all ranks. If only this rank makes a copy, a new number would shift later numbers here.
        start_run(twin, number=unit_of(root).context.number)
    return twin


def _copied(handle: FlatParamHandle, memo: dict[int, Any]) -> FlatParamHandle:
    """Copy ``handle`` for modules that were deep-copied; ``memo`` maps modules to their copies.

    The copy has no unreduced gradients. These stay with ``handle``.
    """
    handle.absorb_replaced()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        shard = handle.flat_param.detach().to(handle.device, copy=True)
    plan = copy.copy(handle.plan)
    plan.dtype, plan.device = shard.dtype, handle.device
    plan.infos = [_copied_param(param, memo) for param in handle.params]
    twin = FlatParamHandle(plan, plan.take_params(), shard)
    twin.page_out()
    return twin


def _copied_param(param: OriginalParam, memo: dict[int, Any]) -> ParamInfo:
    """Return the deep copy of a parameter, and its locations in the copied modules."""
    places = [replace(place, module=memo[id(place.module)]) for place in param.locations]
    places[0] = replace(places[0], name=param.name)
    return ParamInfo(memo.get(id(param.sharded), param.sharded), places)
