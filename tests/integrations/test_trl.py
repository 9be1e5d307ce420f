"""TRL's SFTTrainer and GRPOTrainer with the mixin, beside DistributedDataParallel."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flatshard import ShardedWrapper
from tests.harness import naming, on_ranks
from tests.integrations import PRELOAD

pytestmark = pytest.mark.skipif(not find_spec("trl"), reason="trl is not installed")
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=WORDS[0], eos_token=WORDS[1], unk_token=WORDS[0]
    )


def _trainer(kind: Any, folder: Path, lora: Any) -> Any:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, eos_token_id=1, **small)
    # Of unequal lengths, so that batches weigh differently.
    texts = [" ".join(WORDS[2 + (row + i) % 30] for i in range(3 + row % 5)) for row in range(32)]
    arguments = SFTConfig(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return kind(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=_tokenizer(),
        peft_config=lora,
    )


@on_ranks(2, timeout=240.0, fresh=True, preload=PRELOAD)
def test_trainers(rank: int, world_size: int, tmp_path: Path) -> None:
    from peft import LoraConfig
    from trl import SFTTrainer

    from flatshard.integrations.transformers import ShardedTrainerMixin

    class Sharded(ShardedTrainerMixin, SFTTrainer): ...

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ["HF_HOME"] = str(tmp_path / f"cache-{rank}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both packages warn of much that a test does not have
        for lora in (None, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)):
            with naming(f"LoRA: {lora is not None}"):
                logs = []
                for kind in (SFTTrainer, Sharded):
                    trainer = _trainer(kind, tmp_path / kind.__name__, lora)
                    trainer.train()
                    logs.append(
                        [
                            {k: one[k] for k in ("loss", "grad_norm", "mean_token_accuracy")}
                            for one in trainer.state.log_history
                            if "loss" in one
                        ]
                    )
                assert isinstance(trainer.model_wrapped, ShardedWrapper)
                assert len(logs[0]) == 4
                assert_close(logs[1], logs[0], rtol=1e-4, atol=1e-5)
        _generates_as_with_ddp(rank, world_size, tmp_path)


def _generating_trainer(kind: Any, folder: Path) -> Any:
    """A GRPOTrainer whose completions end early, after different numbers of tokens."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **small))
    model.generation_config.eos_token_id = list(range(1, 8))
    arguments = GRPOConfig(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=16,
        learning_rate=0.01,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return kind(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [f"w{n} w{n + 1}" for n in range(16)]}),
        processing_class=_tokenizer(),
    )


def _generates_as_with_ddp(rank: int, world_size: int, folder: Path) -> None:
    from trl import GRPOTrainer

    from flatshard.integrations.transformers import ShardedTrainerMixin

    class Sharded(ShardedTrainerMixin, GRPOTrainer): ...

    logs = []
    for kind in (GRPOTrainer, Sharded):
        trainer = _generating_trainer(kind, folder / kind.__name__)
        trainer.train()
        logs.append(
            [
                {k: one[k] for k in ("loss", "grad_norm", "completions/mean_length")}
                for one in trainer.state.log_history
                if "loss" in one
            ]
        )
    assert isinstance(trainer.model_wrapped, ShardedWrapper)
    assert_close(logs[1], logs[0], rtol=1e-4, atol=1e-5)
    # One rank alone may generate on full parameters.
    with ShardedWrapper.summon_full_params(trainer.model_wrapped):
        if rank == 0:
            trainer.model.generate(torch.tensor([[2, 3]]), max_new_tokens=2)
