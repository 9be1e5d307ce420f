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
# # Move a DDP program to ShardedWrapper, and choose its units
#
# You have a training program that runs under `DistributedDataParallel` (DDP), and it runs out of
# memory. This notebook trains a network on MNIST under DDP, shards it with one line, and then
# divides it into units: first by size, then by class. After each step it prints what the step does
# to memory, time and communication.
#
# DDP keeps all parameters, all gradients and the whole optimizer state on every rank. With
# `ShardedWrapper` each of `N` ranks keeps one `N`th of them. A rank *unshards* a unit (a group of
# layers) only while the unit computes: it all-gathers the unit's parameters, and frees them
# afterwards.
#
# All code is in the cells: change the network, the wrapping or the loop, and run them again. The
# notebook takes five minutes on two CPU cores and needs no GPU. To run it on your machine:
# `pip install -e ".[tutorials]"` in a clone, then open this file with Jupyter.

# %%
import functools
import json
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch._dynamo  # DDP imports it: import it here once, not in every rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from flatshard import CPUOffload, ShardedWrapper
from flatshard.checkpoint import full_state_dict
from flatshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

torch.set_num_threads(1)  # the ranks share the cores

# %% [markdown]
# ## Ranks
#
# A rank is a process. `launch(function)` runs a function in two processes and returns what each
# process returns. It uses torch's own launcher, the one behind `torchrun`. The processes are forked
# from this notebook, so they know everything that the cells above define. (Forked processes fail if
# the notebook's own process has used CUDA, or torch on several threads. In a program of your own,
# start the ranks with `torchrun`.)

# %%
from helpers import COLOURS, launch, load_digits, load_mnist, record_step, train_mnist


def hello():
    dist.init_process_group("gloo")  # connects the ranks; with one GPU per rank: "nccl"
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"the sum over all ranks is {total.item()}"


launch(hello)

# %% [markdown]
# ## Data
#
# The cell reads the files of MNIST from `ROOT/MNIST/raw`, or downloads them. If neither is
# possible, it uses scikit-learn's handwritten digits instead, enlarged to 28x28.

# %%
ROOT = Path(os.environ.get("MNIST_ROOT", "../data"))
try:
    is_there = any((ROOT / "MNIST" / "raw").glob("train-images*"))
    train_data, test_data = load_mnist(ROOT, download=not is_there)
    name = "MNIST"
except (ImportError, OSError, RuntimeError):  # no torchvision, or no network
    train_data, test_data = load_digits()
    name = "scikit-learn's digits"
print(f"{name}: {len(train_data):,} images to train on, {len(test_data):,} to test on")

# %% [markdown]
# ## Model
#
# Eight equal blocks between two small layers, like a transformer without attention. Nearly all
# parameters are in the blocks.


# %%
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=384, depth=8):
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
# The training loop does not know how the model is distributed. Each rank takes its own rows of
# every batch. `fused=True` selects the same AdamW kernel for all runs: on a CPU, flatshard chooses
# the fused kernel by itself and torch does not, and the two kernels round differently.
#
# Evaluation has one rule. A forward of a sharded model is *collective*: every rank must call it the
# same number of times, because every rank holds shards that the other ranks need. Here each rank
# tests the same number of images.

# %%
weights_file = Path(tempfile.mkdtemp()) / "net.pt"
STEPS, BATCH, TEST = 300, 128, 10_000


def train(wrap, measure):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

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
    dist.all_reduce(losses)  # once at the end, so that no step waits for it

    results = {"losses": (losses / ranks).tolist(), "accuracy": test(model)}
    weights = full_state_dict(model)  # every rank calls it; rank 0 gets the full tensors
    if rank == 0:
        torch.save(weights, weights_file)
    results |= measure(model, optimizer)
    dist.destroy_process_group()
    return results


@torch.no_grad()
def test(model):
    model.eval()
    images, labels = (tensor[:TEST] for tensor in test_data.tensors)
    count = len(images) // dist.get_world_size()  # the same number on every rank
    rows = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    right = (model(images[rows]).argmax(dim=1) == labels[rows]).sum()
    dist.all_reduce(right)
    model.train()
    return 100 * right.item() / (count * dist.get_world_size())


# %% [markdown]
# ## 1. DDP
#
# `report` trains with one wrapping and prints what rank 0 holds: between two steps, and at the peak
# of a step. (Activations are not counted. They are the same in all runs.)


