"""Accelerate's programs, with flatshard's Accelerator in the place of its own."""

import copy
import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from flatshard import ShardedWrapper
from flatshard.checkpoint import full_optim_state_dict, load_safetensors
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, on_ranks, run_ranks
from tests.integrations import PRELOAD, needs, small_net

pytestmark = needs("accelerate")
SHARDING = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "coalesce_bytes": 0}


@contextmanager
def accelerators(rank: int, world_size: int) -> Iterator[tuple[Any, Any]]:
    """Makers of accelerate's Accelerator and of flatshard's; each call begins a new program."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `?tqdm|.*pin_memory")
        import accelerate
        from accelerate.state import AcceleratorState, GradientState

        from flatshard.integrations.accelerate import Accelerator

        def make(kind: Any, **keywords: Any) -> Any:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            return kind(cpu=True, **keywords)

        ours = functools.partial(make, Accelerator, sharding=SHARDING)
        yield functools.partial(make, accelerate.Accelerator), ours


class Stream(torch.utils.data.IterableDataset[int]):
    __iter__ = lambda self: iter(range(4))  # noqa: E731


class Training:
    """A program: made anew by each accelerator, always of the same numbers."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, plain = accelerator, small_net()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randn(48, 3))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        prepared = accelerator.prepare(plain, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.batches = iter(self.loader)
        self.losses: list[float] = []

    def steps(self, number: int) -> None:
        accelerator = self.accelerator
        for _ in range(number):
            inputs, targets = next(self.batches)
            with accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def weights(self) -> dict[str, Tensor]:
        is_sharded = isinstance(self.model, ShardedWrapper)
        model = self.model if is_sharded else self.accelerator.unwrap_model(self.model)
        return dict(model.state_dict())


