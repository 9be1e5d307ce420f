"""Compares training loops of frameworks on a sharded model with their DistributedDataParallel.

    python scripts/tables/frameworks.py --page docs/frameworks.md
    python scripts/tables/frameworks.py --only lightning

Each program takes twenty steps on two gloo ranks, with the framework's DistributedDataParallel,
with flatshard, and with the framework's FSDP1 and FSDP2 if the framework runs them on CPUs. The
table has the largest difference of a rank's losses, and of the final weights. Frameworks that are
not installed are skipped: `pip install ".[accelerate,lightning,transformers]"`.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
from lib.command_line import Parser
from table_cells import page_file, write_table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

STEPS, ROWS = 20, 2
SIDES = {"ddp": "DDP", "flatshard": "flatshard", "fsdp1": "FSDP1", "fsdp2": "FSDP2"}


class Seen(NamedTuple):
    """Result of a training: rank 0's losses, the full weights, and the wrapper's name."""

    losses: list[float]
    weights: dict[str, Tensor]
    wrapper: str


def _net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 4))


def _loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(4 * STEPS * ROWS, size, generator=generator) for size in (8, 4)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=ROWS)


def accelerate(side: str, folder: Path, precision: str = "no") -> Seen:
    from accelerate import Accelerator

    asked = {}
    if side == "flatshard":
        from flatshard.integrations.accelerate import Accelerator
    elif side != "ddp":
        from accelerate import FullyShardedDataParallelPlugin

        asked["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(side[-1]))
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, project_dir=folder,
        **asked,
    )  # fmt: skip
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
            accelerator.wait_for_everyone()  # for DDP's file, which rank 0 alone writes
            accelerator.load_state(str(folder / "half"))
    return Seen(losses, accelerator.get_state_dict(model), type(model).__name__)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_attention_heads=4, tie_word_embeddings=True, **sizes)
    )


def trainer(
    side: str, folder: Path, is_lora: bool = False, resumes: bool = False, **settings: Any
) -> Seen:
    from transformers import Trainer, TrainingArguments

    if side == "flatshard":
        from flatshard.integrations.transformers import FlatshardTrainer as Trainer
    elif side != "ddp":
        settings |= {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": int(side[-1])}}
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
    if resumes:
        run = Trainer(_llama(), arguments, train_dataset=run.train_dataset)
        run.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    run.save_model(str(folder / "model"))
    losses = [one["loss"] for one in run.state.log_history if "loss" in one]
    wrapper = type(run.model_wrapped).__name__
    if dist.get_rank() > 0:
        return Seen(losses, {}, wrapper)
    from safetensors.torch import load_file

    (path,) = (folder / "model").glob("*model.safetensors")
    return Seen(losses, load_file(path), wrapper)


def lightning(side: str, folder: Path, resumes: bool = False) -> Seen:
    import lightning as pl
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    if side == "flatshard":
        import flatshard.integrations.lightning  # noqa: F401
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    strategies: dict[str, Callable[[], Any]] = {
        "fsdp1": FSDPStrategy,
        "fsdp2": partial(ModelParallelStrategy, **sizes, save_distributed_checkpoint=False),
    }

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = _net(), []

        def configure_model(self) -> None:
            if side == "fsdp2":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    steps = [STEPS // 4, STEPS // 2] if resumes else [STEPS // 2]
    for number, upto in enumerate(steps):
        run = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategies.get(side, lambda: side)(),
            max_steps=upto, logger=False,
            accumulate_grad_batches=2, gradient_clip_val=0.5, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        run.fit(module, _loader(), ckpt_path=folder / "last.ckpt" if number else None)
        run.save_checkpoint(folder / "last.ckpt")
        if upto < steps[-1]:
            losses, module = module.losses, Module()
            module.losses = losses
    weights = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return Seen(module.losses, weights, _wrapper_of(run.strategy.model, module.net))


def fabric(side: str, folder: Path) -> Seen:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy

    strategy: Any = side
    if side == "flatshard":
        import flatshard.integrations.lightning  # noqa: F401
    elif side == "fsdp1":
        strategy = FSDPStrategy()
    elif side == "fsdp2":
        strategy = ModelParallelStrategy(
            lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]),
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    model, losses = _net(), []
    if side == "fsdp2":  # which wants its own order
        model = run.setup(model)
        optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    else:
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
    weights = torch.load(folder / "last.ckpt", weights_only=False)["model"]
    return Seen(losses, weights, _wrapper_of(model._forward_module, model.module))


def _wrapper_of(outer: nn.Module, inner: nn.Module) -> str:
    """Name of the wrapper of a module. FSDP2 has no wrapper, and changes the module's class."""
    name = type(inner).__name__
    return name if name.startswith("FSDP") else type(outer).__name__


