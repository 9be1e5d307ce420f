"""Frameworks' own training loops on a sharded model, beside their DistributedDataParallel.

    python scripts/framework_table.py --page docs/frameworks.md
    python scripts/framework_table.py --only lightning

Each program takes twenty steps on two gloo ranks, once with the framework's DistributedDataParallel
and once with flatshard; the table has the largest difference of the losses of a rank, and of the
weights at the end. On CPUs the frameworks run no FSDP: Accelerate and Trainer take
DistributedDataParallel there, and Lightning's strategy asks for a GPU. Frameworks that are not
installed are left out: `pip install ".[accelerate,lightning,transformers]" peft`.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prerequisites  # noqa: F401  (first: it may end this)

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, ROWS = 20, 2
MARK = "## What was tried"
Seen = tuple[list[float], dict[str, Tensor]]


def _net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 4))


def _loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(4 * STEPS * ROWS, size, generator=generator) for size in (8, 4)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=ROWS)


def accelerate(side: str, folder: Path, precision: str = "no") -> Seen:
    if side == "ddp":
        from accelerate import Accelerator
    else:
        from flatshard.integrations.accelerate import Accelerator
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, project_dir=folder
    )
    model, losses = _net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
    for number, (inputs, targets) in zip(range(STEPS), loader, strict=False):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number == STEPS // 2:
            accelerator.save_state(str(folder / "half"))
            accelerator.load_state(str(folder / "half"))
    return losses, accelerator.get_state_dict(model)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_attention_heads=4, tie_word_embeddings=True, **sizes)
    )


def trainer(side: str, folder: Path, is_lora: bool = False, **settings: Any) -> Seen:
    from transformers import Trainer, TrainingArguments

    if side == "flatshard":
        from flatshard.integrations.transformers import FlatshardTrainer as Trainer
    model = _llama()
    if is_lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.0))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (8,), generator=generator) for _ in range(4 * STEPS * ROWS)]
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=0.01,
        gradient_accumulation_steps=2, logging_steps=1, save_steps=STEPS // 2, use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    arguments.ddp_find_unused_parameters = False
    run = Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])
    run.train()
    run.save_model(str(folder / "model"))
    losses = [one["loss"] for one in run.state.log_history if "loss" in one]
    if dist.get_rank() > 0:
        return losses, {}
    from safetensors.torch import load_file

    (path,) = (folder / "model").glob("*model.safetensors")
    return losses, load_file(path)


def lightning(side: str, folder: Path) -> Seen:
    import lightning as pl

    if side == "flatshard":
        import flatshard.integrations.lightning  # noqa: F401

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = _net(), []

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    run = pl.Trainer(
        accelerator="cpu", devices=2, strategy=side, max_steps=STEPS // 2, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=0.5, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    run.fit(module, _loader())
    run.save_checkpoint(folder / "last.ckpt")
    return module.losses, torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]


def fabric(side: str, folder: Path) -> Seen:
    from lightning.fabric import Fabric

    if side == "flatshard":
        import flatshard.integrations.lightning  # noqa: F401
    run = Fabric(accelerator="cpu", devices=2, strategy=side)
    run.launch()
    model, losses = _net(), []
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = run.setup_dataloaders(_loader())
    for number, (inputs, targets) in zip(range(STEPS), loader, strict=False):
        with run.no_backward_sync(model, enabled=number % 2 == 0):
            loss = nn.functional.mse_loss(model(inputs), targets)
            run.backward(loss)
        losses.append(loss.item())
        if number % 2:
            run.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    run.save(folder / "last.ckpt", {"model": model, "optimizer": optimizer})
    run.barrier()
    return losses, torch.load(folder / "last.ckpt", weights_only=False)["model"]


PROGRAMS: dict[str, tuple[str, str, Callable[[str, Path], Seen]]] = {
    "accelerate": ("Accelerate", "accumulation, clipping, `save_state`, `load_state`", accelerate),
    "accelerate-bf16": (
        "Accelerate",
        '`mixed_precision="bf16"`',
        lambda side, folder: accelerate(side, folder, "bf16"),
    ),
    "transformers": (
        "Trainer",
        "tied Llama, accumulation, clipping, checkpoints, gradient checkpointing",
        lambda side, folder: trainer(side, folder, gradient_checkpointing=True),
    ),
    "transformers-adafactor": (
        "Trainer",
        '`optim="adafactor"`',
        lambda side, folder: trainer(side, folder, optim="adafactor"),
    ),
    "transformers-lora": (
        "Trainer",
        "LoRA by peft",
        lambda side, folder: trainer(side, folder, is_lora=True),
    ),
    "lightning": ("Lightning Trainer", "accumulation, clipping, checkpoints", lightning),
    "lightning-fabric": ("Lightning Fabric", "accumulation, clipping, checkpoints", fabric),
}


def compare(first: Seen, second: Seen) -> tuple[float, float]:
    """The largest differences of losses and of weights."""
    (losses, weights), (others, their_weights) = first, second
    if len(losses) != len(others) or weights.keys() != their_weights.keys():
        return float("inf"), float("inf")
    gaps = [float((weights[key] - value).abs().max()) for key, value in their_weights.items()]
    return max(abs(a - b) for a, b in zip(losses, others, strict=True)), max(gaps)


def run_in_ranks(name: str, side: str, folder: Path) -> Seen:
    own = folder / f"{name}-{side}"
    own.mkdir()
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*ranks, __file__, "--program", name, "--side", side, "--folder", str(own)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} with {side} failed:\n{done.stderr[-3000:]}")
    seen: Seen = torch.load(own / "seen.pt")
    return seen


def table(names: list[str]) -> str:
    lines = ["| framework | with | losses differ by | weights differ by |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            framework, what, _ = PROGRAMS[name]
            sides = [run_in_ranks(name, side, Path(folder)) for side in ("ddp", "flatshard")]
            gaps = " | ".join(f"{gap:.1e}" for gap in compare(*sides))
            lines.append(f"| {framework} | {what} | {gaps} |")
            print(lines[-1], file=sys.stderr)
    about = (
        f"{STEPS} steps on 2 gloo ranks and CPUs, torch {torch.__version__.partition('+')[0]}: the "
        "largest difference from the framework's own DistributedDataParallel."
    )
    return "\n".join([MARK, "", about, "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, help="these programs")
    parser.add_argument("--page", type=Path, help="write the section of this page instead")
    for hidden in ("--program", "--side", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        warnings.simplefilter("ignore")
        seen = PROGRAMS[args.program][2](args.side, Path(args.folder))
        if dist.get_rank() == 0:
            torch.save(seen, Path(args.folder) / "seen.pt")
        return
    installed = [n for n in PROGRAMS if importlib.util.find_spec(n.partition("-")[0])]
    text = table(args.only or installed)
    if args.page is None:
        print(text)
    else:
        from optimizer_table import write

        write(args.page, text)


if __name__ == "__main__":
    main()
