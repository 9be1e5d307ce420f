"""``FlatshardTrainer``: transformers' Trainer on a sharded model, and the mixin for other Trainers.

    from flatshard.integrations.transformers import FlatshardTrainer as Trainer

Everything else of the program stays as it is, ``torchrun`` included.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import trainer as hf

from flatshard import checkpoint
from flatshard.integrations.accelerate import Accelerator
from flatshard.wrapper import ShardedWrapper, sharded_modules

_FOLDER = "flatshard"  # of model and optimizer, in a checkpoint of Trainer's
_SCHEDULER = hf.SCHEDULER_NAME


def init_weights(model: nn.Module, device: Any = "cpu") -> Callable[[nn.Module], None]:
    """A ``param_init_fn`` for a model on the meta device: what its ``_init_weights`` makes.

    Buffers that no checkpoint has (``rotary_emb.inv_freq``) get their values, too. Weights that the
    model's configuration ties are tied, which ``init_empty_weights`` undoes.

    Args:
        model: contains some ``PreTrainedModel``, or is one; not wrapped yet.
        device: where the tensors are to be made.
    """
    owners: dict[nn.Module, Any] = {}
    for part in model.modules():  # outer ones first
        if isinstance(part, transformers.PreTrainedModel):
            if part not in owners:
                part.tie_weights()  # accelerate's init_empty_weights made two of each
            owners.update(dict.fromkeys(part.modules(), part))

    def init(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        if module in owners:
            owners[module]._init_weights(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    return init


class ShardedTrainerMixin:
    """Shards the model of a Trainer: ``class MyTrainer(ShardedTrainerMixin, SFTTrainer)``.

    The model may be on the CPU, on the meta device (``with torch.device("meta")``), or wrapped by
    ``ShardedWrapper`` already. ``save_model`` is collective: all ranks call it, and rank 0 writes
    the full model as ``save_pretrained`` does. Trainer's checkpoints have besides a folder of
    ``flatshard.checkpoint`` with model and optimizer, from which any number of ranks resumes.

    Args:
        sharding: keywords of ``ShardedWrapper``, which win over ``TrainingArguments``. By default
            ``{"auto_wrap_policy": "auto"}``.

    Raises:
        ValueError: on all ranks: ``TrainingArguments`` ask for FSDP, DeepSpeed or
            ``torch_compile``, too.
    """

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._sharding = dict(sharding or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        for setting in ("fsdp", "deepspeed", "torch_compile"):
            if getattr(self.args, setting, None):
                raise ValueError(
                    f"TrainingArguments({setting}=...) asks Trainer for what flatshard does, or "
                    "would undo it. Leave it out; compile blocks before: block.compile()."
                )
        if self.args.ddp_find_unused_parameters is None and self.accelerator.ddp_handler:
            # Trainer's own choice, of which ShardedWrapper would warn the user.
            self.accelerator.ddp_handler.find_unused_parameters = False
        Accelerator.adopt(self.accelerator, self._sharding)

    def _move_model_to_device(self: Any, model: nn.Module, device: Any) -> None:
        pass  # only shards go there, when the model is prepared

    @property
    def _trained(self: Any) -> nn.Module:
        # Without several processes the model is not sharded, and perhaps in another wrapper.
        is_sharded = sharded_modules(self.model_wrapped)
        return self.model_wrapped if is_sharded else self.model  # type: ignore[no-any-return]

    def _prepare_for_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if any(param.is_meta for param in model.parameters()) and not sharded_modules(model):
            init = init_weights(model, self.accelerator.device)
            self.accelerator.sharding.setdefault("param_init_fn", init)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full model for ``from_pretrained``; rank 0 writes it. Collective: all ranks."""
        state = checkpoint.full_state_dict(self._trained)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        folder = Path(output_dir) / _FOLDER
        if self.args.should_save and folder.exists():
            shutil.rmtree(folder)  # Trainer writes over the checkpoints of an earlier run
        self.accelerator.wait_for_everyone()
        checkpoint.save(folder, self._trained, _plain(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        _load(Path(checkpoint), self._trained, _plain(self.optimizer))
        scheduler = Path(checkpoint) / _SCHEDULER
        if scheduler.exists():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def prediction_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "_gen_kwargs"):
            # A rank whose texts have ended runs forwards for the others.
            self._gen_kwargs.setdefault("synced_gpus", bool(sharded_modules(self.model_wrapped)))
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]


class FlatshardTrainer(ShardedTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer on a sharded model; see ``ShardedTrainerMixin``."""


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer without accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What this Trainer, or one under DistributedDataParallel, has saved. Collective."""
    if (folder / _FOLDER).is_dir():
        checkpoint.load(folder / _FOLDER, model, optimizer)
    elif (folder / hf.OPTIMIZER_NAME).exists():
        state = torch.load(folder / hf.OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        ShardedWrapper.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
