"""transformers' Trainer on a sharded model, beside its own on DistributedDataParallel."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from flatshard import ShardedWrapper, checkpoint, leave_empty
from tests.documents import fences, surroundings
from tests.harness import ROOT, naming, run_ranks
from tests.integrations import PRELOAD, QUIET, as_under_torchrun, llama, needs

pytestmark = needs("transformers")
WORDS = 64


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Labels that are left out make batches of unequal weight; Trainer drops the last column."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, WORDS, (8,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels, "number": index}


def _llama() -> Any:
    return llama(max_position_embeddings=32, tie_word_embeddings=True)


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model

    # To save `lm_head`, PEFT calls its state_dict() on rank 0 only.
    own: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    return get_peft_model(_llama(), LoraConfig(r=2, lora_dropout=0.0, **own))


def _prompts() -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def _trainer(kind: Any, folder: str, model: Any, **more: Any) -> Any:
    from transformers import TrainingArguments

    usual: dict[str, Any] = {
        **QUIET,
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "save_steps": 2,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "ddp_find_unused_parameters": False,
    }
    arguments = TrainingArguments(folder, **{**usual, **more})
    rows = Rows()
    some = torch.utils.data.Subset(rows, range(8))
    return kind(model=model, args=arguments, train_dataset=rows, eval_dataset=some)


def _weights(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    (path,) = Path(folder).glob("*model.safetensors")
    return load_file(path)


def _seen(trainer: Any, folder: str) -> list[Any]:
    """What a user sees of a training."""
    trainer.save_model(folder)
    trainer.accelerator.wait_for_everyone()
    *log, _ = trainer.state.log_history
    seen = [{k: v for k, v in one.items() if "loss" in k or "norm" in k} for one in log]
    return [seen, _weights(folder)]


def _everything(rank: int, world_size: int, folder: str) -> None:
    with as_under_torchrun():
        for step in (_as_with_ddp, _resumes, _on_meta, _generates, _refuses, _page):
            with naming(step.__name__):
                step(rank, folder)


def _as_with_ddp(rank: int, folder: str) -> None:
    from transformers import Trainer

    from flatshard.integrations.transformers import FlatshardTrainer

    checkpointed: dict[str, Any] = {"gradient_checkpointing": True}
    settings = (
        (_llama, {"load_best_model_at_end": True, **checkpointed}),
        (_lora, checkpointed),
        (_llama, {"optim": "adafactor"}),
        (_prompts, {"bf16_full_eval": True}),  # `predict` converts the model to bfloat16
    )
    for number, (make, more) in enumerate(settings):
        runs = []
        for kind in (Trainer, FlatshardTrainer):
            own = f"{folder}/{kind.__name__}-{number}"
            trainer = _trainer(kind, own, make(), **more)
            trainer.train()
            runs.append(_seen(trainer, f"{own}/model"))
            runs[-1].append(trainer.predict(trainer.eval_dataset).metrics["test_loss"])
        assert isinstance(trainer.model_wrapped, ShardedWrapper)
        assert_close(runs[1], runs[0], rtol=1e-5, atol=1e-6)
    for asked in (None, True):  # ShardedWrapper warns only of what the user has set
        trainer = _trainer(FlatshardTrainer, folder, _llama(), ddp_find_unused_parameters=asked)
        assert trainer.accelerator.ddp_handler.find_unused_parameters is bool(asked)


def _resumes(rank: int, folder: str) -> None:
    """From the second step, also of a training under DistributedDataParallel."""
    from transformers import LlamaForCausalLM

    from flatshard.integrations.transformers import FlatshardTrainer

    expected = _weights(f"{folder}/FlatshardTrainer-2/model")
    for kind in ("FlatshardTrainer", "Trainer"):
        trainer = _trainer(FlatshardTrainer, f"{folder}/more", _llama(), optim="adafactor")
        trainer.train(resume_from_checkpoint=f"{folder}/{kind}-2/checkpoint-2")
        assert_close(_seen(trainer, f"{folder}/more/model")[1], expected, rtol=1e-5, atol=1e-6)
    plain = LlamaForCausalLM.from_pretrained(f"{folder}/more/model")
    assert_close(dict(plain.state_dict()), dict(trainer.model_wrapped.state_dict()))


def _resumes_elsewhere(rank: int, world_size: int, folder: str) -> None:
    from flatshard.integrations.transformers import FlatshardTrainer

    with as_under_torchrun():
        trainer = _trainer(FlatshardTrainer, f"{folder}/other", _llama(), max_steps=3)
        trainer.train(resume_from_checkpoint=f"{folder}/FlatshardTrainer-0/checkpoint-2")
        assert trainer.state.global_step == 3


def _on_meta(rank: int, folder: str) -> None:
    """Made on meta, it has the values that `_init_weights` makes, buffers included."""
    from accelerate import init_empty_weights

    from flatshard.integrations.transformers import FlatshardTrainer

    with torch.device("meta"):
        model = _llama()
    trainer = _trainer(FlatshardTrainer, f"{folder}/meta", model, max_steps=1)
    trainer.train()
    plain = _llama()
    freqs = trainer.model_wrapped.module.model.rotary_emb.inv_freq
    assert_close(freqs, plain.model.rotary_emb.inv_freq)

    with init_empty_weights():
        model = _llama()
    model.tie_weights()
    sharded = ShardedWrapper(model, auto_wrap_policy="auto", param_init_fn=leave_empty)
    checkpoint.load_safetensors(sharded, f"{folder}/more/model")
    plain = type(plain).from_pretrained(f"{folder}/more/model")
    ids = torch.arange(8)[None]
    assert_close(sharded(ids).logits, plain(ids).logits)


def _generates(rank: int, folder: str) -> None:
    """Texts of unequal lengths: a rank whose own have ended takes part until the others' have."""
    model = _llama().eval()
    ids = torch.arange(3 + 2 * rank)[None] + 5
    expected = model.generate(ids, max_new_tokens=4 + 5 * rank, do_sample=False)
    sharded = ShardedWrapper(model, auto_wrap_policy="auto")
    found = sharded.generate(ids, max_new_tokens=4 + 5 * rank, do_sample=False, synced_gpus=True)
    assert torch.equal(found, expected)


