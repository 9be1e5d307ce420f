"""`Side`: one rank of one implementation, and `IDIOMS`: what runs there.

An idiom is written once, as a user of DistributedDataParallel would write it. What wrappers spell
differently (wrapping, the module inside, `no_sync`, full state dicts) is a method of `Side`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4
STEPS = 4
ORACLES = ("ddp", "by hand")
STRATEGIES = (
    *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_OP"),
    *("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OP"),
)
AUTO = "flatshard auto"
"""flatshard with `auto_wrap_policy="auto"` and every other default."""

IMPLEMENTATIONS = (*ORACLES, *(f"flatshard {name}" for name in STRATEGIES), AUTO, "fsdp1", "fsdp2")

Script = Callable[["Side"], Any]


@dataclass(frozen=True)
class Idiom:
    """A script, and what the table says of it.

    Attributes:
        section: the module that it is in.
        title: what users call it.
        is_by_hand: DistributedDataParallel is not right; gradients averaged by hand are.
        unused: DistributedDataParallel needs ``find_unused_parameters=True``.
        slow: it takes more than a second, and is left out of the test suite.
    """

    name: str
    section: str
    title: str
    script: Script
    is_by_hand: bool
    unused: bool
    slow: bool


IDIOMS: dict[str, Idiom] = {}


def idiom(
    title: str, *, by_hand: bool = False, unused: bool = False, slow: bool = False
) -> Callable[[Script], Script]:
    """Enter a script into `IDIOMS` under its own name."""

    def enter(script: Script) -> Script:
        section = script.__module__.rpartition(".")[2]
        add(script.__name__, section, title, script, by_hand=by_hand, unused=unused, slow=slow)
        return script

    return enter


def add(
    name: str,
    section: str,
    title: str,
    script: Script,
    *,
    by_hand: bool = False,
    unused: bool = False,
    slow: bool = False,
) -> None:
    """The same under another name."""
    assert name not in IDIOMS, name
    IDIOMS[name] = Idiom(name, section, title, script, by_hand, unused, slow)


class Mlp(nn.Module):
    """7-5-4-3: no size divides by the number of ranks, or by another."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


class Side:
    """Where an idiom runs: this rank of the default group, with one implementation."""

    def __init__(self, implementation: str, unused: bool = False) -> None:
        self.implementation = implementation
        self.unused = unused
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    # -------------------------------------------------- what wrappers spell differently

    def wrap(self, module: nn.Module, *units: type[nn.Module], divergent: bool = False) -> Any:
        """The module, wrapped; ``units`` (linear layers) are sharded by themselves.

        ``divergent`` declares to flatshard that some ranks skip units.
        """
        kind, _, strategy = self.implementation.partition(" ")
        classes = units or (nn.Linear,)
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, find_unused_parameters=self.unused)
        if kind == "flatshard":
            return self._flatshard(module, strategy, classes, divergent)
        if kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy

            policy = ModuleWrapPolicy(set(classes))
            return FullyShardedDataParallel(
                module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
            )
        if kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.world,))
            for one in reversed(list(module.modules())):
                if one is not module and isinstance(one, classes):
                    fully_shard(one, mesh=mesh)
            return fully_shard(module, mesh=mesh)
        return ByHand(module)

    def _flatshard(
        self, module: nn.Module, strategy: str, units: Any, divergent: bool
    ) -> nn.Module:
        from flatshard import ShardedWrapper
        from flatshard.wrap import ModuleWrapPolicy

        if strategy == "auto":
            return ShardedWrapper(module, auto_wrap_policy="auto", allow_divergence=divergent)
        if strategy.startswith("HYBRID"):  # two nodes
            os.environ["LOCAL_WORLD_SIZE"] = str(max(1, self.world // 2))
        return ShardedWrapper(
            module,
            auto_wrap_policy=ModuleWrapPolicy(units),
            sharding_strategy=strategy,
            coalesce_bytes=0,  # toy units would be one
            allow_divergence=divergent,
        )

    def inner(self, model: nn.Module) -> Any:
        """The user's module: ``model.module``, where a wrapper is around it."""
        return model if self.implementation == "fsdp2" else model.module

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        if self.implementation != "fsdp2":
            with model.no_sync():
                yield
            return
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The full state dict under the names of the unwrapped model, as copies."""
        if self.implementation == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                state = model.state_dict()
        elif self.implementation in ORACLES:
            state = self.inner(model).state_dict()
        else:
            state = model.state_dict()
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def load(self, model: Any, state: dict[str, Any]) -> None:
        """Load a full state dict, the same on every rank, of the unwrapped model."""
        if self.implementation == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                model.load_state_dict(state)
        elif self.implementation == "fsdp2":
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                set_model_state_dict,
            )

            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        elif self.implementation in ORACLES:
            self.inner(model).load_state_dict(state)
        else:
            model.load_state_dict(state)

    def load_optimizer(
        self, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load the ``state_dict()`` of an optimizer of the unwrapped model."""
        if self.implementation.startswith("flatshard"):
            state = model.optim_state_dict_to_load(model, optimizer, state)
        elif self.implementation == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        elif self.implementation == "fsdp2":
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                set_optimizer_state_dict,
            )

            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            return
        optimizer.load_state_dict(state)

    # -------------------------------------------------- data and training

    def draw(self, step: int, *shape: int, of: int | None = None) -> Tensor:
        """Random numbers of a step: this rank's, or rank ``of``'s."""
        generator = torch.Generator().manual_seed(100 * step + (self.rank if of is None else of))
        return torch.randn(shape, generator=generator)

    def tokens(self, step: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randint(0, 10, shape, generator=generator)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Of this rank's rows of a step, for a model of 7 inputs and 3 outputs."""
        return F.mse_loss(model(self.draw(step, ROWS, 7)), self.draw(50 + step, ROWS, 3))

    def sgd(self, *models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
        params = [p for model in models for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=lr, momentum=0.9)

    def fit(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loss_of: Callable[[nn.Module, int], Tensor] | None = None,
        steps: int = STEPS,
        first: int = 0,
    ) -> list[Any]:
        """Train; the losses, which show every update but the last one, and the model."""
        optimizer = optimizer or self.sgd(model)
        losses = []
        for step in range(first, first + steps):
            optimizer.zero_grad()
            loss = (loss_of or self.loss)(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, model]

    def results(self, value: Any) -> Any:
        """What an idiom returned, as tensors that can be sent; of a model, its state dict."""
        if isinstance(value, nn.Module):
            return self.state(value)
        if isinstance(value, Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: self.results(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.results(one) for one in value]
        return value


class ByHand(nn.Module):
    """The oracle where DDP raises: the gradients of each backward are averaged after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_synchronised = True
        self._is_queued = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._is_queued = False  # also after a backward that raised
        if self.training and self.is_synchronised:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        output = self.module(*args, **kwargs)
        if self.is_synchronised:
            for tensor in _tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_synchronised = False
        yield
        self.is_synchronised = True

    def _queue(self, _: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        for param in self.module.parameters():
            uses = torch.tensor(float(param.grad is not None))
            dist.all_reduce(uses)
            if uses:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
                total = grad.clone()
                dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
                param.grad = total / dist.get_world_size()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)
    elif hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value))


def run_cell(name: str, implementation: str) -> Any:
    """What this rank of the implementation makes of the idiom."""
    found = IDIOMS[name]
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        side = Side(implementation, found.unused)
        return side.results(found.script(side))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
