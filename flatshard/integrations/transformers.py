"""``FlatshardTrainer``: transformers' Trainer with a sharded model.

    from flatshard.integrations.transformers import FlatshardTrainer as Trainer

Only this import changes in the program. ``torchrun`` starts the program as before.
"""

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import trainer as hf

from flatshard import checkpoint
from flatshard.integrations.accelerate import Accelerator
from flatshard.module.wrappers import units_in
from flatshard.wrapper import ShardedWrapper, sharded_modules

_FOLDER = "flatshard"  # folder with model and optimizer in a checkpoint of Trainer


class ShardedTrainerMixin:
    """Shards the model of a Trainer: ``class MyTrainer(ShardedTrainerMixin, SFTTrainer)``.

    The model may be on the CPU or on the meta device (``with torch.device("meta")``), or may
    already be wrapped by ``ShardedWrapper``. ``save_model`` is collective: all ranks call it, and
    rank 0 writes the full model in the format of ``save_pretrained``. A checkpoint of Trainer also
    contains a folder of ``flatshard.checkpoint`` with the model and the optimizer, from which any
    number of ranks can resume.

    Example:
        ```python
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

        from flatshard.integrations.transformers import ShardedTrainerMixin


        class ShardedSeq2SeqTrainer(ShardedTrainerMixin, Seq2SeqTrainer):
            pass


        arguments = Seq2SeqTrainingArguments("runs", max_steps=2, use_cpu=True, report_to=[])
        keywords = {"sharding_strategy": "SHARD_GRAD_OP"}
        trainer = ShardedSeq2SeqTrainer(llama, arguments, train_dataset=rows, sharding=keywords)
        trainer.train()
        ```

    Args:
        sharding: keywords of ``ShardedWrapper``, which override ``TrainingArguments``. The default
            is ``{"auto_wrap_policy": "auto"}``.

    Raises:
        ValueError: on all ranks: ``TrainingArguments`` also ask for FSDP, DeepSpeed,
            ``torch_compile`` or ``save_on_each_node``.
    """

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._sharding = dict(sharding or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # With `save_on_each_node`, nodes without rank 0 would save empty files.
        for setting in ("fsdp", "deepspeed", "torch_compile", "save_on_each_node"):
            if getattr(self.args, setting, None):
                raise ValueError(
                    f"TrainingArguments({setting}=...) conflicts with flatshard's sharding. Leave "
                    f"out {setting}. To compile, call block.compile() before you make the Trainer."
                )
        if self.args.ddp_find_unused_parameters is None and self.accelerator.ddp_handler:
            # Trainer sets this option by itself, and ShardedWrapper would warn about the option.
            self.accelerator.ddp_handler.find_unused_parameters = False
        Accelerator.adopt(self.accelerator, self._sharding)

    def _move_model_to_device(self: Any, model: nn.Module, device: Any) -> None:
        pass  # `prepare` shards the model, and moves only the shards

    @property
    def _trained(self: Any) -> nn.Module:
        # In a single process the model is not sharded, and `model_wrapped` may be another wrapper.
        is_sharded = sharded_modules(self.model_wrapped)
        return self.model_wrapped if is_sharded else self.model  # type: ignore[no-any-return]

    def _prepare_for_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if any(param.is_meta for param in model.parameters()) and not sharded_modules(model):
            # Tie weights again, because accelerate's init_empty_weights separates tied weights.
            for part in model.modules():
                if isinstance(part, transformers.PreTrainedModel):
                    part.tie_weights()
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        if hasattr(model, "generate") and "generate" not in model.__dict__:
            model.generate = partial(_generate, self.model_wrapped, model.generate)
        return prepared

    def _wrap_model(self: Any, model: nn.Module, training: bool = True, **kwargs: Any) -> nn.Module:
        if not training and (self.args.bf16_full_eval or self.args.fp16_full_eval):
            model = self._trained  # Trainer converts the model, which needs the ShardedWrapper
        return super()._wrap_model(model, training=training, **kwargs)  # type: ignore[misc,no-any-return]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full model for ``from_pretrained``; rank 0 writes the files. Collective."""
        trained, state = self._trained, None
        if hasattr(self.model, "prompt_encoder"):
            # To save the prompts, PEFT runs a forward of this encoder, on rank 0 only.
            saving = ShardedWrapper.summon_full_params(
                trained, writeback=False, rank0_only=True, offload_to_cpu=True
            )
        else:
            # For the keys of a state dict, PEFT calls state_dict() of modules on rank 0 only. A
            # sharded state dict needs no other rank.
            state = checkpoint.full_state_dict(trained)
            saving = ShardedWrapper.state_dict_type(trained, "SHARDED_STATE_DICT")
        with saving:
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        folder = Path(output_dir) / _FOLDER
        if self.args.should_save and folder.exists():
            shutil.rmtree(folder)  # Trainer overwrites the checkpoints of earlier runs
        self.accelerator.wait_for_everyone()
        checkpoint.save(folder, self._trained, _plain(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, hf.SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self: Any, saved: str | None) -> None:
        """Load a checkpoint of this class, or of a Trainer under DistributedDataParallel."""
        if saved is None:
            return
        folder, model, optimizer = Path(saved), self._trained, _plain(self.optimizer)
        if (folder / _FOLDER).is_dir():
            checkpoint.load(folder / _FOLDER, model, optimizer)
        elif (folder / hf.OPTIMIZER_NAME).exists():
            state = torch.load(folder / hf.OPTIMIZER_NAME, map_location="cpu", weights_only=True)
            ShardedWrapper.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
        if (scheduler := folder / hf.SCHEDULER_NAME).exists():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class FlatshardTrainer(ShardedTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer with a sharded model; see ``ShardedTrainerMixin``.

    Example:
        ```python
        from transformers import TrainingArguments

        from flatshard.integrations.transformers import FlatshardTrainer as Trainer

        arguments = TrainingArguments("runs", max_steps=2, use_cpu=True, report_to=[])
        trainer = Trainer(llama, arguments, train_dataset=rows)
        trainer.train()
        trainer.save_model("model")  # on all ranks
        ```
    """


def _generate(
    model: nn.Module, generate: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any
) -> Any:
    """Call the unwrapped model's method ``generate``. ``model``: the wrapper around the model."""
    # With `synced_gpus`, a rank whose texts are complete runs forwards until all ranks are done:
    # all-gathers need every rank. transformers does not know that the model is sharded.
    is_sharded = any(not unit.is_summoned for unit in units_in(model))
    return generate(*args, synced_gpus=synced_gpus or is_sharded, **kwargs)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]
