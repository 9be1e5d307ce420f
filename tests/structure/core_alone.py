"""A program that the core alone runs: `python -m tests.structure.core_alone [EXTRA...]`.

Two ranks train the MLP of the tests, with each strategy of the core, clip, save and load state
dicts, and have the numbers of the unwrapped model. Then each rank asks for what the extras give,
and rank 0 prints the errors.
"""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import flatshard
from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, ShardingStrategy
from tests.models import CASES
from tests.oracle import ROWS, train_rank_by_rank, train_steps

WORLD_SIZE = 2
STRATEGIES = [one for one in ShardingStrategy if not one.placement.hybrid]


def _over_nodes(_: ShardedWrapper) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD_SIZE, 1))
    strategy = ShardingStrategy.HYBRID_SHARD_OP
    ShardedWrapper(nn.Linear(2, 2), sharding_strategy=strategy, device_mesh=mesh)


def _dtensor(_: ShardedWrapper) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(2, 2, bias=False)
    split = distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)])
    layer.weight = nn.Parameter(split)
    ShardedWrapper(layer, device_mesh=mesh["dp"])


def _whole_tensors(model: ShardedWrapper) -> None:
    torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)


# What asks for an extra, by its name.
# None: nothing asks for the extra, which is used wherever it is installed.
REQUESTS: dict[str, Callable[[ShardedWrapper], object] | None] = {
    "reduction": lambda model: model.register_comm_hook(None, lambda *_: None),
    "join": lambda model: model.join(),
    "average_over": lambda model: model.average_over(1),
    "auto_wrap": lambda _: ShardedWrapper(nn.Linear(2, 2), auto_wrap_policy="auto"),
    "boundary": lambda _: ShardedWrapper(nn.Linear(2, 2), boundary="row"),
    "divergence": lambda _: ShardedWrapper(nn.Linear(2, 2), allow_divergence=True),
    "step_in_backward": lambda model: model.step_in_backward(torch.optim.SGD(model.parameters())),
    "secondary_shards": _over_nodes,
    "out_of_forward": None,
    "deadlock": None,
    "advice": None,
    "shared_memory": None,
    "compared_steps": None,
    "device_checks": None,
    "overrides": lambda _: MixedPrecision(overrides={"*": torch.float32}),
    "conversion": lambda model: model.double(),
    "summon": lambda model: ShardedWrapper.summon_full_params(model),
    "meta_init": lambda _: ShardedWrapper(nn.Linear(2, 2, device="meta")),
    "torch_names": lambda _: ShardedWrapper(nn.Linear(2, 2), gradient_as_bucket_view=True),
    "plan": lambda _: flatshard.plan,
    "tensor_parallel": _dtensor,
    "trial_run": None,
    "unit_report": lambda model: model.unit_report(),
    "weights": lambda model: flatshard.full_tensors(model),
    "recording": lambda model: model.record_steps(),
    "whole_tensors": _whole_tensors,
    "disk": lambda _: ShardedWrapper(nn.Linear(2, 2), cpu_offload=CPUOffload(path=".")),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (f"file://{folder}/store", sys.argv[1:]), WORLD_SIZE, start_method="fork"
        )


def _rank(rank: int, store: str, extras: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=WORLD_SIZE)
    case = CASES["mlp"]
    expected = train_rank_by_rank(case, WORLD_SIZE)
    for strategy in STRATEGIES:
        model = case.wrap(sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = train_steps(model, optimizer, case, rank, WORLD_SIZE)
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total)
        assert (total / WORLD_SIZE).tolist() == expected.losses, strategy
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state.items())
    model.load_state_dict(state)
    model.load_state_dict(model.sharded_state_dict())
    held = ShardedWrapper.optim_state_dict(model, optimizer)
    ShardedWrapper.optim_state_dict_to_load(model, optimizer, held, load_directly=True)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected.state[name])
    model(case.batch(0, ROWS, torch.float64)[0]).sum().backward()
    model.clip_grad_norm_(1.0)
    for request in filter(None, map(REQUESTS.__getitem__, extras)):
        _ask(request, model, rank)
    dist.destroy_process_group()


def _ask(request: Callable[[Any], object], model: Any, rank: int) -> None:
    try:
        request(model)
    except ImportError as error:
        if rank == 0:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
