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
# memory. This notebook takes the classic MNIST program, shards it with one line, then with two
# units, and looks at what each step of this does to memory and communication.
#
# DDP copies everything to every rank: parameters, gradients, and the optimizer's state. `N` ranks
# hold the same bytes `N` times. Under `ShardedWrapper` every rank keeps one `N`th of each, and
# *unshards* a layer (all-gathers its parameters) only while that layer computes.
#
# The ranks here are real: each run below is a `torchrun` of
# [scripts/train_mnist.py](../scripts/train_mnist.py) with two processes. (Functions defined in a
# notebook cannot be sent to other processes, so the program is a file.) The cells show its parts.
#
# To run it yourself: `pip install -e ".[tutorials]"`, then open this file with Jupyter.

# %%
import inspect
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Markdown

from flatshard import CPUOffload, ShardedWrapper

sys.path.insert(0, "../scripts")
import train_mnist
import training_job

# MNIST's files are read from ROOT/MNIST/raw if they exist, else scikit-learn's digits.
ROOT = os.environ.get("MNIST_ROOT", "../data")
TOY = "TUTORIAL_TOY" in os.environ  # as the tests run it: a few steps on the digits
JOB = ["--max-steps", "2", "--data", "digits"] if TOY else ["--max-steps", "120"]
results = Path(tempfile.mkdtemp())


def show(*functions):
    """Displays the source of parts of the program."""
    text = "\n\n".join(inspect.getsource(function) for function in functions)
    return Markdown(f"```python\n{text}```")


def torchrun(name, *options):
    """Trains on two ranks and keeps the run's records; returns what rank 0 printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    files = ["--json", results / f"{name}.json", "--record", results / f"{name}-step.json"]
    # Ranks on one Linux host could share memory and would not need to send anything. As over a
    # network, they are to send here.
    program = ["../scripts/train_mnist.py", "--data-root", ROOT, "--collectives", "sockets"]
    done = subprocess.run(
        [*launcher, *program, *JOB, *files, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FORCE_COLOR": ""},  # Jupyter sets it
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def load(name):
    return json.loads((results / f"{name}.json").read_text())


# %% [markdown]
# ## The program
#
# The network is the one of every first tutorial: two convolutions, two linear layers, 1.2 million
# parameters. Keep one number in mind: `fc1` alone has 9216 x 128 + 128 = 1,179,776 of them, 98 %.

# %%
show(train_mnist.Net)

# %% [markdown]
# Every rank joins a process group: gloo on CPUs, NCCL where each rank has its GPU.

# %%
show(training_job.connect)

# %% [markdown]
# The training loop does not know how the model is distributed. Each rank takes its own part of
# every batch; DDP and `ShardedWrapper` differ only inside `model(...)`,
# `loss.backward()` and `optimizer.step()`.

# %%
show(train_mnist.train_steps)

# %% [markdown]
# Testing has one rule: with sharded parameters a forward is *collective*. Every rank must call it
# equally often, because every rank holds a shard that the others need. So all ranks take equally
# many batches, and samples past the end are masked.

# %%
show(train_mnist.evaluate)

# %% [markdown]
# This function wraps the model. The first line is DDP, the last statement is flatshard. In both
# cases the optimizer is made afterwards, from `model.parameters()`.

# %%
show(train_mnist.wrap_model)

# %% [markdown]
# ## 1. DDP

# %%
print(torchrun("ddp", "--ddp"))

# %% [markdown]
# Every parameter needs three more tensors of its size: its gradient and the two averages that
# Adadelta keeps. All four are on every rank.
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

# %%
print(torchrun("one", "--min-num-params", "0"))

# %% [markdown]
# The persistent memory of each rank is now half, and the losses are the same (see below). But a
# unit is unsharded as a whole: *during* a step all parameters are in memory.
#
# ## 3. Sharded, as two units
#
# `size_based_auto_wrap_policy` makes a unit of every module that has at least `min_num_params`
# parameters of its own:
#
# ```python
# policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)
# model = ShardedWrapper(model, auto_wrap_policy=policy)
# ```
#
# `conv2` has 18,496, so only `fc1` becomes a unit, and the rest belongs to the root.

# %%
print(torchrun("two", "--min-num-params", "20000"))

# %% [markdown]
# The printed model shows both units, with their elements and padding.
#
# ## The accordion
#
# `model.record_steps()` records what a rank held at each moment of a step. The plot shows one step
# of each run, MiB on rank 0 over time, at the same scale. At the bottom are the shards and the
# optimizer state, which stay. On top are unsharded parameters and gradients, which come and go.


# %%
def draw_held(axes, name):
    step = load(f"{name}-step")
    times, gathered, gradients = zip((0.0, 0, 0), *step["samples"])
    times, gathered = [*times, step["step_end"]], [*gathered, 0]
    gradients = [*gradients, gradients[-1]]
    mib, ms = 2**20, [1000 * time for time in times]
    low = [step["parameter_bytes"] / mib] * len(ms)
    axes.fill_between(ms, 0, low, step="post", label="shards", color="tab:blue")
    layers = {
        "optimizer state": ([step["optimizer_bytes"]] * len(ms), "tab:purple"),
        "unsharded parameters": (gathered, "tab:orange"),
        "gradients": (gradients, "tab:green"),
    }
    for label, (held, colour) in layers.items():
        high = [below + value / mib for below, value in zip(low, held)]
        axes.fill_between(ms, low, high, step="post", label=label, color=colour, lw=0)
        low = high
    for end in ("forward_end", "backward_end"):
        axes.axvline(1000 * step[end], color="black", lw=0.8, ls=":")
    axes.set_ylabel("MiB on rank 0")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)


def held_bytes(name):
    """Rank 0's persistent and peak memory."""
    step = load(f"{name}-step")
    kept = step["parameter_bytes"] + step["optimizer_bytes"]
    peak = max(gathered + gradients for _, gathered, gradients in step["samples"])
    return kept + step["gradient_bytes"], kept + peak