def _refuses(rank: int, folder: str) -> None:
    from flatshard.integrations.transformers import FlatshardTrainer

    for setting in ("torch_compile", "save_on_each_node"):
        with pytest.raises(ValueError, match=rf"TrainingArguments\({setting}=...\) conflicts"):
            _trainer(FlatshardTrainer, folder, _llama(), **{setting: True})


def _page(rank: int, folder: str) -> None:
    """The blocks of docs/huggingface.md, one after the other."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    load = LlamaForCausalLM.from_pretrained
    names = {**surroundings("", rank), "tokens": torch.arange(8)[None]}
    with contextlib.chdir(folder):
        if rank == 0:
            _llama().save_pretrained("llama")
        dist.barrier()
        for fence in fences(ROOT / "docs" / "huggingface.md"):
            with naming(fence):
                exec(fence.text, names)
            dist.barrier()
            if fence.heading.startswith("Train"):
                expected = load("export")
                assert names["texts"].shape == (1, 12)
            elif fence.heading == "LoRA":
                expected = PeftModel.from_pretrained(load("llama"), "adapter")
            else:
                expected = load("llama")
            found = names["model"].eval()(names["tokens"]).logits
            assert_close(found, expected.eval()(names["tokens"]).logits)


def test_as_with_ddp(tmp_path: Path) -> None:
    """In few processes: to import transformers takes each of them seconds."""
    run_ranks(_everything, 2, str(tmp_path), fresh=True, preload=PRELOAD, timeout=150)
    run_ranks(_resumes_elsewhere, 3, str(tmp_path), fresh=True, preload=PRELOAD, timeout=100)
