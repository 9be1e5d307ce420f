"""``Accelerator``: Hugging Face Accelerate's, with sharded models in the place of replicated ones.

    from flatshard.integrations.accelerate import Accelerator

Everything else of the program stays as it is, ``accelerate launch`` included.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType, DynamoBackend, parse_flag_from_env
from torch import nn

from flatshard import checkpoint
from flatshard.module.run import plan_backward
from flatshard.options.precision import MixedPrecision
from flatshard.wrapper import ShardedWrapper, sharded_modules

# By argument: what a config file says instead, and the variable by which it reaches programs.
_OTHERS = {
    "fsdp_plugin": ("use_fsdp", "ACCELERATE_USE_FSDP"),
    "deepspeed_plugin": ("use_deepspeed", "ACCELERATE_USE_DEEPSPEED"),
    "megatron_lm_plugin": ("use_megatron_lm", "ACCELERATE_USE_MEGATRON_LM"),
    "parallelism_config": ("use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG"),
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FOLDER = "flatshard"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's, whose ``prepare`` shards models instead of replicating them.

    ``mixed_precision`` becomes a ``MixedPrecision`` policy (parameters are all-gathered in the low
    dtype, gradients are reduced in float32) beside accelerate's autocast. ``save_state`` writes
    models and optimizers by ``flatshard.checkpoint.save``, each rank its own part, and
    ``load_state`` reads them on any number of ranks; all ranks call these, ``get_state_dict`` and
    ``save_model``.

    Args:
        sharding: keywords of ``ShardedWrapper``, which win over accelerate's settings. By default
            ``{"auto_wrap_policy": "auto"}``. A model that is wrapped already keeps its own.

    Raises:
        ValueError: FSDP, DeepSpeed, Megatron-LM or a compiler is asked for, too; on all ranks.
    """

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for argument, (setting, variable) in _OTHERS.items():
            if kwargs.get(argument) is not None or parse_flag_from_env(variable):
                raise ValueError(
                    f"Accelerator: flatshard shards the model, and {argument} asks accelerate to "
                    f"do so, too. Leave out {argument}, or {setting} in the config file."
                )
        super().__init__(*args, **kwargs)
        self.adopt(self, sharding)

    @classmethod
    def adopt(
        cls, accelerator: accelerate.Accelerator, sharding: Mapping[str, Any] | None = None
    ) -> None:
        """Make one of these of an accelerator that a framework has made, before it prepares."""
        if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                "Accelerator: dynamo_backend or dynamo_plugin would compile the wrapper. Leave it "
                "out, and compile blocks before prepare(): block.compile()."
            )
        accelerator.__class__ = cls
        accelerator.sharding = {"auto_wrap_policy": "auto", **(sharding or {})}

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, or take it as it is wrapped already.

        Collective: all ranks. The model may be on the CPU or on the meta device: only shards go to
        the accelerator's device. With ``evaluation_mode`` it is replicated, and without several
        processes nothing is sharded.
        """
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        if is_prepared or evaluation_mode or self.distributed_type is DistributedType.NO:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not sharded_modules(model):
            model = ShardedWrapper(model, **self._keywords())
            if self.ddp_handler is not None:
                self.ddp_handler.register_comm_hook(model)
        # Otherwise the model would go to the device, and DistributedDataParallel around it.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = {"device_id": self.device}
        if self.mixed_precision in _DTYPES:
            dtype = _DTYPES[self.mixed_precision]
            keywords["mixed_precision"] = MixedPrecision(
                param_dtype=dtype, reduce_dtype=torch.float32
            )
        if self.ddp_handler is not None:
            keywords.update(self.ddp_handler.to_kwargs())
        return {**keywords, **self.sharding}

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """As accelerate does; its state is where its parameters are."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The module inside of the wrappers. Its parameters stay sharded."""
        found = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return found.module if isinstance(found, ShardedWrapper) else found

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Let the next backward reduce what forwards under ``no_sync`` have accumulated."""
        plan_backward(model, reduces=True)
        with accelerate.Accelerator.trigger_sync_in_backward(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """``ShardedWrapper.join`` for sharded models; see accelerate's."""
        others = [one for one in joinables if not isinstance(one, ShardedWrapper)]
        with contextlib.ExitStack() as stack:
            for one in joinables:
                if isinstance(one, ShardedWrapper):
                    stack.enter_context(one.join())
            if others or even_batches is not None:
                stack.enter_context(super().join_uneven_inputs(others, even_batches))
            yield

    # ------------------------------------------------------------ saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict on rank 0's host, and an empty one on the others. Collective."""
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
        """As accelerate does; all ranks write into the safetensors files at once. Collective."""
        if safe_serialization and sharded_modules(model):
            checkpoint.save_safetensors(model, save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate does, with a checkpoint of flatshard for each model. Collective.

        What an earlier call has saved in ``output_dir`` is replaced.
        """
        with self._without_models() as trained:
            if output_dir is not None and self.is_main_process:
                # First: what is killed half-way is then incomplete, not a mixture of two.
                for old in Path(output_dir).glob(f"{_FOLDER}_*"):
                    shutil.rmtree(old)
            self.wait_for_everyone()
            location = super().save_state(output_dir, *args, **kwargs)
            for number, (model, optimizer) in enumerate(trained):
                checkpoint.save(Path(location) / f"{_FOLDER}_{number}", model, optimizer)
        return location

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load as accelerate does, with any number of ranks. Collective.

        Raises:
            FileNotFoundError: accelerate's own Accelerator saved the folder. Nothing is loaded.
        """
        found: list[str] = []

        def check(_: Any, folder: str) -> None:
            found.append(folder)
            if trained and not (Path(folder) / f"{_FOLDER}_0").is_dir():
                raise FileNotFoundError(
                    f"load_state: {folder} has no folder {_FOLDER}_0: another Accelerator saved "
                    "it, such as accelerate's own under DistributedDataParallel. After prepare(), "
                    "load its model.safetensors by flatshard.checkpoint.load_safetensors(model, "
                    "path), and its optimizer.bin by ShardedWrapper.optim_state_dict_to_load("
                    "model, optimizer.optimizer, torch.load(path), load_directly=True)."
                )

        hook = self.register_load_state_pre_hook(check)
        try:
            with self._without_models() as trained:
                super().load_state(input_dir, *args, **kwargs)
                for number, (model, optimizer) in enumerate(trained):
                    checkpoint.load(Path(found[0]) / f"{_FOLDER}_{number}", model, optimizer)
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _without_models(self) -> Iterator[list[tuple[nn.Module, torch.optim.Optimizer | None]]]:
        """Hide models and optimizers from accelerate, which saves those of rank 0 alone."""
        models: list[nn.Module] = self._models  # type: ignore[has-type]
        optimizers: list[Any] = self._optimizers  # type: ignore[has-type]
        trained: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []
        rest = list(optimizers)
        for model in models:
            ids = {id(param) for param in model.parameters()}
            own = [
                one for one in rest if ids & {id(p) for g in one.param_groups for p in g["params"]}
            ]
            rest = [one for one in rest if one not in own]
            trained += [(model, one.optimizer) for one in own] or [(model, None)]
        if rest:
            raise ValueError(
                "save_state, load_state: an optimizer has no parameters of a prepared model. "
                "Prepare the model that it is of, too."
            )
        self._models, self._optimizers = [], []
        try:
            yield trained
        finally:
            self._models, self._optimizers = models, optimizers
