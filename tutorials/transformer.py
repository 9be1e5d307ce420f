# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a transformer: bfloat16, accumulation, resuming, and all strategies compared
#
# A decoder-only transformer is an ideal model to shard: it is a sequence of many equal blocks. This
# notebook makes each block a unit and trains in bfloat16, with gradient accumulation and clipping,
# until the model writes words. It saves a checkpoint, resumes with a different number of ranks, and
# compares all strategies.
#
# It takes four to ten minutes on two CPU cores. To run it on your machine:
# `pip install -e ".[tutorials]"` in a clone, then open this file with Jupyter.

# %%
import contextlib
import json
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from flatshard import MixedPrecision, ShardedWrapper, checkpoint
from flatshard.wrap import ModuleWrapPolicy

torch.set_num_threads(1)  # ranks share the cores
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Ranks
#
# `launch(train)` runs a function on two ranks and returns the result of each rank. The ranks are
# processes that torch's own launcher forks from this notebook; [mnist.ipynb](mnist.ipynb) explains
# the details. Start a program of your own with `torchrun`.

# %%
from helpers import COLOURS, PEAK, compare_strategies, launch

# %% [markdown]
# ## Text
#
# The text is Shakespeare if `TEXT_FILE` names the file. Otherwise it is Python's own documentation,
# which comes with Python. A token is a byte.

# %%
text_file = Path(os.environ.get("TEXT_FILE", "../data/tinyshakespeare/input.txt"))
if text_file.exists():
    data = text_file.read_bytes()
else:
    from pydoc_data.topics import topics

    data = "\n".join(topics[name] for name in sorted(topics)).encode()
text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
print(f"{len(text):,} bytes, such as {data[1000:1080]}")

# %% [markdown]
# ## Model


# %%
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width=128, depth=4, heads=4, context=96):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% [markdown]
# ## Units by class
#
# `ModuleWrapPolicy({Block})` makes a unit of each block. The embeddings, the last norm and the head
# belong to the root unit. `mixed_precision` sets the dtypes of all-gathers and reduce-scatters. The
# optimizer updates float32 shards.


# %%
def shard(model):
    return ShardedWrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


# %% [markdown]
# ## Accumulating and clipping
#
# Under `model.no_sync()` backward reduces no gradients, so they accumulate on each rank. The first
# backward outside of `no_sync` reduces the sum. torch's own `clip_grad_norm_` computes the norm of
# the full gradients on every rank.


