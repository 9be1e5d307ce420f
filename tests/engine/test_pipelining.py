"""Stages of torch's pipelines, sharded over another dimension of the mesh."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatshard import ShardedWrapper, collectives
from flatshard.integrations.pipelining import PipelineStage
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, on_ranks
from tests.oracle import assert_same, sgd, step_and_zero

pytestmark = pytest.mark.by_turns

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
MICRO_BATCHES = 4


def _parts(count: int) -> list[nn.Sequential]:
    torch.default_generator.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(4)]
    size = len(layers) // count
    return [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(count)]


def _wrapped(part: nn.Module, mesh: Any) -> ShardedWrapper:
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(part, device_mesh=mesh, auto_wrap_policy=policy, coalesce_bytes=0)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(16, 6, generator=generator).double() for _ in range(2))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_schedules(rank: int, world_size: int) -> None:
    dp = world_size // 2
    mesh = init_device_mesh("cpu", (2, dp), mesh_dim_names=("pp", "dp"))
    group, number = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    for name, schedule_of in SCHEDULES.items():
        count = 4 if name == "interleaved" else 2
        parts = _parts(count)
        mine = list(range(number, count, 2))
        models = [_wrapped(parts[i], mesh["dp"]) for i in mine]
        stages = [
            PipelineStage(model, i, count, torch.device("cpu"), group=group)
            for model, i in zip(models, mine, strict=True)
        ]
        what = stages if name == "interleaved" else stages[0]
        schedule = schedule_of(what, MICRO_BATCHES, loss_fn=_loss)
        with pytest.raises(NotImplementedError, match=r"splits each backward in two"):
            stages[0].backward_maybe_with_nosync("input", {})
        plain = nn.Sequential(*_parts(count))
        optimizers = [sgd(one) for one in (*models, plain)]
        for step in range(3):
            rows, target = (part.chunk(dp)[mesh["dp"].get_local_rank()] for part in _batch(step))
            with collectives.record() as events:
                schedule.step(
                    *((rows,) if 0 in mine else ()),
                    **({"target": target} if count - 1 in mine else {}),
                )
            if dp > 1:
                reduced = [event for event in events if event[0] == "reduce"]
                assert len(reduced) == 2, events  # a unit of each layer
            _loss(plain(_batch(step)[0]), _batch(step)[1]).backward()
            step_and_zero(*optimizers)
        with naming(name):
            for i, model in zip(mine, models, strict=True):
                assert_same(model.state_dict(), plain[i].state_dict())


@on_ranks(8)
def test_tensor_parallel_stages(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    number = mesh["pp"].get_local_rank()
    # Of each stage the first layer is cut by columns, the second by rows.
    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
    model = _wrapped(parallelize_module(_parts(2)[number], mesh["tp"], plan), mesh["dp"])
    group = mesh["pp"].get_group()
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)
    plain = nn.Sequential(*_parts(2))
    optimizers = [sgd(model), sgd(plain)]
    for step in range(3):
        rows, target = (part.chunk(2)[mesh["dp"].get_local_rank()] for part in _batch(step))
        schedule.step(*(() if number else (rows,)), **({"target": target} if number else {}))
        _loss(plain(_batch(step)[0]), _batch(step)[1]).backward()
        step_and_zero(*optimizers)
    assert_same(model.state_dict(), plain[number].state_dict())
