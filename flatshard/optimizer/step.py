"""flatshard's hooks before and after ``optimizer.step()``, and ``clip_grad_norm_``.

During a step, plain parameters replace the sharded parameters in the optimizer; see ``adapter``.
"""

import functools
from collections.abc import Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.engine.handle import FlatParamHandle
from flatshard.memory import checksum
from flatshard.optimizer import adapter as adapters
from flatshard.optimizer.adapter import Optimizer, adapter_of, stepping, unhooked
from flatshard.optimizer.state_dicts import STAMP, check_state, watch
from flatshard.precision import Args, Kwargs, check_dtype, get_dtype, get_grad
from flatshard.tensor import operators, sharded_tensor
from flatshard.tensor.flat_parameter import is_wrapped
from flatshard.tensor.sharded_tensor import UNREDUCED_UNITS, is_unreduced, untraced
from flatshard.units.module_tree import unit_text


@functools.cache
def install() -> None:
    """Register the global hook before all optimizer steps, once per process."""
    # Use a global hook, which also works for optimizers that were made before wrapping.
    register_optimizer_step_pre_hook(_before_step)


def restore_all() -> None:
    """Put the sharded parameters back into optimizers whose last step raised."""
    for optimizer in list(stepping):
        stepping.pop(optimizer).undo(optimizer)


def _restore_after_failure(optimizer: Optimizer) -> None:
    """Make ``step()`` of the optimizer's class call ``restore_all`` if a step raises.

    Otherwise a program that catches the error could make a new optimizer of the plain parameters in
    ``param_groups``. That optimizer would train nothing.
    """
    # torch has no hook for a step that raises. So replace the step function, `func`, in the closure
    # of torch's wrapper (`profile_hook_step`), which reads `func` after the pre-hooks: this changes
    # even the current step. Without a wrapper, the next forward or step calls `restore_all`.
    step: Any = type(optimizer).step
    while isinstance(step, FunctionType):
        cells = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=False))
        if step.__globals__["__name__"] == Optimizer.__module__ and "func" in cells:
            func = cells["func"].cell_contents
            if getattr(func, "__module__", None) != __name__:
                # With `skip`, Dynamo compiles `func`, but not `call` of `_restoring`.
                cells["func"].cell_contents = torch._dynamo.decorators.skip(_restoring(func))
            return
        step = getattr(step, "__wrapped__", None)


def _restoring(step: Any) -> Any:
    # Do not use `functools.wraps`, which would copy Dynamo's marks of one `step` to `call`. All
    # functions that `_restoring` returns share the code of `call`, so all would be marked.
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            restore_all()
            raise

    return call


@untraced
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if unhooked:
        return
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if "flatshard" not in before:
        is_stamped = any(STAMP in group for group in optimizer.param_groups)
        if not is_stamped and not any(map(is_wrapped, adapters.all_params(optimizer))):
            return  # the optimizer has no parameters and no state of a wrapped model
        watch(optimizer)
        _restore_after_failure(optimizer)
    # Restore optimizers whose last step raised. If an optimizer in `stepping` is calling
    # `optimizer.step()` now, as Lookahead does, no step has raised.
    if stepping and not any(optimizer in adapters.with_inner(outer) for outer in stepping):
        restore_all()
    for extension in adapters.extensions:
        extension.before_step(optimizer)
    # Users' hooks must see the sharded parameters. So `_begin` must run after all users' pre hooks,
    # and `_end` before all users' post hooks. Repeat this in each step: users may have added hooks.
    before["flatshard"], after["flatshard"] = _begin, _end
    before.move_to_end("flatshard")
    after.move_to_end("flatshard", last=False)