@on_ranks(2, preload=PRELOAD)
def test_as_with_ddp(rank: int, world_size: int, tmp_path: Path) -> None:
    with accelerators(rank, world_size) as (theirs, ours):
        for keywords in ({"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}):
            with naming(keywords):
                runs = [Training(make(**keywords)) for make in (theirs, ours)]
                for run in runs:
                    run.steps(6)
                plain, sharded = runs
                assert isinstance(sharded.model, ShardedWrapper)
                bound = 1e-6 if "mixed_precision" not in keywords else 2e-2
                assert_close(sharded.losses, plain.losses, rtol=bound, atol=bound)
                assert_close(sharded.weights(), plain.weights(), rtol=bound, atol=bound)
        _kept_by_the_user(ours)
        _sync_in_backward(theirs, ours)
        _uneven_inputs(ours, rank)
        _values_and_names(ours, rank, tmp_path)
        _saved_by_ddp(theirs, ours, tmp_path)
        _hooked(Training(theirs()), f"{tmp_path}/hooks_theirs")
        _hooked(Training(ours()), f"{tmp_path}/hooks_ours")


def _kept_by_the_user(ours: Any) -> None:
    """A model that is wrapped already is not wrapped again."""
    accelerator = ours()
    model = ShardedWrapper(nn.Linear(4, 4), auto_wrap_policy=None)
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model.module
    replica = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert type(replica) is nn.Linear


def _sync_in_backward(theirs: Any, ours: Any) -> None:
    grads = []
    for make in (theirs, ours):
        run = Training(make())
        (first, _), (second, _) = next(run.batches), next(run.batches)
        with run.accelerator.no_sync(run.model):
            losses = [run.model(one).square().mean() for one in (first, second)]
        run.accelerator.backward(losses[0])
        with run.accelerator.trigger_sync_in_backward(run.model):
            run.accelerator.backward(losses[1])
        run.accelerator.clip_grad_value_(run.model.parameters(), 0.02)
        grads.append([param.grad for param in run.model.parameters()])
    assert_close([grad.full_tensor() for grad in grads[1]], grads[0])


def _uneven_inputs(ours: Any, rank: int) -> None:
    """Rank 0 has three batches, rank 1 two; the third gradient is halved."""
    accelerator, plain = ours(), small_net()
    expected = copy.deepcopy(plain)
    data = torch.utils.data.TensorDataset(torch.randn(10, 6), torch.randn(10, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    batches = list(loader)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    mine = []
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            mine.append(inputs)
    assert_close(mine, [inputs for inputs, _ in batches[rank::2]])
    assert loader.batch_sampler.even_batches
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for first in (0, 2, 4):
        optimizer.zero_grad()
        for inputs, targets in batches[first : first + 2]:
            (nn.functional.mse_loss(expected(inputs), targets) / 2).backward()
        optimizer.step()
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    accelerator.prepare(torch.utils.data.DataLoader(Stream()))
    with pytest.warns(UserWarning, match="even_batches has no effect on IterableDatasets"):
        accelerator.join_uneven_inputs([model], even_batches=False).__enter__()


def _values_and_names(ours: Any, rank: int, folder: Path) -> None:
    run = Training(ours())
    run.steps(1)
    expected = run.weights()
    state = run.accelerator.get_state_dict(run.model)
    assert_close(state, expected if rank == 0 else {})
    for _ in range(2):  # what is there is replaced
        run.accelerator.save_state(f"{folder}/state")
        run.steps(1)
    run.accelerator.load_state(f"{folder}/state")
    assert run.losses[-1] != run.losses[0]
    expected = run.weights()
    run.accelerator.save_model(run.model, f"{folder}/model")
    from safetensors.torch import load_file

    assert_close(load_file(f"{folder}/model/model.safetensors"), expected)


def _saved_by_ddp(theirs: Any, ours: Any, folder: Path) -> None:
    """What the message says loads the model and the optimizer that accelerate itself saved."""
    plain = Training(theirs())
    plain.steps(2)
    plain.accelerator.save_state(f"{folder}/ddp")
    sharded = Training(ours())
    with pytest.raises(FileNotFoundError, match=r"ddp has no folder flatshard_0: accelerate's own"):
        sharded.accelerator.load_state(f"{folder}/ddp")
    load_safetensors(sharded.model, f"{folder}/ddp/model.safetensors")
    state = torch.load(f"{folder}/ddp/optimizer.bin")
    optimizer = sharded.optimizer.optimizer
    ShardedWrapper.optim_state_dict_to_load(sharded.model, optimizer, state, load_directly=True)
    assert_close(sharded.weights(), plain.weights())
    (loaded, *_) = ShardedWrapper.optim_state_dict(sharded.model, optimizer)["state"].values()
    assert_close(loaded["exp_avg"], state["state"][0]["exp_avg"])


def _hooked(run: Training, folder: str) -> None:
    """Hooks of save_state and load_state get the models. The load hook may load other weights."""
    seen: list[Any] = []

    def save(models: list[Any], _: Any, path: str) -> None:
        seen.append(("save", models[:], path))

    def load(models: list[Any], path: str) -> None:
        seen.append(("load", models[:], path))
        nn.init.ones_(next(models.pop().parameters()))

    run.accelerator.register_save_state_pre_hook(save)
    handle = run.accelerator.register_load_state_pre_hook(load)
    run.steps(1)
    before = run.weights()
    run.accelerator.save_state(folder)
    run.steps(1)
    run.accelerator.load_state(folder)
    module = run.accelerator.unwrap_model(run.model)
    assert seen == [(kind, [module], folder) for kind in ("save", "load")]
    assert_close(run.weights()["0.weight"], torch.ones(10, 6))
    handle.remove()
    run.accelerator.load_state(folder)
    assert_close(run.weights(), before)
    assert len(seen) == 2


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (2, 3)])
def test_resumes(saved: int, loaded: int, tmp_path: Path) -> None:
    run_ranks(_saves, saved, str(tmp_path), preload=PRELOAD)
    run_ranks(_loads, loaded, str(tmp_path), preload=PRELOAD)


def _saves(rank: int, world_size: int, folder: str) -> None:
    from accelerate.utils import ProjectConfiguration

    with accelerators(rank, world_size) as (_, ours):
        names = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
        run = Training(ours(project_config=names))
        counter = torch.optim.lr_scheduler.StepLR(run.optimizer.optimizer, 3)
        run.accelerator.register_for_checkpointing(counter)
        for _ in range(2):
            run.steps(2)
            run.accelerator.save_state()
        expected = {"weights": run.weights(), "lr": run.scheduler.get_last_lr()}
        expected["state"] = _state(run)
        if rank == 0:
            torch.save(expected, f"{folder}/expected.pt")
        assert os.listdir(f"{folder}/checkpoints") == ["checkpoint_1"]


def _state(run: Training) -> dict[str, Any]:
    """The optimizer's, on rank 0."""
    return full_optim_state_dict(run.model, run.optimizer.optimizer).get("state", {})


def _loads(rank: int, world_size: int, folder: str) -> None:
    from accelerate.utils import ProjectConfiguration

    with accelerators(rank, world_size) as (_, ours):
        names = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        run = Training(ours(project_config=names))
        counter = torch.optim.lr_scheduler.StepLR(run.optimizer.optimizer, 3)
        run.accelerator.register_for_checkpointing(counter)
        run.accelerator.load_state()
        expected = torch.load(f"{folder}/expected.pt")
        assert_close(run.weights(), expected["weights"], rtol=0, atol=0)
        assert run.scheduler.get_last_lr() == expected["lr"]
        assert_close(_state(run), expected["state"] if rank == 0 else {}, rtol=0, atol=0)
        run.steps(1)


@on_ranks(2, preload=PRELOAD)
def test_refuses(rank: int, world_size: int) -> None:
    with accelerators(rank, world_size) as (_, ours):
        from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

        with pytest.raises(ValueError, match="Leave out fsdp_plugin, or use_fsdp in the config"):
            ours(fsdp_plugin=FullyShardedDataParallelPlugin())
        with pytest.raises(ValueError, match=r"compile blocks before prepare\(\): block.compile"):
            ours(dynamo_backend="eager")
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        with warnings.catch_warnings(record=True, action="always") as said:
            model = ours(kwargs_handlers=[unused]).prepare(nn.Sequential(nn.Linear(2, 2)))
        assert rank > 0 or "unused parameters are always found" in str(said[0].message)
        assert isinstance(model, ShardedWrapper)
        accelerator = ours()
        accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters()))
        with pytest.raises(ValueError, match="an optimizer was passed to prepare"):
            accelerator.save_state("somewhere")
        dist.barrier()
