"""Lightning's Trainer and Fabric with strategy="flatshard", beside their own "ddp"."""

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from flatshard import FlatShardTensor, ShardedWrapper, sharded_modules
from tests.harness import naming, run_ranks
from tests.integrations import PRELOAD, as_under_torchrun, needs, small_net

pytestmark = needs("lightning")


def _program(fn: Callable[..., None]) -> Callable[..., None]:
    """A rank as `torchrun` starts it; Lightning warns of much that a test does not have."""

    def run(rank: int, world_size: int, *args: Any) -> None:
        with as_under_torchrun():
            import flatshard.integrations.lightning  # noqa: F401

            fn(rank, world_size, *args)

    run.__name__ = run.__qualname__ = fn.__name__
    return run


def _module(manual: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()
            self.losses: list[float] = []
            self.automatic_optimization = not manual

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            self.log("error", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def _data() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(16, size, generator=generator) for size in (6, 3)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=2)


def _trainer(strategy: Any, folder: str, epochs: int = 1, **more: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy,
        max_epochs=epochs, default_root_dir=folder, **quiet, **more,
    )  # fmt: skip


def _trained(strategy: Any, folder: str, manual: bool = False, **more: Any) -> list[Any]:
    """What a user sees of a training."""
    module, trainer = _module(manual), _trainer(strategy, folder, **more)
    trainer.fit(module, _data(), _data())
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    (errors,) = trainer.validate(module, _data(), verbose=False)
    errors = {name: float(value) for name, value in errors.items()}
    return [module.losses, errors, trainer.predict(module, _data())]


@_program
def _as_with_ddp(rank: int, world_size: int, folder: str) -> None:
    clipped = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    for more in (clipped, {"manual": True}, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}):
        with naming(more):
            own = {"auto_wrap_policy": "auto", "coalesce_bytes": 0}
            from flatshard.integrations.lightning import FlatshardStrategy

            expected = _trained("ddp", f"{folder}/ddp", **more)
            bound = 1e-6 if "precision" not in more else 1e-2
            for strategy in ("flatshard", FlatshardStrategy(**own)):
                found = _trained(strategy, f"{folder}/flatshard", **more)
                assert_close(found, expected, rtol=bound, atol=bound)


@_program
def _saves(rank: int, world_size: int, folder: str) -> None:
    from flatshard.integrations.lightning import FlatshardStrategy

    sharded = FlatshardStrategy(state_dict_type="sharded")
    for name, strategy in (("ddp", "ddp"), ("full", "flatshard"), ("sharded", sharded)):
        _trained(strategy, f"{folder}/{name}")


@_program
def _goes_on(rank: int, world_size: int, folder: str) -> None:
    seen = []
    ways = [*product(("ddp", "flatshard"), ("ddp", "full")), ("flatshard", "sharded")]
    for strategy, name in ways:
        module, trainer = _module(), _trainer(strategy, f"{folder}/more", epochs=2)
        trainer.fit(module, _data(), ckpt_path=f"{folder}/{name}/last.ckpt")
        assert trainer.global_step == 8 // 2 - (-8 // world_size)
        seen.append([module.losses, trainer.optimizers[0].param_groups[0]["lr"]])
        assert_close(seen[-1], seen[0], rtol=1e-6, atol=1e-6)


@_program
def _refuses(rank: int, world_size: int, folder: str) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from flatshard.integrations.lightning import FlatshardStrategy

    with pytest.raises(ValueError, match=r"expected one of \('full', 'sharded'\), got 'local'"):
        FlatshardStrategy(state_dict_type="local")
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(ValueError, match="not support StochasticWeightAveraging, which needs"):
        _trainer("flatshard", folder, callbacks=[averaging]).fit(_module(), _data())
    module = _module()
    module.net = ShardedWrapper(module.net, auto_wrap_policy="auto")
    with pytest.raises(ValueError, match="both would shard or average the same gradients"):
        _trainer("ddp", folder).fit(module, _data())


@_program
def _prepares(rank: int, world_size: int, folder: str) -> None:
    """Before wrapping, plugins such as sync_batchnorm's edit the module. Then hooks are set."""
    from lightning.pytorch.plugins import LayerSync
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    from flatshard.integrations.lightning import FlatshardStrategy

    class Appends(LayerSync):
        def apply(self, model: Any) -> Any:
            model.net.append(nn.BatchNorm1d(3))
            return model

        revert = apply

    module, trainer = _module(), _trainer("flatshard", folder, plugins=[Appends()])
    for _ in range(2):
        trainer.fit(module, _data())
    assert isinstance(module.net[5].weight, FlatShardTensor)
    module = _module()
    module.net.append(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        _trainer("flatshard", folder, sync_batchnorm=True).fit(module, _data())
    strategy = FlatshardStrategy(ddp_comm_hook=powerSGD_hook)
    with pytest.raises(NotImplementedError, match="powerSGD_hook takes a bucket"):
        _trainer(strategy, folder).fit(_module(), _data())


@_program
def _fabric(rank: int, world_size: int, folder: str) -> None:
    from lightning.fabric import Fabric

    seen = []
    for strategy in ("ddp", "flatshard"):
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        weights = []
        for number in range(2):
            plain = small_net()
            model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
            state = {"model": model, "optimizer": optimizer, "step": number}
            if number == 1:  # a new program
                fabric.load(f"{folder}/{strategy}.ckpt", state)
                assert state["step"] == 7
                assert state["optimizer"] is optimizer
            for index, (inputs, targets) in enumerate(_data()):
                with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                    loss = nn.functional.mse_loss(model(inputs + rank), targets)
                    fabric.backward(loss)
                if index % 2:
                    fabric.clip_gradients(model, optimizer, max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            fabric.save(f"{folder}/{strategy}.ckpt", {**state, "step": 7})
            fabric.barrier()
            weights.append(torch.load(f"{folder}/{strategy}.ckpt")["model"])
        seen.append(weights)
        assert bool(sharded_modules(model)) == (strategy == "flatshard")
    assert_close(seen[1], seen[0])


@_program
def _everything(rank: int, world_size: int, folder: str) -> None:
    for number, step in enumerate((_as_with_ddp, _saves, _goes_on, _prepares, _refuses, _fabric)):
        own = folder if step in (_saves, _goes_on) else f"{folder}/{number}"
        with naming(step.__name__):
            os.makedirs(own, exist_ok=True)
            step(rank, world_size, own)


def test_as_with_ddp(tmp_path: Path) -> None:
    """In few processes: to import Lightning takes each of them seconds."""
    run_ranks(_everything, 2, str(tmp_path), fresh=True, preload=PRELOAD, timeout=150)
    for world_size in (1, 3):
        run_ranks(_goes_on, world_size, str(tmp_path), fresh=True, preload=PRELOAD, timeout=100)