@_restoring
@untraced
def _begin(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Replace the optimizer's sharded parameters by plain parameters, for the next step.

    Returns new arguments for torch's call of ``step()``. None: use ``args`` and ``kwargs``.
    """
    if unhooked:
        return None
    if optimizer in stepping:  # `step()` has called `super().step()`, which calls the hooks again
        stepping[optimizer].undo(optimizer)
    adapter = adapter_of(optimizer)
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    closure: Any = None
    if given is not None:

        def run(*args: Any, **kwargs: Any) -> Any:  # composer's SAM passes arguments
            with torch.enable_grad():
                result = given(*args, **kwargs)
            for extension in adapters.extensions:
                extension.before_step(optimizer)
            _check_params(optimizer)  # check again, because the closure has computed gradients
            return result

        closure = adapters.Closure(run, optimizer, is_early=adapter.needs_loss(optimizer))
    _check_params(optimizer)
    # Call `at_step` only for an outermost step, not inside the step of another optimizer.
    for record in () if stepping else adapters.at_step:
        record(optimizer)
    stepping[optimizer] = adapter
    stepped = adapter.begin(optimizer, closure)
    if len(args) > 1:
        return (stepped, closure, *args[2:]), kwargs
    return (stepped,), kwargs if closure is None else {**kwargs, "closure": closure}


@_restoring
@untraced
def _end(optimizer: Optimizer, *_: Any) -> None:
    """Put the sharded parameters back after a step that did not raise."""
    if not unhooked and optimizer in stepping:
        stepping[optimizer].end(optimizer)
        del stepping[optimizer]


def _check_params(optimizer: Optimizer) -> None:
    """Raise if gradients are not reduced yet, or if the optimizer cannot use the gradients."""
    if sharded_tensor.ASSIGNED:
        _check_assigned(optimizer)
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            if STAMP in group or not optimizer.defaults.keys() <= group.keys():
                check_state(optimizer)
            for param in group["params"]:
                if (grad := get_grad(param)) is None:
                    continue
                if get_dtype(grad) is not get_dtype(param):
                    check_dtype(optimizer, group, param)
                if UNREDUCED_UNITS and is_unreduced(grad):
                    where = unit_text(vars(grad)["unreduced_unit"])
                    raise RuntimeError(sharded_tensor.not_reduced(where, "step()"))


def _check_assigned(optimizer: Optimizer) -> None:
    """Raise if the program has assigned different full tensors to ``.grad``. Collective."""
    sums: dict[Communicator, dict[str, object]] = {}
    for param in adapters.all_params(optimizer):
        is_sharded = isinstance(param, sharded_tensor.FlatShardTensor)
        if is_sharded and param.spec in sharded_tensor.ASSIGNED and type(param.grad) is Tensor:
            for comm in (param.spec.comm, param.spec.replicas):
                sums.setdefault(comm, {})[param.spec.name] = checksum(param.grad)
    for comm, mine in sums.items():
        everyone = comm.host.gather(mine, "full tensors assigned to .grad")
        different = (name for name in mine if len({one.get(name) for one in everyone}) > 1)
        if (name := next(different, None)) is not None:
            raise RuntimeError(
                f"parameter {name!r}, rank {comm.rank}: step() got different full tensors in .grad "
                "on the ranks. Average them (dist.all_reduce) before or after the assignment, or "
                "assign before backward, which averages them."
            )


# ------------------------------------------------------------ clipping


def check_alike(handles: Sequence[FlatParamHandle], world: Communicator) -> None:
    """Raise if only some ranks of ``world`` train a unit: norms would differ between ranks."""
    for handle in handles:
        if handle.topology.world.size < world.size:
            raise RuntimeError(
                f"{unit_text(handle.unit.name)}: clip_grad_norm_() cannot clip the whole model, "
                f"because this unit trains only on ranks {handle.topology.world.ranks_text}, and "
                "the total norm would differ between ranks. Call clip_grad_norm_() on each inner "
                "ShardedWrapper instead, or compute a norm yourself, and scale the gradients."
            )


def check_reduced(handles: list[FlatParamHandle], world: Communicator, *, reduces: bool) -> None:
    """Raise, on all ranks, if any rank has gradients that were accumulated under ``no_sync``.

    ``reduces``: whether the last forward began outside of ``no_sync``. If True, either all ranks
    have such gradients or none has, so the ranks do not communicate. If False, this call is
    collective: all ranks of ``world`` must make the call.
    """
    error = None
    if shown := [unit_text(handle.unit.name) for handle in handles if handle.grads.is_shown()]:
        where = f"{shown[0]}, rank {world.rank}"
        error = RuntimeError(sharded_tensor.not_reduced(where, "clip_grad_norm_()"))
    if not reduces:
        # After a forward under `no_sync`, perhaps only some ranks have unreduced gradients.
        raise_everywhere(error, world, op_name="clip_grad_norm_")
    if error is not None:
        raise error


@torch.no_grad()
def clip_grad_norm_(
    params: Sequence[Tensor],
    handles: Sequence[FlatParamHandle],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Implement ``ShardedWrapper.clip_grad_norm_`` for the gradients of ``params``. Collective."""
    sharded = {id(param): param for handle in handles for param in handle.sharded}
    wanted = {id(param): param for param in params}
    # Sort as in the model, so that rounding does not depend on the order of `params`.
    ordered = [param for key, param in wanted.items() if key not in sharded]
    ordered += [param for key, param in sharded.items() if key in wanted]
    with torch._C.DisableTorchFunctionSubclass():
        found = [param.grad for param in ordered]
        grads = [grad for grad in found if grad is not None and grad.numel() > 0]
    order = float(norm_type)
    norms = operators.norms(grads, order)
    # Let torch combine the norms of all gradients: then dtypes and errors are as for plain tensors.
    total = nn.utils.get_total_norm(norms, order, error_if_nonfinite, foreach)
    # Pass this rank's ranges of the gradients to torch as plain tensors, whose operations are fast.
    # torch reads only the attribute `grad` of each object.
    ranges: Any = [SimpleNamespace(grad=sharded_tensor.local_range(grad)) for grad in grads]
    nn.utils.clip_grads_with_norm_(ranges, max_norm, total, foreach)
    return total
