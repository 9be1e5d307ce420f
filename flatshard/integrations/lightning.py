"""``strategy="flatshard"`` for Lightning's Trainer and Fabric.

Importing this module registers the strategy:

    import flatshard.integrations.lightning

    trainer = Trainer(strategy="flatshard", devices=2)
"""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY, ddp as fabric_ddp
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from flatshard import checkpoint as files
from flatshard.wrapper import ShardedWrapper, sharded_modules

_FOLDER, _REST = "flatshard", "lightning.ckpt"
_TYPES = ("full", "sharded")

# Attribute of a LightningModule for its ShardedWrapper, which later calls of fit or test reuse.
_WRAPPER = "_flatshard_wrapper"


class FlatshardStrategy(DDPStrategy):  # type: ignore[misc]
    """Shards the LightningModule, in training and in evaluation.

    A *full* checkpoint is a single file in the format of ``strategy="ddp"``, so each of the two
    strategies loads the other's checkpoints. To save the file, rank 0 needs the whole model in host
    memory. A *sharded* checkpoint is a folder into which each rank writes its own part with
    ``flatshard.checkpoint``. Full and sharded checkpoints load on any number of ranks.

    Example:
        ```python
        from lightning.pytorch import LightningModule, Trainer

        from flatshard.integrations.lightning import FlatshardStrategy


        class Classifier(LightningModule):
            def __init__(self):
                super().__init__()
                self.model = Model()

            def training_step(self, batch, index):
                inputs, labels = batch
                return loss_fn(self.model(inputs), labels)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)


        strategy = FlatshardStrategy(state_dict_type="sharded", sharding_strategy="SHARD_GRAD_OP")
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1)
        trainer.fit(Classifier(), torch.utils.data.DataLoader(batches, batch_size=None))
        trainer.save_checkpoint("sharded.ckpt")  # a folder
        ```

    Args:
        state_dict_type: the format of saved checkpoints, ``"full"`` or ``"sharded"``.
        keywords: keywords of DDPStrategy (``process_group_backend``, ``timeout``,
            ``start_method``), and keywords of ``ShardedWrapper``. ``auto_wrap_policy`` is
            ``"auto"`` by default.

    Raises:
        ValueError: ``state_dict_type`` is invalid; or, on all ranks when fitting begins, a callback
            averages weights, and would copy the model before the model is sharded.
    """

    strategy_name = "flatshard"
    restore_checkpoint_after_setup = True
    model: Any
    lightning_module: Any

    def __init__(self, *, state_dict_type: str = "full", **keywords: Any) -> None:
        super().__init__(**keywords)
        if state_dict_type not in _TYPES:
            raise ValueError(f"state_dict_type: expected one of {_TYPES}, got {state_dict_type!r}.")
        self._state_dict_type = state_dict_type

    def setup(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"strategy='flatshard' does not support {type(callback).__name__}, which needs "
                    "full parameters. Use a Callback that makes torch.optim.swa_utils.AveragedModel"
                    "(trainer.model) when training starts, and updates it after each batch."
                )
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.configure_ddp()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        # Write to `__dict__`: `setattr` would make the wrapper a submodule of its own module.
        known = self.model.__dict__
        if _WRAPPER not in known:
            model = self._layer_sync.apply(self.model) if self._layer_sync else self.model
            known[_WRAPPER] = _sharded(model, self.root_device, self._ddp_kwargs)
            hook = self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
            _register_ddp_comm_hook(known[_WRAPPER], *hook)
        self.model = known[_WRAPPER]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            # With manual optimization, training_step() calls backward, which must not run inside
            # the wrapper's forward.
            return self.lightning_module.training_step(*args, **kwargs)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients inside this context, without reducing them."""
        return self.model.no_sync()  # type: ignore[no-any-return]

    def teardown(self) -> None:
        # Do not call DDPStrategy's teardown(), which would move the module to the CPU: then
        # Trainer.save_checkpoint() would fail.
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on rank 0, and an empty dict on other ranks. Collective.

        With ``state_dict_type="sharded"``, the dict is empty on all ranks.
        """
        return files.full_state_dict(self.model) if self._state_dict_type == "full" else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state on rank 0, an empty dict on other ranks. Collective.

        The keys are the positions of the parameters, as in a plain torch optimizer. With
        ``state_dict_type="sharded"``, the dict is empty on all ranks.
        """
        if self._state_dict_type == "sharded":
            return {}
        plain = getattr(optimizer, "_optimizer", optimizer)
        return _by_position(files.full_optim_state_dict(self.model, plain))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a full checkpoint (a file) or a sharded checkpoint (a folder). Collective."""
        if self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(str(filepath)))
        # The folder may exist: Lightning overwrites the checkpoint "last", for example.
        if self.is_global_zero and folder.exists():
            shutil.rmtree(folder)
        self.barrier()
        for number, optimizer in enumerate(self.optimizers or [None]):
            files.save(folder / f"{_FOLDER}_{number}", self.model, optimizer)
        if self.is_global_zero:
            torch.save(checkpoint, folder / _REST)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a full checkpoint (a file) or a sharded checkpoint (a folder). Collective."""
        folder = Path(checkpoint_path)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        for number, optimizer in enumerate(self.optimizers or [None]):
            files.load(folder / f"{_FOLDER}_{number}", self.model, optimizer)
        # Load without `weights_only` by default: Lightning's own state has arbitrary objects.
        rest = torch.load(folder / _REST, weights_only=bool(weights_only), map_location="cpu")
        return {**rest, "state_dict": None, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"] is not None:
            self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for one, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            ShardedWrapper.optim_state_dict_to_load(self.model, one, state, load_directly=True)


class FlatshardFabricStrategy(fabric_ddp.DDPStrategy):  # type: ignore[misc]
    """Shards the modules that Fabric sets up.

    ``fabric.save`` saves full state dicts in the format of ``strategy="ddp"``. These files load on
    any number of ranks, with ``strategy="ddp"`` and with ``strategy="flatshard"``. For sharded
    checkpoints, pass ``flatshard.checkpoint.save`` the wrapper and the optimizer inside Fabric's
    objects: ``flatshard.sharded_modules(model)[0]`` and ``optimizer.optimizer``. Set up a model
    before its optimizers: ``fabric.setup(model, optimizer)``.

    Example:
        ```python
        from lightning.fabric import Fabric

        from flatshard.integrations.lightning import FlatshardFabricStrategy

        strategy = FlatshardFabricStrategy(sharding_strategy="SHARD_GRAD_OP")
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
        fabric.launch()
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = fabric.setup(model, optimizer)
        for inputs, labels in batches:
            fabric.backward(loss_fn(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save("full.ckpt", {"model": model, "optimizer": optimizer})
        ```

    Args:
        keywords: keywords of DDPStrategy, and keywords of ``ShardedWrapper``.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._backward_sync_control = _NoSync()
        self._models: list[nn.Module] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        wrapper = _sharded(module, self.root_device, self._ddp_kwargs)
        self._models.append(wrapper)
        return wrapper

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, because ``setup_module`` moves only the shards to the device."""

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict on rank 0, an empty dict on other ranks. Collective."""
        return files.full_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state on rank 0, an empty dict on other ranks. Collective."""
        return _by_position(files.full_optim_state_dict(self.model_of(optimizer), optimizer))

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> dict[str, Any]:
        """Load a full checkpoint; each rank keeps its part of the optimizer state. Collective."""
        with contextlib.ExitStack() as stack:
            for value in state.values() if isinstance(state, dict) else (state,):
                optimizer = getattr(value, "optimizer", value)
                if isinstance(optimizer, Optimizer):
                    stack.enter_context(optimizer.register_load_state_dict_pre_hook(self._part_of))
            return super().load_checkpoint(path, state, **options)  # type: ignore[no-any-return]

    def _part_of(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return ShardedWrapper.optim_state_dict_to_load(self.model_of(optimizer), optimizer, state)

    def model_of(self, optimizer: Optimizer) -> nn.Module:
        """Return the model whose parameters ``optimizer`` steps."""
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for model in self._models:
            if ids & {id(param) for param in model.parameters()}:
                return model
        raise ValueError("Fabric: the model is not set up. Call fabric.setup(model, optimizer).")


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        if enabled and isinstance(module, ShardedWrapper):
            return module.no_sync()
        return contextlib.nullcontext()


def _sharded(module: nn.Module, device: torch.device, keywords: dict[str, Any]) -> nn.Module:
    """Wrap a module, by default with ``auto_wrap_policy="auto"``.

    If the user has already wrapped parts of the module, the rest of the module becomes one unit.
    """
    policy = {} if sharded_modules(module) else {"auto_wrap_policy": "auto"}
    return ShardedWrapper(module, device_id=device, **{**policy, **keywords})


def _by_position(state: dict[str, Any]) -> dict[str, Any]:
    """Replace parameter names by positions, which are the keys in plain torch's state dicts."""
    if not state:
        return {}
    groups = state["param_groups"]
    names = [name for group in groups for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in groups]
    return {"state": {number[n]: v for n, v in state["state"].items()}, "param_groups": groups}


_DESCRIPTION = "flatshard: fully sharded data parallel"
StrategyRegistry.register("flatshard", FlatshardStrategy, _DESCRIPTION, override=True)
STRATEGY_REGISTRY.register("flatshard", FlatshardFabricStrategy, _DESCRIPTION, override=True)