titles = {"ddp": "DDP", "one": "flatshard, one unit", "two": "flatshard, two units"}
figure, panels = plt.subplots(3, 1, figsize=(8, 7), sharey=True, layout="constrained")
for axes, (name, title) in zip(panels, titles.items()):
    draw_held(axes, name)
    between, peak = (size / 2**20 for size in held_bytes(name))
    axes.set_title(f"{title}: {between:.1f} MiB persistent, {peak:.1f} MiB peak", loc="left")
panels[-1].set_xlabel("ms since the step began (dotted: forward ends, backward ends)")
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
# **Two units**: the accordion opens for `fc1` alone and closes again, in forward and once more in
# backward. As soon as its gradients have arrived, they are reduced and its parameters resharded,
# while the convolutions still compute. The root (the other 2 %) stays unsharded in between.
#
# One layer has 98 % of this model, so the peak memory hardly changes: the peak cannot be smaller
# than the largest unit. A model of many equal layers saves in proportion to their number: see
# [transformer.ipynb](transformer.ipynb).
#
# ## What is sent, and when
#
# The same steps as bars over time. Each unit has a row for its forward, one for its backward, one
# for its all-gathers and one for its reduce-scatter.


# %%
def draw_ranges(axes, name):
    step = load(f"{name}-step")
    kinds = {
        "compute forward": "tab:blue",
        "compute backward": "tab:cyan",
        "all-gather in flight": "tab:orange",
        "reduce-scatter in flight": "tab:green",
    }
    units = sorted({unit for kind, unit, *_ in step["ranges"] if kind in kinds}, reverse=True)
    rows = [(kind, unit) for unit in units for kind in kinds]
    for kind, unit, begin, end in step["ranges"]:
        if kind in kinds:
            row = len(rows) - 1 - rows.index((kind, unit))
            axes.barh(row, 1000 * (end - begin), left=1000 * begin, color=kinds[kind])
    names = [f"{kind}, {unit or '(root)'}" for kind, unit in reversed(rows)]
    axes.set_yticks(range(len(rows)), names, fontsize=8)


figure, panels = plt.subplots(
    2, 1, figsize=(8, 5), height_ratios=[1, 2], sharex=True, layout="constrained"
)
for axes, name in zip(panels, ("one", "two")):
    draw_ranges(axes, name)
    axes.set_title(titles[name], loc="left")
