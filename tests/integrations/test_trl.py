"""TRL's SFTTrainer and GRPOTrainer with the mixin, beside DistributedDataParallel."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

from flatshard import ShardedWrapper
from tests.harness import naming, on_ranks
from tests.integrations import PRELOAD, QUIET, as_under_torchrun, llama, needs

pytestmark = needs("trl")
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = {"pad_token": WORDS[0], "eos_token": WORDS[1], "unk_token": WORDS[0]}
    return PreTrainedTokenizerFast(tokenizer_object=words, **own)


def _logs(kind: Any, config: Any, folder: Path, keys: tuple[str, ...], **given: Any) -> Any:
    """Train a small Llama; returns its trainer, and what the trainer has logged under ``keys``."""
    from datasets import Dataset

    model = llama(vocab_size=len(WORDS))
    model.generation_config.eos_token_id = list(range(1, 8))
    options, dataset = given.pop("options"), Dataset.from_dict(given.pop("data"))
    own = str(folder / kind.__name__)
    arguments = config(own, bf16=False, save_strategy="no", **QUIET, **options)
    given |= {"model": model, "args": arguments, "processing_class": _tokenizer()}
    trainer = kind(train_dataset=dataset, **given)
    trainer.train()
    found = [{k: log[k] for k in keys} for log in trainer.state.log_history if "loss" in log]
    return trainer, found


@on_ranks(2, timeout=240.0, fresh=True, preload=PRELOAD)
def test_trainers(rank: int, world_size: int, tmp_path: Path) -> None:
    os.environ["HF_HOME"] = str(tmp_path / f"cache-{rank}")
    with as_under_torchrun():
        _trains_as_with_ddp(tmp_path)
        _generates_as_with_ddp(rank, tmp_path)


def _compare(kind: Any, *arguments: Any, **given: Any) -> Any:
    from flatshard.integrations.transformers import ShardedTrainerMixin

    class Sharded(ShardedTrainerMixin, kind): ...

    _, expected = _logs(kind, *arguments, **given)
    trainer, found = _logs(Sharded, *arguments, **given)
    assert isinstance(trainer.model_wrapped, ShardedWrapper)
    assert expected
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return trainer


def _trains_as_with_ddp(folder: Path) -> None:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    # Of unequal lengths, so that batches weigh differently.
    texts = [" ".join(WORDS[2 + (row + i) % 30] for i in range(3 + row % 5)) for row in range(32)]
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    keys = ("loss", "grad_norm", "mean_token_accuracy")
    for lora in (None, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)):
        with naming(f"LoRA: {lora is not None}"):
            given = {"data": {"text": texts}, "options": options, "peft_config": lora}
            _compare(SFTTrainer, SFTConfig, folder, keys, **given)


def _generates_as_with_ddp(rank: int, folder: Path) -> None:
    """Completions end early, after different numbers of tokens."""
    from trl import GRPOConfig, GRPOTrainer

    trainer = _compare(
        GRPOTrainer,
        GRPOConfig,
        folder,
        ("loss", "grad_norm", "completions/mean_length"),
        data={"prompt": [f"w{n} w{n + 1}" for n in range(16)]},
        options={"max_steps": 2, "num_generations": 2, "max_completion_length": 16},
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
    )
    # One rank alone may generate on full parameters.
    with ShardedWrapper.summon_full_params(trainer.model_wrapped):
        if rank == 0:
            trainer.model.generate(torch.tensor([[2, 3]]), max_new_tokens=2)