# %%
def measure(model, optimizer):
    """Trains a few more steps, and returns the bytes and times of the fastest step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    few = TensorDataset(*(tensor[rank::ranks] for tensor in train_data.tensors))
    return record_step(model, few, optimizer, BATCH // ranks, torch.device("cpu"))


def held_bytes(step):
    """Persistent and peak memory of rank 0."""
    kept = step["parameter_bytes"] + step["optimizer_bytes"]
    peak = max(gathered + gradients for _, gathered, gradients in step["samples"])
    return kept + step["gradient_bytes"], kept + peak


def report(title, wrap):
    mine = runs[title] = launch(train, wrap, measure)[0]
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    sizes = ", ".join(f"{mine[kind] / 2**20:.1f}" for kind in kinds)
    persistent, peak = held_bytes(mine)
    print(f"{title}: loss {mine['losses'][-1]:.4f}, {mine['accuracy']:.1f} % right")
    print(f"MiB of parameters, gradients, optimizer state: {sizes}")
    print(f"MiB between two steps: {persistent / 2**20:.1f}, at the peak: {peak / 2**20:.1f}")


def ddp(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


runs = {}
report("DDP", ddp)

# %% [markdown]
# Each parameter has three more tensors of its size: its gradient and the two averages of AdamW. All
# four are on every rank.
#
# ## 2. Sharded, as one unit
#
# ```diff
# -model = DistributedDataParallel(model)
# +model = ShardedWrapper(model)
# ```
#
# Without a wrap policy the whole model is one *unit*. Its parameters form one flat parameter, and
# each of the two ranks keeps one half.
#
# (By default, ranks on one host read each other's memory and send nothing. With
# `collectives="sockets"` they send, as they would over a network.)


# %%
def one_unit(model):
    return ShardedWrapper(model, collectives="sockets")


report("one unit", one_unit)

# %% [markdown]
# Between two steps each rank now holds half. But ranks unshard a unit as a whole: *during* a step
# all parameters are in memory, and the peak is little lower than under DDP.
#
# ## 3. Units by size
#
# `size_based_auto_wrap_policy` makes a unit of each module that has at least `min_num_params`
# parameters left, from the inside outwards. The network of torch's MNIST examples shows where the
# units are: `print(model)` shows a `ShardedWrapper` around each unit.


# %%
by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)


def classic():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = ShardedWrapper(train_mnist.Net(), auto_wrap_policy=by_size)
    shown = str(model)
    dist.destroy_process_group()
    return shown


print(launch(classic)[0])

# %% [markdown]
# The first linear layer has 98 % of the parameters and is a unit. The other layers are too small;
# they belong to the root, the unit of whatever no other unit contains.
#
# In the network with eight blocks the policy finds both linear layers of each block:


# %%
def size_units(model):
    return ShardedWrapper(model, auto_wrap_policy=by_size, collectives="sockets")


report("units by size", size_units)

# %% [markdown]
# ## 4. A unit per block
#
# `ModuleWrapPolicy({Block})` makes a unit of each block. The two layers outside the blocks belong
# to the root. For models that consist of equal blocks, this is the usual choice.


# %%
def block_units(model):
    return ShardedWrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        collectives="sockets",
    )


report("a unit per block", block_units)

# %% [markdown]
# ## 5. Offload
#
# On a GPU, `cpu_offload=CPUOffload(offload_params=True)` keeps shards, gradients and optimizer
# state in host memory. Here the model computes in host memory already, so that this would change
# nothing. `CPUOffload(path=...)` keeps the same tensors in temporary files. The system writes the
# files to disk if it needs their memory for something else.


# %%
def offloaded(model):
    return ShardedWrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=True, path=weights_file.parent),
        collectives="sockets",
    )


report("a unit per block, in files", offloaded)

# %% [markdown]
# Between two steps the sizes are the same as in the run before: they count the shards, in memory or
# in files. The peak is lower, because reduced gradients go to their files during backward.
#
# ## The same numbers
#
# Sharding changes where parameters are, not their values. All runs have the same losses, bit by
# bit. (That is so with two ranks, because the sum of two gradients does not depend on their order.
# With more ranks, DDP and flatshard add in another order, and AdamW amplifies the difference in
# rounding from step to step.)

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
losses = {title: run["losses"] for title, run in runs.items()}
axes.plot(losses["DDP"], color=COLOURS["DDP"], lw=4, alpha=0.6, label="DDP")
axes.plot(losses["a unit per block"], color=COLOURS["flatshard"], lw=1, label="flatshard")
axes.set_xlabel("step")
axes.set_ylabel("mean loss of all ranks")
axes.set_title("Two ranks: DDP and flatshard")
axes.legend()
plt.show()
print("largest difference from the losses of DDP, in the first ten steps and in all steps:")
for title in list(runs)[1:]:
    apart = [abs(a - b) for a, b in zip(losses[title], losses["DDP"])]
    print(f"{title:28}{max(apart[:10]):10.1e}{max(apart):10.1e}")

# %% [markdown]
# ## The accordion
#
# `model.record_steps()` records what a rank holds at each moment of a step. The plot shows one step
# of three runs: MiB on rank 0 over time, at the same scale. At the bottom are this rank's
# parameters and the optimizer state, which stay. Above them are unsharded parameters and gradients,
# which come and go. Dotted lines show where forward and backward end.


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


shown = {title: runs[title] for title in ("DDP", "one unit", "a unit per block")}
figure, panels = plt.subplots(3, 1, figsize=(8, 7), sharey=True, layout="constrained")
for axes, (title, run) in zip(panels, shown.items()):
    draw_held(axes, run)
    axes.set_title(title, loc="left")
panels[-1].set_xlabel("ms since the step began")
handles, labels = panels[0].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# **DDP** holds four tensors for each parameter all the time. It keeps its gradient buckets from
# step to step. Each new gradient of backward needs memory until it has been copied into its bucket.
#
# **One unit**: half of the memory is gone between two steps. The accordion opens once: forward
# begins with all parameters unsharded, and they stay until backward ends. Gradients accumulate
# unsharded beside the parameters and are reduced at the very end.
#
# **A unit per block**: the accordion opens for one block after the other, in forward and again in
# backward. While a block computes, the next block is all-gathered. As soon as all gradients of a
# block have been computed, they are reduced, and the block is resharded. So a step needs a few
# blocks above the shards, however many blocks the model has.
#
# All runs in one table. The volume is counted as in the ZeRO paper, where an all-reduce counts as a
# reduce-scatter and an all-gather:

# %%
print(
    f"{'MiB on rank 0':28}{'persistent':>12}{'peak':>8}{'volume per step':>18}{'ms per step':>14}"
)
for title, run in runs.items():
    sizes = (*held_bytes(run), run["moved_bytes"])
    persistent, peak, volume = (size / 2**20 for size in sizes)
    milliseconds = 1000 * run["step_end"]
    print(f"{title:28}{persistent:12.1f}{peak:8.1f}{volume:18.1f}{milliseconds:14.0f}")

# %% [markdown]
# Sharding costs communication. DDP all-reduces its gradients: 2P for P bytes of parameters. One
# unit has the same volume: an all-gather and a reduce-scatter. More units have 3P, except for the
# root, because each unit is all-gathered a second time for backward.
# (`sharding_strategy="SHARD_GRAD_OP"` keeps units unsharded between forward and backward: 2P again,
# and the accordion stays open.)
#
# **When a unit per block is slower than one unit.** In the table, a unit per block is slower than
# one unit, and units by size are slower still. Each unit has a fixed cost for every collective (its
# latency, and the work of starting it on the host), and 3P is more than 2P. Nothing hides these
# costs where blocks are as small as here, and where ranks share their cores with their own
# communication. A unit per block pays off when a block computes for longer than the all-gather of
# the next block takes, and above all when the model does not fit otherwise. If the unsharded model
# fits, choose few units or `SHARD_GRAD_OP`.
#
# ## What is sent, and when
#
# The same steps as bars over time: when rank 0 computes, and which collectives are in flight. Each
# bar is one unit.


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
for axes, title in zip(panels, ("one unit", "a unit per block")):
    draw_ranges(axes, runs[title])
    axes.set_title(title, loc="left")
panels[-1].set_xlabel("ms since the step began")
handles, labels = panels[-1].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# With one unit, the model waits for its all-gather, and the reduce-scatter waits for the gradients
# of all layers. With a unit per block, one block computes while the next block is all-gathered and
# the gradients of the block before are reduced. (Here, two ranks on two cores share the cores with
# their own communication. A GPU copies and sends beside its computation.)
#
# ## Ten epochs
#
# Three hundred steps are less than one epoch. This is a full training of the network of torch's
# MNIST examples by [scripts/train_mnist.py](../scripts/train_mnist.py) on two ranks, once under DDP
# and once sharded. It takes some minutes, so the cell reads the stored results of a run, and prints
# the command.

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
# Both runs end at 99.11 %, and have the same accuracy after each epoch. Often 99.2 % is reported
# for this network. The difference is noise, and not an effect of sharding: on 10,000 test images,
# the standard error of such an accuracy is 0.09 points. The settings of torch's own example
# (batches of 64, 14 epochs) end at 99.10 % here.
#
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
# | to do | how |
# |---|---|
# | replace the wrapper | `ShardedWrapper(model)` |
# | call forward and `full_state_dict(model)` on every rank | also in evaluation |
# | divide large models into units | `auto_wrap_policy="auto"`, by class, or by size |
# | see where time goes | `with model.record_steps() as reports: ...`, `print(reports[-1])` |
# | memory is still short | [bfloat16 and offload](../docs/precision-and-offload.md) |
#
# Next: [transformer.ipynb](transformer.ipynb) compares all strategies,
# [memory.ipynb](memory.ipynb) computes memory, and [huggingface.ipynb](huggingface.ipynb) shards a
# model of `transformers`.
