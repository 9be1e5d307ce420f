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
# # From DistributedDataParallel to ShardedWrapper
#
# You have a training program that runs under `DistributedDataParallel` (DDP), and it runs out of
# memory. This notebook trains a network on MNIST under DDP, shards it with one line, then divides
# it into units, and looks at what each step of this does to memory and communication.
#
# DDP copies everything to every rank: parameters, gradients, and the optimizer's state. `N` ranks
# hold the same bytes `N` times. Under `ShardedWrapper` every rank keeps one `N`th of each, and
# *unshards* a layer (all-gathers its parameters) only while that layer computes.
#
# All code is in the cells: change the network, the wrapping or the loop, and run them again. It
# takes three minutes on two CPU cores and needs no GPU. To run it on your machine:
# `pip install -e ".[tutorials]"` in a clone, then open this file with Jupyter.

# %%
import json
import os
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch._dynamo  # DDP needs it: imported here once, and not in each rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from flatshard import ShardedWrapper
from flatshard.checkpoint import full_state_dict
from flatshard.wrap import ModuleWrapPolicy

sys.path.insert(0, "../scripts")
from lib import mnist_data
from lib.output import COLOURS
from train_mnist import record_step

torch.set_num_threads(1)  # ranks share the cores
TOY = "TUTORIAL_TOY" in os.environ  # as the tests run it: a few steps on the digits

# %% [markdown]
# ## Ranks
#
# A rank is a process. torch's own launcher, the one behind `torchrun`, starts them from the
# notebook: `launch(train)` runs the function `train` in two processes and returns what each of them
# returns. They are forked, so they know all that the cells above have defined. (Two things must not
# happen in the notebook's own process, since no fork survives them: using CUDA, and computing with
# torch on several threads.)


