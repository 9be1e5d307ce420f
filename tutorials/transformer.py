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
# # A transformer, sharded block by block
#
# A decoder-only transformer is an ideal model to shard: it has many equal blocks, one after the
# other. This notebook makes each block a unit, trains in bfloat16 with accumulated and clipped
# gradients, saves, resumes with a different world size, and compares all strategies.
#
# As in [mnist.ipynb](mnist.ipynb), every run starts several processes that execute
# [scripts/train_transformer.py](../scripts/train_transformer.py). The text is Python's own
# documentation, which comes with Python; `--text FILE` takes yours. A token is a byte.

# %%
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Markdown

sys.path.insert(0, "../scripts")
import train_transformer
import training_job

TOY = "TUTORIAL_TOY" in os.environ  # as the tests run it: small, and a few steps
results = Path(tempfile.mkdtemp())


def show(*functions):
    """Displays the source of parts of the program."""
    text = "\n\n".join(inspect.getsource(function) for function in functions)
    return Markdown(f"```python\n{text}```")


def torchrun(world_size, *options):
    """Runs the script on so many ranks; returns what rank 0 printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [f"--nproc-per-node={world_size}", "../scripts/train_transformer.py", *options]
    done = subprocess.run(
        [*launcher, *program],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def log_of(name):
    return [json.loads(line) for line in (results / name).read_text().splitlines()]


# %% [markdown]
# ## Units by class
#
# This is the repeated block. `ModuleWrapPolicy({Block})` makes a unit of each; embeddings, the last
# norm and the head belong to the root.

# %%
show(train_transformer.Block, train_transformer.wrap_model)

# %% [markdown]
# `mixed_precision` sets the dtypes of all-gathers and reduce-scatters. The shards that the
# optimizer updates stay float32:

# %%
train_transformer.BF16

# %% [markdown]
# ## Accumulating and clipping
#
# Under `model.no_sync()` a backward does not communicate; the first backward outside reduces the
# sum. torch's own `clip_grad_norm_` computes the norm of the whole model on every rank.

# %%
show(train_transformer.train_step)

# %% [markdown]
# ## Training and saving
#
# Both state dicts are collective, and hold full tensors by name on rank 0. They do not depend on
# ranks, units or strategies.

# %%
show(training_job.unwrapped, training_job.save, training_job.resume)

# %%
SMALL = ["--width", "32", "--depth", "2", "--batch-size", "12"] if TOY else ["--batch-size", "24"]
HALF, ALL = ("2", "4") if TOY else ("80", "160")
SAMPLE = "8" if TOY else "300"
job = [*SMALL, "--bf16", "--accumulate", "2", "--clip", "1.0"]

files = ["--save", str(results / "half.pt"), "--log-file", str(results / "two.jsonl")]
print(torchrun(2, *job, "--steps", HALF, *files))

# %% [markdown]
# ## Resume with a different world size
#
# The same checkpoint continues on one rank more, which takes its share of every batch. Training
# continues at the right place of the text: batches depend on the seed and the step alone.

# %%
files = ["--resume", str(results / "half.pt"), "--log-file", str(results / "three.jsonl")]
text = torchrun(1 if TOY else 3, *job, "--steps", ALL, "--sample", SAMPLE, *files)
print(text[: text.index("The ")])

# %% [markdown]
# (The test loss is of the last tenth of the text, which is mostly tables: it is the lower one.)
#
# The loss over the steps of both runs: the second one begins where the first one ends.

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for name, label in {"two.jsonl": "2 ranks", "three.jsonl": "resumed on 3 ranks"}.items():
    steps = [line for line in log_of(name) if "loss" in line]
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], label=label)
axes.set_xlabel("step")
axes.set_ylabel("loss, nats per byte")
axes.set_title("Two ranks stop, three ranks resume")
axes.legend()
plt.show()

# %% [markdown]
# The log (`--log-file`) has a line of JSON for each step:

# %%
print(json.dumps(log_of("three.jsonl")[1]))

# %% [markdown]
# This is what the model writes so far. Sampling is collective too, since every forward all-gathers:
# all ranks draw the same bytes.

# %%
print(text[text.index("The ") :])

# %% [markdown]
# ## All strategies
#
# `--compare` trains the same model for a few steps under each strategy. Here it has more blocks,
# and the ranks communicate as over a network (`--collectives sockets`). For the HYBRID strategies
# each two of the four ranks count as a node.

# %%
RANKS = 2 if TOY else 4
SIZES = ["--width", "32", "--depth", "3"] if TOY else ["--width", "256", "--depth", "8"]
STEPS = "2" if TOY else "4"
comparison = results / "comparison.json"
options = ["--compare", "--collectives", "sockets", "--json", str(comparison)]
options += ["--steps", STEPS, "--batch-size", "8", *SIZES]
print(torchrun(RANKS, *options).split("\n\n")[-1])

# %% [markdown]
# *persistent*: parameters, gradients and optimizer state of a rank. *peak*: the same with what is
# unsharded and reduced during a step. *volume*: the communication volume of a step, counted as in
# the ZeRO paper (an all-reduce is a reduce-scatter and an all-gather). Activations are not counted;
# they are the same. All losses agree with DDP's.
#
# The same as bars, one for each strategy: time, memory and communication volume.

# %%
ways = json.loads(comparison.read_text())["ways"]
columns = {
    "ms per step": lambda row: 1000 * row["seconds"],
    "MiB of memory": lambda row: row["between_bytes"] / 2**20,
    "MiB of volume per step": lambda row: row["moved_bytes"] / 2**20,
}
figure, panels = plt.subplots(1, 3, figsize=(10, 4), sharey=True, layout="constrained")
for axes, (title, figure_of) in zip(panels, columns.items()):
    values = [figure_of(row) for row in ways.values()]
    axes.barh(list(ways), values, color="tab:blue", label="persistent")
    if title == "MiB of memory":
        more = [row["peak_bytes"] / 2**20 - held for row, held in zip(ways.values(), values)]
        label = "peak of a step"
        axes.barh(list(ways), more, left=values, color="0.85", hatch="///", label=label)
        axes.set_xlim(right=1.05 * max(row["peak_bytes"] for row in ways.values()) / 2**20)
        handles, labels = axes.get_legend_handles_labels()
    axes.set_title(title, fontsize="medium")
panels[0].invert_yaxis()
figure.legend(handles, labels, loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# What to read from it:
#
# - `FULL_SHARD` has a quarter of DDP's persistent memory. During a step it adds the root and three
#   blocks. Its volume is half as much again, since each block is all-gathered twice.
# - `SHARD_GRAD_OP` keeps blocks unsharded between forward and backward. It has DDP's volume, but
#   the whole model is in memory for a moment. `SHARD_OP` keeps them until the optimizer's step,
#   which helps when gradients accumulate over several micro-batches.
# - bfloat16 halves the all-gathers. Gradients are reduced in float32 here (`reduce_dtype`).
# - The HYBRID strategies hold more and communicate mostly within a node. Four processes on one
#   machine gain nothing from this; clusters with slow links between nodes do.
#
# The times are those of four ranks on few cores, over sockets. On your network they will differ,
# bytes will not: run `python scripts/train_transformer.py --compare`.
#
# Next: [memory.ipynb](memory.ipynb) predicts these bytes without running anything.
