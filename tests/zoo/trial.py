"""`train`: three steps of one model of the zoo on this rank, under one wrapper."""

import contextlib
import functools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.harness import allow_warnings
from tests.idioms.side import Side
from tests.outcomes import Cell
from tests.zoo.families import Model, find

STEPS = 3
CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
POLICIES = ("auto", "by size", "by class")
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Many models compute norms and softmax in float32 also where they are float64."""


class Result(NamedTuple):
    """What a rank says of its training; ``difference`` is from the oracle's, in words."""

    dtype: str
    numel: int
    difference: str = ""


def train(rank: int, world_size: int, name: str, side: str, policy: str, oracle: str) -> Result:
    """Train under a side ("ddp", "flatshard" or "fsdp1").

    DistributedDataParallel writes losses and state to the file ``oracle``; the others compare.
    """
    with allow_warnings():
        return _train(rank, find(name), side, policy, oracle)


def judge(found: list[Result]) -> Cell:
    why = next((one.difference for one in found if one.difference), "")
    return Cell("wrong", why) if why else Cell("right")


def _train(rank: int, model: Model, side: str, policy: str, oracle: str) -> Result:
    expected = None if side == "ddp" else torch.load(oracle, mmap=True, weights_only=True)
    dtype = _dtype_for(model) if expected is None else expected["dtype"]
    module = _make(model, dtype)
    numel = sum(param.numel() for param in module.parameters())
    wrapped = _wrap(module, side, *_policies(module, policy, numel))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=model.learning_rate, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(model, wrapped, dtype, 10 * step + rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state, word = Side(side).state(wrapped), str(dtype).removeprefix("torch.")
    if expected is None:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, losses)
        if rank == 0:
            torch.save({"dtype": dtype, "losses": everywhere, "state": state}, oracle)
        return Result(word, numel)
    difference = compare(losses, expected["losses"][rank], state, expected["state"], dtype)
    return Result(word, numel, difference)


def _make(model: Model, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = model.make().to(dtype)
    for part in module.modules():
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
        if type(part).__name__ in ("Dropout", "Dropout2d", "Dropout3d", "StochasticDepth"):
            part.p = 0.0  # type: ignore[assignment]
    return module.train()


def _dtype_for(model: Model) -> torch.dtype:
    """float64 where the model runs in it."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        module = _make(model, torch.float64)
        _loss(model, module, torch.float64, 0).backward()
        return torch.float64
    return torch.float32


def _loss(model: Model, module: nn.Module, dtype: torch.dtype, seed: int) -> Tensor:
    _seed(seed)
    args, kwargs = _cast(model.inputs(), dtype)
    _seed(seed)  # forward may draw, masks say
    outputs = [one for one in _tensors(module(*args, **kwargs)) if one.requires_grad]
    return torch.stack([one.to(dtype).square().mean() for one in outputs]).sum()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # transformers draws masks with it
        sys.modules["numpy"].random.seed(seed)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(one, dtype) for one in value)
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _wrap(module: nn.Module, side: str, ours: Any, theirs: Any) -> Any:
    if side == "ddp":
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    if side == "flatshard":  # without coalescing, which would make a small model a single unit
        return ShardedWrapper(module, auto_wrap_policy=ours, coalesce_bytes=0)
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(module, auto_wrap_policy=theirs, **options)


def _policies(module: nn.Module, policy: str, numel: int) -> tuple[Any, Any]:
    """The policy for flatshard and for FSDP1, which has no "auto"."""
    from torch.distributed.fsdp import wrap as theirs

    if policy == "by size":
        least = max(numel // 8, 100)
        kinds = size_based_auto_wrap_policy, theirs.size_based_auto_wrap_policy
        return tuple(functools.partial(kind, min_num_params=least) for kind in kinds)
    blocks = {_block_class(module)}
    ours = "auto" if policy == "auto" else ModuleWrapPolicy(blocks)
    return ours, theirs.ModuleWrapPolicy(blocks)


def _block_class(module: nn.Module) -> type[nn.Module]:
    """The class of the blocks: of those that occur several times, the one with most parameters."""
    counts: Counter[type[nn.Module]] = Counter()
    numels: Counter[type[nn.Module]] = Counter()
    has_children: defaultdict[type[nn.Module], bool] = defaultdict(bool)
    for part in module.modules():
        counts[type(part)] += 1
        numels[type(part)] += sum(param.numel() for param in part.parameters())
        has_children[type(part)] |= any(True for _ in part.children())
    several = [kind for kind, count in counts.items() if count > 1 and numels[kind]]
    several = [kind for kind in several if kind not in CONTAINERS] or [type(module)]
    # A layer only where no block occurs twice.
    return max(several, key=lambda kind: (has_children[kind], numels[kind]))


State = dict[str, Tensor]


def compare(
    losses: list[float], right: list[float], state: State, expected: State, dtype: torch.dtype
) -> str:
    tolerance = TOLERANCE[dtype]
    for step, (loss, other) in enumerate(zip(losses, right, strict=True)):
        if not abs(loss - other) <= tolerance * max(abs(other), 1e-3):
            return f"loss {step} is {loss:.8g}, not {other:.8g}"
    if state.keys() != expected.keys():
        odd = sorted(state.keys() ^ expected.keys())
        return f"state has other names: {', '.join(odd[:3])}"
    if dist.is_initialized() and dist.get_rank() > 0:
        return ""  # some buffers are each rank's own under FullyShardedDataParallel
    for name, value in expected.items():
        if not torch.allclose(state[name], value, rtol=tolerance, atol=tolerance, equal_nan=True):
            gap = (state[name].double() - value.double()).abs().max().item()
            return f"{name} differs by {gap:.1g}"
    return ""