# %%
def launch(function, *args, ranks=2):
    """Runs a function on so many ranks of this machine; returns {rank: what it returned}."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="notebook",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    return elastic_launch(config, function)(*args)


def hello():
    dist.init_process_group("gloo")  # joins the other ranks: "nccl" where each has its GPU
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"the sum over all ranks is {total.item()}"


launch(hello)

# %% [markdown]
# ## Data
#
# MNIST's files are read from `ROOT/MNIST/raw`, or downloaded to there. Where neither is possible,
# scikit-learn's handwritten digits take their place, enlarged to 28x28.

# %%
ROOT = Path(os.environ.get("MNIST_ROOT", "../data"))
try:
    if TOY:
        raise mnist_data.DataError
    is_there = any((ROOT / "MNIST" / "raw").glob("train-images*"))
    mnist_data.prepare_mnist(ROOT, download=not is_there)
    train_data, test_data = (mnist_data.load_mnist(ROOT, train=train) for train in (True, False))
    name = "MNIST"
except mnist_data.DataError:
    train_data, test_data = mnist_data.load_digits()
    name = "scikit-learn's digits"
print(f"{name}: {len(train_data):,} images to train on, {len(test_data):,} to test on")

# %% [markdown]
# ## Model
#
# Eight equal blocks between two small layers, like a transformer without attention. What a rank
# keeps of it will be easy to see: nearly all parameters are in the blocks.


# %%
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32 if TOY else 384, depth=8):
        super().__init__()
        self.first = nn.Linear(28 * 28, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.last = nn.Linear(width, 10)

    def forward(self, images):
        return F.log_softmax(self.last(self.blocks(self.first(images.flatten(1)))), dim=1)


def numel(module):
    return sum(parameter.numel() for parameter in module.parameters())


print(f"{numel(Net()):,} parameters, {numel(Net().blocks[0]):,} of them in each block")

# %% [markdown]
# ## Training
#
# The loop does not know how the model is distributed. Each rank takes its own part of every batch.
# DDP and `ShardedWrapper` differ only inside `model(...)`, `loss.backward()` and
# `optimizer.step()`, and the optimizer is made *after* wrapping.
#
# Testing has one rule. With sharded parameters a forward is *collective*: every rank must call it
# equally often, because every rank holds a shard that the others need. Here all ranks take equally
# many test images.

# %%
weights_file = Path(tempfile.mkdtemp()) / "net.pt"
STEPS, BATCH, TEST = (2, 32, 64) if TOY else (300, 128, 10_000)


def train(wrap):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    images, labels = train_data.tensors
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(STEPS):
        rows = order[torch.arange(step * BATCH + rank, (step + 1) * BATCH, ranks) % len(order)]
        loss = F.nll_loss(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)  # once, at the end: the ranks' losses do not hold up the steps

    results = {"losses": (losses / ranks).tolist(), "accuracy": test(model)}
    weights = full_state_dict(model)  # on rank 0; all ranks call it
    if rank == 0:
        torch.save(weights, weights_file)
    # Trains a few more steps, and returns the bytes and times of the fastest one.
    few = TensorDataset(images[rank::ranks], labels[rank::ranks])
    results |= record_step(model, few, optimizer, BATCH // ranks, torch.device("cpu"))
    dist.destroy_process_group()
    return results


@torch.no_grad()
def test(model):
    model.eval()
    images, labels = (tensor[:TEST] for tensor in test_data.tensors)
    count = len(images) // dist.get_world_size()  # the same on all ranks
    rows = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    right = (model(images[rows]).argmax(dim=1) == labels[rows]).sum()
    dist.all_reduce(right)
    model.train()
    return 100 * right.item() / (count * dist.get_world_size())


# %% [markdown]
# ## 1. DDP


# %%
def ddp(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def report(title):
    """Trains with this wrapping; prints what rank 0 held."""
    mine = runs[title] = launch(train, wrappings[title])[0]
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    sizes = ", ".join(f"{mine[kind] / 2**20:.1f}" for kind in kinds)
    print(f"{title}: loss {mine['losses'][-1]:.4f}, {mine['accuracy']:.1f} % right")
    print(f"MiB on rank 0 of parameters, gradients, optimizer state: {sizes}")


wrappings, runs = {"DDP": ddp}, {}
report("DDP")

# %% [markdown]
# Every parameter needs three more tensors of its size: its gradient and the two averages that
# AdamW keeps. All four are on every rank.
#
# ## 2. Sharded, as one unit
#
# ```diff
# -model = DistributedDataParallel(model)
# +model = ShardedWrapper(model)
# ```
#
# Without a wrap policy the whole model is one *unit*: its parameters form one flat parameter, of
# which each rank keeps one half.
#
# (Ranks on one host could read each other's memory, and would have nothing to send. With
# `collectives="sockets"` they send, as over a network.)


# %%
def one_unit(model):
    return ShardedWrapper(model, collectives="sockets")


wrappings["flatshard, one unit"] = one_unit
report("flatshard, one unit")

# %% [markdown]
# The persistent memory of each rank is now half. But a unit is unsharded as a whole: *during* a
# step all parameters are in memory.
#
# ## 3. Sharded, a unit for each block
#
# `ModuleWrapPolicy({Block})` makes a unit of each block; the two layers around them belong to the
# root.


# %%
def block_units(model):
    return ShardedWrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        collectives="sockets",
    )


wrappings["flatshard, a unit per block"] = block_units
report("flatshard, a unit per block")

# %% [markdown]
# ## The same numbers
#
# Sharding changes where parameters are, not their values. The losses of DDP and of flatshard are
# one curve. (Sums are rounded in another order, and AdamW amplifies that from step to step.)

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
losses = {title: run["losses"] for title, run in runs.items()}
axes.plot(losses["DDP"], color=COLOURS["DDP"], lw=4, alpha=0.6, label="DDP")
axes.plot(
    losses["flatshard, a unit per block"], color=COLOURS["flatshard"], lw=1, label="flatshard"
)
axes.set_xlabel("step")
axes.set_ylabel("loss over all ranks")
axes.set_title("Two ranks: DDP and flatshard")
axes.legend()
plt.show()
for title in list(runs)[1:]:
    apart = [abs(a - b) for a, b in zip(losses[title], losses["DDP"])]
    print(f"{title}: differs from DDP by at most {max(apart[:10]):.1e} in the first ten steps,")
    print(f"    by at most {max(apart):.1e} in all")

# %% [markdown]
# ## The accordion
#
# `model.record_steps()` records what a rank holds at each moment of a step. The plot shows one step
# of each run, MiB on rank 0 over time, at the same scale. At the bottom are this rank's parameters
# and the optimizer state, which stay. On top are unsharded parameters and gradients, which come and
# go. Dotted lines show where forward and backward end.


# %%
def draw_held(axes, step):
    times, gathered, gradients = zip((0.0, 0, 0), *step["samples"])
    times, gathered = [*times, step["step_end"]], [*gathered, 0]
    gradients = [*gradients, gradients[-1]]
    mib, ms = 2**20, [1000 * time for time in times]
    layers = {
        "this rank's parameters": [step["parameter_bytes"]] * len(ms),
        "optimizer state": [step["optimizer_bytes"]] * len(ms),
        "unsharded parameters": gathered,
        "gradients": gradients,
    }
    low = [0.0] * len(ms)
    for label, held in layers.items():
        high = [below + value / mib for below, value in zip(low, held)]
        axes.fill_between(ms, low, high, step="post", label=label, color=COLOURS[label], lw=0)
        low = high
    for end in ("forward_end", "backward_end"):
        axes.axvline(1000 * step[end], color="black", lw=0.8, ls=":")
    axes.set_ylabel("MiB on rank 0")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)


def held_bytes(step):
    """Rank 0's persistent and peak memory."""
    kept = step["parameter_bytes"] + step["optimizer_bytes"]
    peak = max(gathered + gradients for _, gathered, gradients in step["samples"])
    return kept + step["gradient_bytes"], kept + peak