# %%
def train_step(model, optimizer, rows, accumulate=2):
    total = 0.0
    for number, part in enumerate(rows.chunk(accumulate)):
        is_last = number == accumulate - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            logits = model(part[:, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(logits, part[:, 1:].flatten()) / accumulate
            loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


# %% [markdown]
# ## Training and saving
#
# `checkpoint.save` writes the model, the optimizer, the scheduler and the random number generators.
# Every rank calls it and writes its own shards. `checkpoint.load` resumes on any number of ranks.
# The rows of a batch depend only on the number of the step, so a resumed training reads the same
# rows.

# %%
STEPS, SAVED, ROWS = 2500, 600, 24


def rows_of(step, context):
    """This rank's rows of a step; all ranks' together are the same on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (ROWS, 1), generator=generator)
    rows = text[starts + torch.arange(context + 1)]
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def train(path=None, until=STEPS):
    dist.init_process_group("gloo")
    torch.manual_seed(1)  # the same weights on every rank
    model = shard(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    first = 0
    if path:
        first = checkpoint.load(path, model, optimizer, scheduler=scheduler)["step"]

    losses = {}
    for step in range(first + 1, until + 1):
        losses[step] = train_step(model, optimizer, rows_of(step, model.module.context))
        scheduler.step()
        if step == SAVED:
            to = folder / f"step-{step}"
            checkpoint.save(to, model, optimizer, scheduler=scheduler, extra={"step": step})
        if step % 500 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {losses[step].item():.2f} on rank 0")
    means = torch.stack(list(losses.values()))
    dist.all_reduce(means)
    means = (means / dist.get_world_size()).tolist()
    written = sample(model, 400) if until == STEPS else None
    dist.destroy_process_group()
    return dict(zip(losses, means)), written


@torch.no_grad()
def sample(model, count):
    """Writes so many bytes. Collective: every forward all-gathers, and all ranks draw alike."""
    generator = torch.Generator().manual_seed(1)
    found = list(b"The ")
    for _ in range(count):
        tokens = torch.tensor([found[-model.module.context :]])
        chances = (model(tokens)[0, -1].float() / 0.7).softmax(0)
        found.append(torch.multinomial(chances, 1, generator=generator).item())
    return bytes(found).decode(errors="replace")


uninterrupted, written = launch(train)[0]
print(f"loss of the last step: {uninterrupted[STEPS]:.2f} nats per byte")

# %% [markdown]
# This is what the model writes:

# %%
print(written)

# %% [markdown]
# ## Resume with a different number of ranks
#
# Suppose that the machine fails after the checkpoint was saved, and that the next machine has room
# for another number of ranks. Each rank then takes its share of the same batches:

# %%
OTHER = 3
resumed, _ = launch(train, folder / f"step-{SAVED}", min(STEPS, SAVED + 100), ranks=OTHER)[0]
apart = max(abs(loss - uninterrupted[step]) for step, loss in resumed.items())
print(f"{len(resumed)} steps on {OTHER} ranks: losses differ by at most {apart:.1e}")

# %% [markdown]
# After resuming, the losses coincide with those of the uninterrupted training:

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
black = {"color": COLOURS["flatshard"]}
axes.plot(*zip(*uninterrupted.items()), lw=0.5, alpha=0.6, label="uninterrupted, 2 ranks", **black)
near = [(step, loss) for step, loss in uninterrupted.items() if step in resumed]
inset = axes.inset_axes([0.4, 0.35, 0.57, 0.6])
inset.plot(*zip(*near), lw=4, alpha=0.3, label="uninterrupted, 2 ranks", **black)
label = f"resumed on {OTHER} ranks at step {SAVED}"
inset.plot(*zip(*resumed.items()), lw=1, ls="--", label=label, **black)
figure.legend(*inset.get_legend_handles_labels(), loc="outside lower center", ncols=2)
axes.indicate_inset_zoom(inset)
axes.set_xlabel("step")
axes.set_ylabel("loss, nats per byte")
axes.set_title("A training, and its continuation from a checkpoint")
plt.show()

# %% [markdown]
# ## All strategies
#
# [scripts/compare_strategies.py](../scripts/compare_strategies.py) trains such a model for a few
# steps under each strategy. Here the model has eight wider blocks, and the ranks send over sockets,
# as they would over a network. For the HYBRID strategies, two ranks count as one node.

# %%
RANKS = 4
SIZES = "--width 256 --depth 8 --steps 4"


def compare():
    dist.init_process_group("gloo")
    options = f"--collectives sockets --batch-size 8 {SIZES} --json {folder}/ways.json"
    compare_strategies.compare(compare_strategies.parse_args(options.split()), torch.device("cpu"))
    dist.destroy_process_group()


with contextlib.redirect_stdout(None):
    launch(compare, ranks=RANKS)
ways = json.loads((folder / "ways.json").read_text())["ways"]
print(f"{'':20}{'ms a step':>10}{'persist. MiB':>13}{'peak':>9}{'volume':>9}{'loss':>9}")
for name, way in ways.items():
    held, peak, moved = (way[f"{key}_bytes"] / 2**20 for key in ("between", "peak", "moved"))
    print(f"{name:20}{1000 * way['seconds']:10.0f}{held:13.1f}{peak:9.1f}{moved:9.1f}", end="")
    print(f"{way['loss']:9.4f}")

# %% [markdown]
# *persistent*: parameters, gradients and optimizer state of a rank. *peak*: the same, and the
# unsharded parameters and gradients of a step. *volume*: the bytes that a step communicates,
# counted as in the ZeRO paper (an all-reduce is a reduce-scatter and an all-gather). Activations
# are not counted; they are the same for all strategies.
#
# The same numbers as bars. Brown is DDP and black is flatshard. The bars of memory are divided by
# kind.

# %%
names = list(ways)
figure, panels = plt.subplots(1, 3, figsize=(10, 4), sharey=True, layout="constrained")
who = [COLOURS["DDP" if name == "DDP" else "flatshard"] for name in names]
panels[0].barh(names, [1000 * row["seconds"] for row in ways.values()], color=who)
panels[0].set_title("ms per step", fontsize="medium")
panels[2].barh(names, [row["moved_bytes"] / 2**20 for row in ways.values()], color=who)
panels[2].set_title("MiB of volume per step", fontsize="medium")

kinds = {
    "this rank's parameters": "parameter_bytes",
    "optimizer state": "optimizer_bytes",
    "gradients": "gradient_bytes",
    "unsharded parameters": "kept_gathered_bytes",
}
left = [0.0] * len(names)
for kind, key in kinds.items():
    sizes = [row[key] / 2**20 for row in ways.values()]
    panels[1].barh(names, sizes, left=left, color=COLOURS[kind], label=kind)
    left = [before + size for before, size in zip(left, sizes)]
more = [row["peak_bytes"] / 2**20 - held for row, held in zip(ways.values(), left)]
panels[1].barh(names, more, left=left, label="more in a step", **PEAK)
panels[1].set_title("MiB of memory", fontsize="medium")
panels[0].invert_yaxis()
figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
plt.show()

# %% [markdown]
# What the table shows:
#
# - `FULL_SHARD` has a quarter of DDP's persistent memory. During a step it adds the root and three
#   blocks. It communicates 1.5 times as much as DDP, because each block is all-gathered twice.
# - `SHARD_GRAD_OP` keeps blocks unsharded between forward and backward. It communicates as much as
#   DDP, but at the end of forward the whole model is in memory. `SHARD_OP` keeps blocks unsharded
#   until the optimizer's step, which saves all-gathers when gradients accumulate over several
#   micro-batches.
# - bfloat16 halves the all-gathers. Gradients are reduced in float32 here (`reduce_dtype`).
# - The HYBRID strategies hold more, and communicate mostly within a node. Four processes on one
#   machine gain nothing from this; clusters with slow links between nodes do.
#
# The times are those of four ranks on few cores, over sockets. On your network the times will
# differ, but not the bytes: run `torchrun --nproc-per-node 4 scripts/compare_strategies.py`.
#
# Next: [memory.ipynb](memory.ipynb) predicts these bytes without running anything.
