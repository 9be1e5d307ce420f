"""``Accelerator``: Hugging Face Accelerate's ``Accelerator``, with sharded models.

    from flatshard.integrations.accelerate import Accelerator

Only this import changes in the program. ``accelerate launch`` starts the program as before.
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.utils import DistributedType, DynamoBackend, parse_flag_from_env
from torch import nn

from flatshard import checkpoint
from flatshard.module.run import plan_backward
from flatshard.optimizer.adapter import all_params
from flatshard.options.precision import MixedPrecision
from flatshard.wrapper import ShardedWrapper, sharded_modules

# Arguments of Accelerator that would shard the model in another way.
_OTHERS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FOLDER = "flatshard"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's ``Accelerator``, with a ``prepare`` that shards models.

    ``mixed_precision`` sets a ``MixedPrecision`` policy in addition to accelerate's autocast:
    parameters are all-gathered in the low dtype, and gradients are reduced in float32.
    ``save_state`` saves models and optimizers with ``flatshard.checkpoint.save``; each rank writes
    its own part. ``load_state`` loads these checkpoints on any number of ranks.

    Example:
        ```python
        from flatshard.integrations.accelerate import Accelerator

        accelerator = Accelerator(cpu=True, sharding={"sharding_strategy": "SHARD_GRAD_OP"})
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        for inputs, labels in batches:
            accelerator.backward(loss_fn(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state("checkpoint")
        ```

    Collective: all ranks call ``save_state``, ``load_state``, ``get_state_dict`` and
    ``save_model``.

    Args:
        sharding: keywords of ``ShardedWrapper``, which override accelerate's settings. The default
            is ``{"auto_wrap_policy": "auto"}``. A model that is already wrapped keeps its settings.

    Raises:
        ValueError: on all ranks: the settings also ask for FSDP, DeepSpeed, Megatron-LM or a
            compiler.
    """

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for argument in _OTHERS:
            setting = f"use_{argument.removesuffix('_plugin')}"  # name in accelerate's config file
            # `accelerate launch` passes settings in environment variables.
            is_set = parse_flag_from_env(f"ACCELERATE_{setting.upper()}")
            if is_set or kwargs.get(argument) is not None:
                raise ValueError(
                    f"Accelerator: {argument} asks accelerate to shard the model, which flatshard "
                    f"already does. Leave out {argument}, or {setting} in the config file."
                )
        super().__init__(*args, **kwargs)
        self.adopt(self, sharding)

    @classmethod
    def adopt(
        cls, accelerator: accelerate.Accelerator, sharding: Mapping[str, Any] | None = None
    ) -> None:
        """Change the class of a framework's ``accelerator`` to this class, before ``prepare``."""
        if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                "Accelerator: dynamo_backend and dynamo_plugin would compile the whole model. "
                "Leave both out, and compile blocks before prepare(): block.compile()."
            )
        accelerator.__class__ = cls
        accelerator.sharding = {"auto_wrap_policy": "auto", **(sharding or {})}

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model; a model that is already wrapped is not wrapped again.

        The model may be on the CPU or on the meta device: only the shards move to the accelerator's
        device. With ``evaluation_mode``, the model is not sharded, but replicated. In a single
        process the model is not sharded.

        Collective: all ranks.
        """
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        if is_prepared or evaluation_mode or self.distributed_type is DistributedType.NO:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not sharded_modules(model):
            keywords: dict[str, Any] = {"device_id": self.device}
            if dtype := _DTYPES.get(self.mixed_precision):
                keywords["mixed_precision"] = MixedPrecision(dtype, reduce_dtype=torch.float32)
            handler = self.ddp_handler or accelerate.DistributedDataParallelKwargs()
            model = ShardedWrapper(model, **{**keywords, **handler.to_kwargs(), **self.sharding})
            handler.register_comm_hook(model)
        # accelerate must not move the model, or wrap the model in DistributedDataParallel.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare an optimizer, and leave the optimizer's state on the device of the shards."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the module inside the wrappers. The module's parameters stay sharded."""
        found = super().unwrap_model(model, *args, **kwargs)
        return found.module if isinstance(found, ShardedWrapper) else found

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> Any:
        """Let the next backward reduce gradients, even if the forward ran under ``no_sync``."""
        plan_backward(model, reduces=True)
        return accelerate.Accelerator.trigger_sync_in_backward(model)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Call ``join()`` of each ShardedWrapper. For other models, call accelerate's method."""
        others = [one for one in joinables if not isinstance(one, ShardedWrapper)]
        with contextlib.ExitStack() as stack:
            if others:
                stack.enter_context(super().join_uneven_inputs(others, even_batches))
            elif even_batches is not None:
                # Set `even_batches` here: accelerate's method raises if all models are wrapped.
                samplers: list[Any] = [one.batch_sampler for one in self._dataloaders]
                known = [one for one in samplers if hasattr(one, "even_batches")]
                for one in known:
                    stack.enter_context(mock.patch.object(one, "even_batches", even_batches))
                if len(known) < len(samplers):
                    warnings.warn("even_batches has no effect on IterableDatasets.", stacklevel=3)
            for one in joinables:
                if isinstance(one, ShardedWrapper):
                    stack.enter_context(one.join())
            yield

    # ------------------------------------------------------------ saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict (on the CPU) on rank 0, {} on other ranks. Collective."""
        if not sharded_modules(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return checkpoint.full_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the model; all ranks write into the same safetensors files. Collective."""
        if safe_serialization and sharded_modules(model):
            checkpoint.save_safetensors(model, save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save accelerate's state, and each model with ``flatshard.checkpoint.save``. Collective.

        Checkpoints of earlier calls in ``output_dir`` are replaced.
        """
        with self._without_models() as trained:
            if output_dir is not None and self.is_main_process:
                # If the program is killed, the folder must not be a mixture of two saves.
                for old in Path(output_dir).glob(f"{_FOLDER}_*"):
                    shutil.rmtree(old)
            self.wait_for_everyone()
            location = super().save_state(output_dir, *args, **kwargs)
            for number, (model, optimizer) in enumerate(trained):
                checkpoint.save(Path(location) / f"{_FOLDER}_{number}", model, optimizer)
        return location

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load a folder of ``save_state``, on any number of ranks. Collective.

        Raises:
            FileNotFoundError: accelerate's own ``Accelerator`` saved the folder. Nothing is loaded.
        """

        def load(_: Any, folder: str) -> None:
            if trained and not (Path(folder) / f"{_FOLDER}_0").is_dir():
                raise FileNotFoundError(
                    f"load_state: {folder} has no folder {_FOLDER}_0: accelerate's own Accelerator "
                    "saved it (under DistributedDataParallel, for example). After prepare(), "
                    "load model.safetensors with flatshard.checkpoint.load_safetensors(model, "
                    "path), and optimizer.bin with ShardedWrapper.optim_state_dict_to_load("
                    "model, optimizer.optimizer, torch.load(path), load_directly=True)."
                )
            for number, (model, optimizer) in enumerate(trained):
                checkpoint.load(Path(folder) / f"{_FOLDER}_{number}", model, optimizer)

        with self._without_models() as trained:
            # Load first, so that a hook of the program may load other weights, as with accelerate.
            self._load_model_state_pre_hook = {"flatshard": load, **self._load_model_state_pre_hook}  # type: ignore[has-type]
            super().load_state(input_dir, *args, **kwargs)

    @contextlib.contextmanager
    def _without_models(self) -> Iterator[list[tuple[nn.Module, torch.optim.Optimizer | None]]]:
        """Hide models and optimizers from accelerate, which would save only rank 0's shards.

        The program's hooks get the unwrapped models, as with accelerate. Yields pairs of a model
        and one of the model's optimizers, or a model and None.
        """
        trained: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []
        models: list[nn.Module] = self._models  # type: ignore[has-type]
        rest: list[Any] = list(self._optimizers)  # type: ignore[has-type]
        for model in models:
            ids = {id(param) for param in model.parameters()}
            own = [one for one in rest if not ids.isdisjoint(map(id, all_params(one)))]
            rest = [one for one in rest if one not in own]
            trained += [(model, one.optimizer) for one in own] or [(model, None)]
        if rest:
            raise ValueError(
                "save_state, load_state: an optimizer was passed to prepare() without its model. "
                "Pass the model of every optimizer to prepare() too."
            )

        def with_models(hook: Any) -> Any:
            return lambda _, *rest: hook(shown, *rest)

        shown = [self.unwrap_model(model) for model in models]  # a hook may empty this list

        hooks: dict[str, Any] = {}
        for name in ("_save_model_state_pre_hook", "_load_model_state_pre_hook"):
            hooks[name] = {key: with_models(hook) for key, hook in getattr(self, name).items()}
        with mock.patch.multiple(self, _models=[], _optimizers=[], **hooks):
            yield trained