figure, panels = plt.subplots(3, 1, figsize=(8, 7), sharey=True, layout="constrained")
for axes, (title, run) in zip(panels, runs.items()):
    draw_held(axes, run)
    axes.set_title(title, loc="left")
panels[-1].set_xlabel("ms since the step began")
handles, labels = panels[0].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# **DDP** holds four tensors per parameter all the time. It keeps its gradient buckets from step to
# step; a new gradient of backward needs memory too, until it is copied into its bucket.
#
# **One unit**: the persistent memory is half. The accordion opens once: all parameters are
# unsharded when forward begins and resharded when backward is over. Gradients accumulate unsharded
# beside them and are reduced at the very end; each rank keeps the average of its own half.
#
# **A unit per block**: the accordion opens for one block after the other, in forward and once more
# in backward. While a block computes, the next one is all-gathered. As soon as a block's gradients
# have arrived, they are reduced and its parameters are resharded. So a step needs a few blocks on
# top of the shards, however many blocks the model has.
#
# In bytes, with the volume counted as in the ZeRO paper (an all-reduce is a reduce-scatter and an
# all-gather):

# %%
print(f"{'MiB on rank 0':30}{'persistent':>12}{'peak':>12}{'volume per step':>18}")
for title, run in runs.items():
    persistent, peak = held_bytes(run)
    cells = (persistent / 2**20, peak / 2**20, run["moved_bytes"] / 2**20)
    print(f"{title:30}{cells[0]:12.1f}{cells[1]:12.1f}{cells[2]:18.1f}")

# %% [markdown]
# Sharding costs communication. DDP all-reduces its gradients: 2P for P bytes of parameters. One
# unit has the same volume, an all-gather and a reduce-scatter. A unit per block all-gathers the
# blocks a second time for backward: 3P, except for the root. (`sharding_strategy="SHARD_GRAD_OP"`
# keeps units unsharded between forward and backward: 2P again, and the accordion stays open.)
#
# ## What is sent, and when
#
# The same steps as bars over time: what rank 0 computes, and which collectives are in flight. Each
# bar is a unit.


