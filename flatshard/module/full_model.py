"""``FullModel``: a sharded model seen, saved and loaded as if it were whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from flatshard.module.unit_module import (
    UnitModule,
    outermost_unit_modules,
    state_dicts_in,
    unit_modules,
    units_at_rest,
    units_in,
    without_flat_parameters,
)
from flatshard.state import full_params, model_state, optim_state
from flatshard.tensor.sharded_tensor import FlatShardTensor


class FullModel(UnitModule):
    """Whole parameters, state dicts and optimizer state, under the unwrapped model's names."""

    # ------------------------------------------------------------ whole parameters

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Let the modules of ``module`` hold whole plain parameters, under the unwrapped names.

        At the end, also one by an exception, each rank keeps its own slice of what it wrote
        itself: ranks write the same, or the model is a mixture. Values and ``requires_grad`` are
        kept, and gradients with ``with_grads``; hooks and other attributes are not. One summon
        inside another shows what the outer one shows. Forwards and copies of the model are
        refused inside.

        Collective: all ranks, at entry.

        Args:
            module: a wrapper, or any module that contains some.
            recurse: nested units too. False: only the outermost ones.
            writeback: keep what is written. False: it is undone, for every strategy.
            rank0_only: only rank 0 holds whole parameters, the others keep their sharded ones and
                at most one whole unit in memory; needs ``writeback=False``. Inside, nothing that
                is collective may be called.
            offload_to_cpu: the whole parameters lie in CPU memory, copied there unit by unit.
            with_grads: ``p.grad`` is the whole reduced gradient, None where there is none. Setting
                it to None drops it, assigning one where there was none adds it.

        Raises:
            ValueError: ``rank0_only`` with ``writeback``.
            RuntimeError: a forward or backward of the model is running; ``module`` holds
                parameters of a unit that contains it; gradients are not reduced yet or only some
                ranks have them (``with_grads``). At the end: something written cannot be kept.
        """
        if rank0_only and writeback:
            raise ValueError(
                "summon_full_params: rank0_only=True needs writeback=False, got writeback=True: "
                "what rank 0 writes would not reach the other ranks' parts. To edit, let every "
                "rank write the same with rank0_only=False."
            )
        wrappers = unit_modules(module) if recurse else outermost_unit_modules(module)
        for wrapper in wrappers:
            wrapper._context.recover()
            wrapper._check_between_steps("summon_full_params()", wrapper._context)
        _check_no_parts(module)
        request = full_params.Request(writeback, rank0_only, offload_to_cpu, with_grads)
        units = dict.fromkeys(wrapper._unit for wrapper in wrappers)
        handles = [handle for unit in units for handle in unit.handles]
        with full_params.summoned(handles, request):
            showing = [
                wrapper
                for wrapper in wrappers
                if any(handle.summoned.params for handle in wrapper._unit.handles)
            ]
            with without_flat_parameters(showing):  # they list the originals instead
                yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on the modules of the unwrapped module, children first, and not on wrappers.

        It sees whole plain parameters, and what it writes is kept, also when it raises. It has to
        write the same on all ranks: seed them alike before it draws random numbers. Whole at one
        time are a unit and those around it; units further in are sharded again when ``fn`` is
        called on what contains them, and edits of them through ``parameters()`` are right or
        raise. With ``use_orig_params=False``, all units below are whole until the end.

        Collective: all ranks.

        Raises:
            RuntimeError: as ``summon_full_params``.
        """
        has_flat = any(wrapper._parameters for wrapper in unit_modules(self))
        with FullModel.summon_full_params(self, recurse=has_flat):
            self.module.apply(fn)
        return self

    # ------------------------------------------------------------ state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the unwrapped module's names, on every rank.

        See ``set_state_dict_type`` for rank 0 alone, or in CPU memory.

        Collective: all ranks, also those that get nothing.
        """
        self._context.recover()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the unwrapped module; each rank keeps its part.

        Dtypes are cast. DistributedDataParallel's ``module.`` prefix is understood. No
        communication: every rank passes the same dict. That some ranks did not load at all is an
        error at the end of the next backward.

        Returns:
            Missing and unexpected keys.

        Raises:
            RuntimeError: keys or shapes do not fit.
            ValueError: ``assign=True``.
        """
        self._context.recover()
        children = [name for name, _ in self.module.named_children()]
        own = model_state.without_ddp_prefix(dict(state_dict), children)
        missing_and_unexpected = self.module.load_state_dict(own, strict=strict, assign=assign)
        for unit in units_in(self):
            for handle in unit.handles:
                handle.rest()
        return missing_and_unexpected

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        rank0_only: bool | None = None,
        offload_to_cpu: bool | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state, whole, by the names of the unwrapped model.

        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: tensors with one
        value per element of a parameter have its shape, strides and the state's dtype; ``step``,
        options and what else there is are kept. A tied parameter has its first name. Says nothing
        of ranks, units or ``use_orig_params``, so it loads into any of them, and into a plain
        optimizer: see ``optim_state_dict_to_load``.

        Collective: all ranks, unless there is no wrapper in ``model``. Gathers unit by unit.

        Args:
            model: a wrapper, or any module that contains some; or a plain one.
            optim: an optimizer over its parameters, made before or after wrapping.
            optim_state_dict: what ``optim.state_dict()`` gave; None: asks for it.
            group: accepted; units know their ranks.
            rank0_only: only rank 0 gets the state, other ranks an empty dict. None: as
                ``set_state_dict_type`` said, otherwise False.
            offload_to_cpu: its tensors lie in CPU memory, copied there unit by unit. None: as
                ``set_state_dict_type`` said, otherwise True.

        Raises:
            ValueError: on all ranks: the optimizer has a parameter that ``model`` has not, state
                that is neither one value per element nor a number, or other state on each rank.
            RuntimeError: a forward or backward of the model is running; ``optim_state_dict`` is
                another rank's.
        """
        units = units_at_rest(model, "optim_state_dict()")
        options = model_state.options_of(state_dicts_in(model))
        return optim_state.full_state(
            model,
            optim,
            units,
            optim_state_dict,
            rank0_only=options.optim_rank0_only if rank0_only is None else rank0_only,
            offload_to_cpu=(
                options.optim_offload_to_cpu if offload_to_cpu is None else offload_to_cpu
            ),
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes on this rank of an ``optim_state_dict``.

        ``optim_state_dict`` is from ``optim_state_dict()``, or a plain optimizer's own
        ``state_dict()``, whose positions count the parameters in the order of ``optim``'s groups.
        Dtypes are cast by ``optim.load_state_dict``, as for plain optimizers. Without a wrapper
        in ``model`` the names only become positions.

        With ``use_orig_params=False``, an original without state beside others in a flat
        parameter gets zeros; those with state must agree on ``step``.

        Collective: all ranks, unless there is no wrapper in ``model``; compares what they load.

        Args:
            model: a wrapper, or any module that contains some; or a plain one.
            optim: an optimizer over its parameters.
            optim_state_dict: the same on every rank; left as it is.
            is_named_optimizer: ``optim.load_state_dict`` takes names instead of positions.
            load_directly: also load the result.
            group: accepted; units know their ranks.

        Returns:
            This rank's part, by position.

        Raises:
            ValueError: on all ranks: parameters are missing or unexpected, a shape is another, an
                ``optim.state_dict()`` of one rank was passed, parts of one flat parameter have
                states or options that cannot be joined, or ranks passed different state.
            RuntimeError: a forward or backward of the model is running.
        """
        loaded = optim_state.state_to_load(
            model,
            optim,
            units_at_rest(model, "optim_state_dict_to_load()"),
            optim_state_dict,
            by_name=is_named_optimizer,
        )
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded


def _check_no_parts(module: nn.Module) -> None:
    """Raise where a unit that is not in ``module`` owns some of its parameters."""
    inside = {
        id(spec)
        for unit in units_in(module)
        for handle in unit.handles
        for spec in handle.params.specs
    }
    for part in module.modules():
        for value in (*part._parameters.values(), *vars(part).values()):
            if isinstance(value, FlatShardTensor) and id(value.spec) not in inside:
                raise RuntimeError(
                    f"summon_full_params: parameter {value.spec.name!r} belongs to unit "
                    f"{value.spec.unit!r}, which is not in the given module. Pass its "
                    "ShardedWrapper, or the whole model."
                )