class Program(NamedTuple):
    framework: str
    what: str
    run: Callable[[str, Path], Seen]
    changed_lines: int  # from the framework's DistributedDataParallel to flatshard


PROGRAMS = {
    "accelerate": Program(
        "Accelerate", "accumulation, clipping, `save_state`, `load_state`", accelerate, 1
    ),
    "accelerate-bf16": Program(
        "Accelerate", '`mixed_precision="bf16"`', partial(accelerate, precision="bf16"), 1
    ),
    "transformers": Program(
        "Trainer",
        "tied Llama, accumulation, clipping, checkpoints, gradient checkpointing",
        partial(trainer, gradient_checkpointing=True),
        1,
    ),
    "transformers-resumed": Program(
        "Trainer", "the same, resumed from its 10th step", partial(trainer, resumes=True), 1
    ),
    "transformers-adafactor": Program(
        "Trainer", '`optim="adafactor"`', partial(trainer, optim="adafactor"), 1
    ),
    "transformers-lora": Program("Trainer", "LoRA by peft", partial(trainer, is_lora=True), 1),
    "lightning": Program("Lightning Trainer", "accumulation, clipping, checkpoints", lightning, 2),
    "lightning-resumed": Program(
        "Lightning Trainer", "the same, resumed from its half", partial(lightning, resumes=True), 2
    ),
    "lightning-fabric": Program(
        "Lightning Fabric", "accumulation, clipping, checkpoints", fabric, 2
    ),
}


def cell(seen: Seen | str, side: str, reference: Seen) -> str:
    """The largest differences of losses and of weights, or the reason why there are none."""
    if isinstance(seen, str):
        return f"raises `{seen}`"
    if side != "ddp" and seen.wrapper == reference.wrapper:
        return "runs DDP"
    if len(seen.losses) != len(reference.losses) or seen.weights.keys() != reference.weights.keys():
        return "wrong: other losses or weights"
    weights = (
        float((seen.weights[key] - value).abs().max()) for key, value in reference.weights.items()
    )
    losses = (abs(a - b) for a, b in zip(seen.losses, reference.losses, strict=True))
    return f"{max(losses):.1e}, {max(weights):.1e}"


def run_in_ranks(name: str, side: str, folder: Path) -> Seen | str:
    """Result of rank 0, or the class of the error that ended the ranks."""
    own = folder / f"{name}-{side}"
    own.mkdir()
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*ranks, __file__, "--program", name, "--side", side, "--folder", str(own)]
    environment = {**os.environ, "TMPDIR": str(own)}  # torchrun leaves a folder there
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and side in ("ddp", "flatshard"):
        sys.exit(f"{name} with {side} failed:\n{done.stderr[-3000:]}")
    if done.returncode:
        errors = re.findall(
            r"^(?:\[rank\d\]: ?)?(?:\w+\.)*(\w+(?:Error|Exception)): ", done.stderr, re.MULTILINE
        )
        return errors[0] if errors else "an error"
    return Seen(*torch.load(own / "seen.pt"))


def table(names: list[str]) -> str:
    sides = [side for side in SIDES if side != "ddp"]
    heads = ["framework", "with", "lines changed", *(SIDES[side] for side in sides)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            program = PROGRAMS[name]
            reference = run_in_ranks(name, "ddp", Path(folder))
            assert isinstance(reference, Seen)
            cells = [cell(run_in_ranks(name, s, Path(folder)), s, reference) for s in sides]
            row = [program.framework, program.what, str(program.changed_lines), *cells]
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], file=sys.stderr)
    about = (
        "The largest differences of losses and of weights from the framework's own "
        f"DistributedDataParallel (DDP), after {STEPS} steps on 2 gloo ranks on CPUs with torch "
        f"{torch.__version__.partition('+')[0]}. *runs DDP*: the program asks for FSDP, but "
        "on CPUs the framework runs DDP, without a warning."
    )
    return "\n".join([about, "", *lines])


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=PROGRAMS, help="programs to run (default: all)"
    )
    parser.add_argument(
        "--page", type=page_file, help="write the table into this page instead of printing it"
    )
    for hidden in ("--program", "--side", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        warnings.simplefilter("ignore")
        seen = PROGRAMS[args.program].run(args.side, Path(args.folder))
        if dist.get_rank() == 0:
            torch.save(tuple(seen), Path(args.folder) / "seen.pt")
        return
    installed = [n for n in PROGRAMS if importlib.util.find_spec(n.partition("-")[0])]
    write_table(args.page, "frameworks", table(args.only or installed))


if __name__ == "__main__":
    main()