# %%
def draw_ranges(axes, step):
    lanes = {
        "compute forward": ("forward", 2),
        "compute backward": ("backward", 2),
        "all-gather in flight": ("all-gather", 1),
        "reduction in flight": ("reduce-scatter", 0),
    }
    for kind, _, begin, end in step["ranges"]:
        if kind in lanes:
            label, lane = lanes[kind]
            place = {"left": 1000 * begin, "color": COLOURS[label], "edgecolor": "white", "lw": 0.5}
            is_first = label not in axes.get_legend_handles_labels()[1]
            axes.barh(lane, 1000 * (end - begin), **place, label=label if is_first else None)
    axes.set_yticks([2, 1, 0], ["compute", "all-gather", "reduce-scatter"])
    axes.set_xlim(0, 1000 * step["backward_end"])


figure, panels = plt.subplots(2, 1, figsize=(8, 4), layout="constrained")
for axes, title in zip(panels, list(runs)[1:]):
    draw_ranges(axes, runs[title])
    axes.set_title(title, loc="left")
panels[-1].set_xlabel("ms since the step began")
handles, labels = panels[-1].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# With one unit the model waits for its all-gather, and the reduce-scatter waits for the gradients
# of all layers. With a unit per block the next block is all-gathered, and the gradients of the last
# one are reduced, while a block computes. (Two ranks on two cores share them with their
# own communication. On a GPU the network has its own engines.)
#
# ## Ten epochs
#
# Three hundred steps are less than one epoch. This is a whole training of the first tutorial's
# convolutional network on MNIST, by
# [scripts/train_mnist.py](../scripts/train_mnist.py) on two ranks, once under DDP and once sharded.
# It takes some minutes, so this cell reads what a run has stored; it prints the command.

# %%
stored = json.loads(Path("mnist_ten_epochs.json").read_text())
print(f"{stored['date']}, torch {stored['torch']}, {stored['train_samples']:,} images")
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for style, (label, run) in zip(({"lw": 4, "alpha": 0.6}, {"lw": 1}), stored["runs"].items()):
    axes.plot(range(1, 11), run["accuracy"], "o-", ms=4, color=COLOURS[label], label=label, **style)
    print(f"{label}: {run['accuracy'][-1]:.2f} % of {stored['test_samples']:,} test images")
    print(f"    {run['command']}")
axes.set_xticks(range(1, 11))
axes.set_xlabel("epoch")
axes.set_ylabel("% right")
axes.set_title("MNIST, a convolutional network: accuracy on the test images")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## Saving
#
# `full_state_dict(model)` gives rank 0 full tensors under the unwrapped model's names, in host
# memory. It is collective, so every rank calls it, and rank 0 writes (`train` above did). The file
# loads into the unwrapped network, here in the notebook's own process:

# %%
plain = Net()
plain.load_state_dict(torch.load(weights_file))
images, labels = (tensor[:1000] for tensor in test_data.tensors)
with torch.no_grad():
    right = (plain(images).argmax(dim=1) == labels).float().mean().item()
print(f"the unwrapped network: {100 * right:.1f} % of the first {len(images):,} test images")

# %% [markdown]
# `checkpoint.save` and `checkpoint.load` also keep the optimizer's state and the random number
# generators, and continue on any number of ranks: see [transformer.ipynb](transformer.ipynb).
#
# ## What to take along
#
# | | |
# |---|---|
# | replace the wrapper, then make the optimizer | `ShardedWrapper(model)` |
# | call forward and `full_state_dict(model)` on every rank | also in evaluation |
# | divide large models into units | `auto_wrap_policy="auto"`, by class, or by size |
# | see where a step's time goes | `with model.record_steps(): ...`, `print(model.step_report())` |
# | memory is still short | [bfloat16 and offload](../docs/precision-and-offload.md) |
#
# Next: [transformer.ipynb](transformer.ipynb) compares all strategies,
# [memory.ipynb](memory.ipynb) computes memory, and [huggingface.ipynb](huggingface.ipynb) shards a
# model of `transformers`.