figure.suptitle("What overlaps in a step, on rank 0")
longest = max(load(f"{name}-step")["backward_end"] for name in ("one", "two"))
panels[-1].set_xlim(0, 1000 * longest)
panels[-1].set_xlabel("ms since the step began")
plt.show()

# %% [markdown]
# Two units can overlap: `fc1` is all-gathered while the convolutions compute (orange beside blue),
# and its gradients are reduced during the backward of the convolutions (green beside cyan). With
# one unit nothing overlaps.
#
# In bytes, counted as in the ZeRO paper (an all-reduce is a reduce-scatter and an all-gather):

# %%
rows = [("", "persistent memory", "peak memory", "volume per step")]
for name, title in titles.items():
    sizes = (*held_bytes(name), load(f"{name}-step")["moved_bytes"])
    rows.append((title, *(f"{size / 2**20:.2f} MiB" for size in sizes)))
for row in rows:
    print(f"{row[0]:22}" + "".join(f"{cell:>20}" for cell in row[1:]))

# %% [markdown]
# Sharding costs communication. DDP all-reduces its gradients: 2P for P bytes of parameters. One
# unit has the same volume, an all-gather and a reduce-scatter. Two units all-gather `fc1` a second
# time for backward: 3P, except for the root. (`sharding_strategy="SHARD_GRAD_OP"` keeps units
# unsharded between forward and backward: 2P again, and the accordion stays open.)
#
# ## The same numbers
#
# Sharding changes where parameters are, not their values. The losses of the first fifty steps are
# three lines, one on top of the other:

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for (name, title), style in zip(titles.items(), ("-", "--", ":")):
    axes.plot(load(name)["step_losses"], style, lw=2, label=title)
axes.set_xlabel("step")
axes.set_ylabel("loss over all ranks")
axes.set_title("DDP and flatshard: the same losses")
axes.legend()
plt.show()
reference = load("ddp")["step_losses"]
for name in ("one", "two"):
    apart = max(abs(a - b) / b for a, b in zip(load(name)["step_losses"], reference))
    print(f"{titles[name]}: largest difference of a step's loss from DDP's {apart:.1e}, relative")

# %% [markdown]
# ## Offload
#
# `cpu_offload=CPUOffload(offload_params=True)` keeps shards, gradients and optimizer state in host
# memory. On a CPU they are there already, so it changes nothing and warns. (Wrapping in a process
# without other ranks, such as this notebook, warns too.)

# %%
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ShardedWrapper(train_mnist.Net(), cpu_offload=CPUOffload(offload_params=True))
print(*(one.message for one in said), sep="\n")

# %% [markdown]
# `CPUOffload(path=DIR)` keeps them in files, which are mapped into memory while a unit uses
# them, and vanish with the process. The results are the same:

# %%
torchrun("disk", "--min-num-params", "20000", "--offload-path", str(results))
print(
    "bitwise equal to the run in memory:", load("disk")["step_losses"] == load("two")["step_losses"]
)

# %% [markdown]
# ## Saving
#
# `full_state_dict(model)` gives rank 0 full tensors under the unwrapped model's names, in host
# memory. It is collective, so every rank calls it, and rank 0 writes:
#
# ```python
# weights = flatshard.checkpoint.full_state_dict(model)
# if dist.get_rank() == 0:
#     torch.save(weights, "net.pt")
# ```
#
# The file loads into the unwrapped network. With `--save FILE` the program also writes the
# optimizer's state and its progress. `--resume FILE` resumes with any world size, sharded or under
# DDP: see [transformer.ipynb](transformer.ipynb).
#
# ## What to take along
#
# | | |
# |---|---|
# | replace the wrapper, then make the optimizer | `ShardedWrapper(model)` |
# | call forward and `full_state_dict(model)` on every rank | also in evaluation |
# | divide large models into units | `auto_wrap_policy="auto"`, by class, or by size |
# | see where a step's time goes | `with model.record_steps(): ...`, `print(model.step_report())` |
#
# Next: [transformer.ipynb](transformer.ipynb) compares all strategies on a model with many equal
# units; [memory.ipynb](memory.ipynb) computes memory.
