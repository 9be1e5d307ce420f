"""`Side`: one rank of one implementation, and `IDIOMS`: the scripts that run there.

An idiom is written once, as a user of DistributedDataParallel would write it. A method of `Side`
stands for each thing that wrappers spell differently (wrapping, the module inside, `no_sync`, full
state dicts).
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import ShardedWrapper, options
from flatshard.wrap import ModuleWrapPolicy
from tests.oracle import step_and_zero
from tests.ways import WAYS

ROWS = 4
STEPS = 4
ORACLES = ("ddp", "by hand")
STRATEGIES = (
    *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_OP"),
    *("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OP"),
)
AUTO = "flatshard auto"
"""flatshard with `auto_wrap_policy="auto"` and every other default."""

Script = Callable[["Side"], Any]


@dataclass(frozen=True)
class Idiom:
    """A script, and what its table and its test say of it.

    Attributes:
        section: the module that defines it.
        title: its name for users.
        by_hand: DistributedDataParallel raises or is wrong. The oracle averages gradients by hand.
        unused: DistributedDataParallel needs ``find_unused_parameters=True``.
        slow: it takes more than a second, and the tests leave it out.
        ways: keys of `WAYS`, with spaces between, under which the tests always run it; empty: one
            way by turns.
    """

    name: str
    section: str
    title: str
    script: Script
    by_hand: bool = False
    unused: bool = False
    slow: bool = False
    ways: str = ""


IDIOMS: dict[str, Idiom] = {}


def idiom(title: str, **settings: Any) -> Callable[[Script], Script]:
    """Enter a script into `IDIOMS` under its own name."""

    def enter(script: Script) -> Script:
        add(script.__name__, script.__module__.rpartition(".")[2], title, script, **settings)
        return script

    return enter


def add(name: str, section: str, title: str, script: Script, **settings: Any) -> None:
    """Enter a script under another name."""
    assert name not in IDIOMS, name
    IDIOMS[name] = Idiom(name, section, title, script, **settings)


class Side:
    """Where an idiom runs: this rank of the default group, with one implementation."""

    def __init__(self, implementation: str, unused: bool = False) -> None:
        self.implementation = implementation
        self.unused = unused
        self.is_flatshard = implementation.startswith("flatshard")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    # -------------------------------------------------- what wrappers spell differently

    def wrap(self, module: nn.Module, *units: type[nn.Module], divergent: bool = False) -> Any:
        """The module, wrapped; ``units`` (linear layers) are sharded by themselves.

        ``divergent`` declares to flatshard that some ranks skip units.
        """
        kind = self.implementation.partition(" ")[0]
        classes = units or (nn.Linear,)
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, find_unused_parameters=self.unused)
        if kind == "flatshard":
            policy = "auto" if self.implementation == AUTO else ModuleWrapPolicy(classes)
            return self.shard(module, auto_wrap_policy=policy, allow_divergence=divergent)
        if kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel, wrap

            cpu, policy = torch.device("cpu"), wrap.ModuleWrapPolicy(set(classes))
            return FullyShardedDataParallel(
                module, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
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

    def shard(self, module: nn.Module, **keywords: Any) -> ShardedWrapper:
        """The module in flatshard's wrapper; ``keywords`` go before those of the way."""
        way = self.implementation.partition(" ")[2]
        settings = WAYS[way].keywords if way in WAYS else {"sharding_strategy": way}
        settings = {} if way == "auto" else settings
        if str(settings.get("sharding_strategy")).startswith("HYBRID"):  # two nodes
            os.environ["LOCAL_WORLD_SIZE"] = str(max(1, self.world // 2))
        return ShardedWrapper(module, **{**settings, **keywords})

    def wrap_whole(self, module: nn.Module) -> Any:
        """The module, wrapped; all of it is one unit."""
        return self.shard(module) if self.is_flatshard else self.wrap(module)

    def inner(self, model: nn.Module) -> Any:
        """The user's module: ``model.module``, where a wrapper is around it."""
        return model if self.implementation == "fsdp2" else model.module

    @contextlib.contextmanager
    def no_sync(self, model: Any, **keywords: Any) -> Iterator[None]:
        """``no_sync()`` of the wrapper; ``keywords`` are flatshard's own."""
        if self.implementation != "fsdp2":
            with model.no_sync(**keywords if self.is_flatshard else {}):
                yield
            return
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The full state dict under the names of the unwrapped model, as copies."""
        if self.implementation == "fsdp1":
            with _full_state_of_fsdp1(model):
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
            with _full_state_of_fsdp1(model):
                model.load_state_dict(state)
        elif self.implementation == "fsdp2":
            from torch.distributed.checkpoint import state_dict

            options = state_dict.StateDictOptions(full_state_dict=True)
            state_dict.set_model_state_dict(model, state, options=options)
        elif self.implementation in ORACLES:
            self.inner(model).load_state_dict(state)
        else:
            model.load_state_dict(state)

    def load_optimizer(
        self, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load the ``state_dict()`` of an optimizer of the unwrapped model."""
        if self.is_flatshard:
            state = model.optim_state_dict_to_load(model, optimizer, state)
        elif self.implementation == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        elif self.implementation == "fsdp2":
            from torch.distributed.checkpoint import state_dict

            options = state_dict.StateDictOptions(full_state_dict=True)
            state_dict.set_optimizer_state_dict(model, optimizer, state, options=options)
            return
        optimizer.load_state_dict(state)

    # -------------------------------------------------- data and training

    step = staticmethod(step_and_zero)

    def learn(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """One step of training."""
        self.loss(model, step).backward()
        self.step(optimizer)

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

    def seeded_loss(self, model: nn.Module, step: int) -> Tensor:
        """The same, with random numbers that differ between ranks."""
        torch.manual_seed(10 * step + self.rank)
        return self.loss(model, step)

    def sgd(self, *models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
        params = [p for model in models for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=lr, momentum=0.9)

    def begin(self, module: nn.Module, *units: type[nn.Module]) -> tuple[Any, Any]:
        """The module, wrapped, and an SGD optimizer of its parameters."""
        model = self.wrap(module, *units)
        return model, self.sgd(model)

    def fit(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loss_of: Callable[[nn.Module, int], Tensor] | None = None,
        steps: int = STEPS,
        first: int = 0,
        edit: Callable[[nn.Module], object] = lambda _: None,
    ) -> list[Any]:
        """Train; the losses, which show every update but the last one, and the model.

        ``edit`` is called between each backward and the optimizer's step.
        """
        optimizer = optimizer or self.sgd(model)
        losses = []
        for step in range(first, first + steps):
            optimizer.zero_grad()
            loss = (loss_of or self.loss)(model, step)
            loss.backward()
            edit(model)
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, model]

    def closure(
        self, model: nn.Module, step: int, losses: list[Tensor], *zeroed: torch.optim.Optimizer
    ) -> Callable[[], Tensor]:
        """For ``optimizer.step(closure)``: zeroes gradients, and adds its loss to ``losses``."""

        def compute() -> Tensor:
            for optimizer in zeroed:
                optimizer.zero_grad()
            loss = self.loss(model, step)
            loss.backward()
            losses.append(loss.detach())
            return loss

        return compute

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


def _full_state_of_fsdp1(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)


class Planned(Exception):
    """An error that an idiom raises."""


def fail(*_: Any) -> None:
    raise Planned


@contextlib.contextmanager
def planned() -> Iterator[None]:
    """The block raises `Planned`, which goes no further."""
    try:
        yield
    except Planned:
        return
    raise AssertionError("nothing was raised")


@contextlib.contextmanager
def failing(module: nn.Module, in_backward: bool = False) -> Iterator[None]:
    """In this block, a forward of the module or its backward raises `Planned`, once."""

    def fail_later(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = module.register_forward_hook(fail_later if in_backward else fail)
    with planned():
        yield
    handle.remove()


class ByHand(nn.Module):
    """The oracle where DDP raises: the gradients of each backward are averaged after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_synchronised = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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
        # Once for each output: to average averages changes nothing.
        torch.autograd.Variable._execution_engine.queue_callback(self.average)

    def average(self) -> None:
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


def run(name: str, implementation: str, coalesces: bool = False) -> Any:
    """The results of the idiom on this rank.

    ``coalesces``: small units become one, as users' do. Then the toy models are one unit.
    """
    found = IDIOMS[name]
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    bytes_ = options.COALESCE_BYTES if coalesces else 0
    try:
        with mock.patch.object(options, "COALESCE_BYTES", bytes_):
            side = Side(implementation, found.unused)
            return side.results(found.script(side))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


# ---------------------------------------------------------------- comparison


def difference(ours: Any, oracle: Any, tolerance: float = 1e-12, where: str = "") -> str:
    """The first difference in words; an empty text if the results are equal.

    ``tolerance``: relative and absolute, for float64; the ranks' sums round in another order.
    """
    if isinstance(oracle, dict):
        if list(ours) != list(oracle):
            return f"{where}names {list(ours)} instead of {list(oracle)}"
        return _first(difference(ours[key], oracle[key], tolerance, f"{key}: ") for key in oracle)
    if isinstance(oracle, list):
        if len(ours) != len(oracle):
            return f"{where}{len(ours)} results instead of {len(oracle)}"
        return _first(
            difference(one, other, tolerance, where or f"result {index}: ")
            for index, (one, other) in enumerate(zip(ours, oracle, strict=True))
        )
    if isinstance(oracle, (Tensor, float)):
        ours, oracle = torch.as_tensor(ours), torch.as_tensor(oracle)
        if ours.shape != oracle.shape or ours.dtype != oracle.dtype:
            return f"{where}{ours.dtype} of {tuple(ours.shape)}, not of {tuple(oracle.shape)}"
        some = tolerance if oracle.dtype in (torch.float64, torch.complex128) else 1e-5
        if not torch.allclose(ours, oracle, rtol=some, atol=some, equal_nan=True):
            return f"{where}differs by {(ours - oracle).abs().max().item():.1g}"
        return ""
    return "" if ours == oracle else f"{where}{ours!r} instead of {oracle!r}"


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")
