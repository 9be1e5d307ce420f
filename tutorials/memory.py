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
# # How much memory does a model need, and which GPUs does it fit?
#
# How many bytes does training need, and how many of them are on each rank? This notebook computes
# both for models that are far too large for this machine. `flatshard.plan` divides a model as
# `ShardedWrapper` would, and runs one step on tensors that have shapes but no memory. The notebook
# also trains a model that fits, and compares the plan with measurements. The last cell computes the
# plan for your model and your GPUs.
#
# It takes two minutes on two CPU cores. To run it on your machine:
# `pip install -e ".[tutorials]"` in a clone, then open this file with Jupyter.

# %%
import contextlib
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch._dynamo  # DDP needs it: imported here once, and not in each rank
import torch.distributed as dist
import torch.nn.functional as F
from helpers import COLOURS, compare_strategies, launch, train_transformer
from torch import nn

import flatshard
from flatshard import MixedPrecision
from flatshard.wrap import ModuleWrapPolicy

torch.set_num_threads(1)  # ranks share the cores
GB = 1e9
DEPTH = 80  # blocks

# %% [markdown]
# ## Measure a model that fits
#
# A small transformer fits on this machine.
# [scripts/compare_strategies.py](../scripts/compare_strategies.py) trains it for a few steps under
# each strategy. It measures the memory of the shards and the peak of unsharded parameters. The
# ranks are processes that torch's own launcher forks from this notebook;
# [mnist.ipynb](mnist.ipynb) explains the details. They come first, because `flatshard.plan` runs
# autograd, and a process that has run autograd cannot fork ranks.

# %%
RANKS, NODE, SIZES = 4, 2, {"width": 256, "depth": 8}
result = Path(tempfile.mkdtemp()) / "measured.json"


def compare():
    dist.init_process_group("gloo")
    sizes = " ".join(f"--{name} {size}" for name, size in SIZES.items())
    options = f"--steps 2 --collectives sockets --json {result} {sizes}"
    compare_strategies.compare(compare_strategies.parse_args(options.split()), torch.device("cpu"))
    dist.destroy_process_group()


with contextlib.redirect_stdout(None):
    launch(compare, ranks=RANKS)
measured = json.loads(result.read_text())["ways"]

# %% [markdown]
# ## 70 billion parameters
#
# A decoder-only transformer with grouped-query attention and a gated feed-forward layer, in the
# usual sizes of a 70-billion-parameter model. On the meta device the model needs no memory.


# %%
class Block(nn.Module):
    def __init__(self, width, hidden, keys, head=128):
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        layers = (self.query, self.key, self.value)
        qkv = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in layers)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, vocabulary=94_208, width=8192, hidden=28_672, keys=1024, depth=DEPTH):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, keys) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


with torch.device("meta"):
    large = Model()
POLICY = ModuleWrapPolicy({Block, nn.Embedding, nn.Linear})
BLOCKS = ModuleWrapPolicy({Block, nn.Embedding})
psi = sum(parameter.numel() for parameter in large.parameters())
print(f"{psi:,} parameters")


def outcomes(build, **options):
    """Predict one step: an outcome for each number of ranks and each strategy."""
    usual = {"strategy": "FULL_SHARD", "checkpoint": "block", "memory": "1000TB"}
    return [choice.outcome for choice in flatshard.plan(build, **(usual | options)).choices]


# %% [markdown]
# AdamW keeps two averages for each parameter. In float32 that makes 4 bytes for the parameter and 8
# for the averages: **12 bytes per parameter are persistent.** (The same 12 are 2 + 2 + 8: bfloat16
# parameters and gradients beside float32 averages.)

# %%
counts = [1, 8, 16]
for ranks, found in zip(counts, outcomes(Model, ranks=counts, auto_wrap_policy=BLOCKS)):
    stays = found.persistent["parameters"] + found.persistent["optimizer"]
    print(
        f"{ranks:3} devices: {stays / GB:6.1f} GB on each ({stays / psi:.2f} bytes per parameter)"
    )

# %% [markdown]
# No device holds 840 GB. Under DDP 16 devices do not help, because each device holds everything.
# Sharded over 8 devices, each holds 105 GB; over 16 devices, 52.5 GB.
#
# Gradients need another 4 bytes per parameter, sharded in the same way. (`step_in_backward` avoids
# this memory: the optimizer steps each unit as soon as the unit's gradients are reduced.)
#
# ## The stages of ZeRO
#
# The ZeRO paper counts mixed-precision training: 2 bytes for a parameter, 2 for its gradient, and
# K for the optimizer, where K = 12 has float32 master weights and Adam's two averages:
# (2 + 2 + K) Psi in all. Each stage shards more of that over N ranks.
#
# | stage | paper | strategy | persistent memory here |
# |---|---|---|---|
# | 0 | (2 + 2 + K) Psi | `NO_SHARD` | the same |
# | 1 | (2 + 2) Psi + K Psi / N | `SHARD_OP` | 2 Psi + (2 + 2 + K) Psi / N |
# | 2 | 2 Psi + (2 + K) Psi / N | `SHARD_GRAD_OP` | (2 + 2 + K) Psi / N |
# | 3 | (2 + 2 + K) Psi / N | `FULL_SHARD` | (2 + 2 + K) Psi / N |
#
# `SHARD_OP` differs from ZeRO's stage 1: flatshard reduces gradients to shards under every strategy
# except `NO_SHARD`, and keeps the shards of the parameters beside the unsharded parameters.

# %%
K, N = 12, 64
paper = {
    "NO_SHARD": 2 + 2 + K,
    "SHARD_OP": 2 + (2 + 2 + K) / N,
    "SHARD_GRAD_OP": (2 + 2 + K) / N,
    "FULL_SHARD": (2 + 2 + K) / N,
}
found = outcomes(
    lambda: Model().bfloat16(),
    ranks=N,
    strategy=list(paper),
    auto_wrap_policy=POLICY,
    dtype=MixedPrecision(),  # compute in the dtype of the parameters
    optimizer=K,
)
print(f"{N} ranks, GB on each        formula    predicted    peak of a step")
for (strategy, bytes_each), outcome in zip(paper.items(), found):
    kept = outcome.highest["unsharded"] if strategy == "SHARD_OP" else 0
    stays = sum(outcome.persistent.values()) + kept
    print(
        f"{strategy:22}{bytes_each * psi / GB:14.1f}{stays / GB:13.1f}"
        f"{outcome.peak_bytes / GB:16.1f}"
    )

# %% [markdown]
# Stages 2 and 3 have the same persistent memory; their peaks in the last column differ. During a
# step `SHARD_GRAD_OP` unshards the whole model, and `FULL_SHARD` a few units at a time. The peak
# includes activations, here of one row of 2,048 tokens with activation checkpointing.
#
# flatshard's mixed precision needs no second copy of the weights: the float32 shards are the master
# weights, and only unsharded parameters are bfloat16.

# %%
for dtype in ("fp32", "bf16"):
    (found,) = outcomes(Model, ranks=N, auto_wrap_policy=POLICY, dtype=dtype)
    shards, unsharded = sum(found.persistent.values()), found.highest["unsharded"]
    print(f"{dtype}: {shards / GB:.1f} GB of shards, at most {unsharded / GB:.1f} GB unsharded")

# %% [markdown]
# ## More ranks, smaller units
#
# With more ranks, the memory of the shards goes towards zero. The memory of unsharded units does
# not: it is a lower limit, and the wrap policy decides how high the limit is. The plot shows the
# peak memory of a rank over the number of ranks for three policies, with activation checkpointing.
# The dotted line is the persistent memory.

# %%
ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
policies = {
    "one unit": None,
    "a unit per block": BLOCKS,
    "a unit per layer": POLICY,
}
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (label, policy), style in zip(policies.items(), ("o-", "s--", "^-.")):
    found = outcomes(Model, ranks=ranks, auto_wrap_policy=policy)
    peaks = [outcome.peak_bytes / GB for outcome in found]
    axes.loglog(ranks, peaks, style, color=COLOURS["flatshard"], ms=4, label=label)
between = [sum(outcome.persistent.values()) / GB for outcome in found]
axes.loglog(ranks, between, "k:", label="persistent, all policies")
axes.axhline(80, color="0.5", lw=0.8)
axes.text(1, 84, "a device of 80 GB", fontsize=8, color="0.4")
axes.set_xticks(ranks, ranks)
axes.set_xlabel("ranks")
axes.set_ylabel("peak GB on each rank")
axes.set_title("70 billion parameters: smaller units lower the floor")
axes.legend()
plt.show()

# %% [markdown]
# (With *a unit per layer*, each linear layer is a unit inside the unit of its block. The unit of
# the block then has only the parameters of the norms.)
#
# Smaller units lower the peak, but take time: [mnist.ipynb](mnist.ipynb) measures it.
#
# ## Predicted and measured
#
# `flatshard.plan` gets the settings of the transformer that was trained above.


# %%
def build():
    return train_transformer.Transformer(**SIZES, heads=4, context=128)


settings = {
    "ranks": RANKS,
    "per_node": NODE,
    "seq": 128,
    "checkpoint": "none",
    "auto_wrap_policy": ModuleWrapPolicy({train_transformer.Block}),
}
rows = []
for name, found in measured.items():
    way = compare_strategies.WAYS[name]
    (planned,) = outcomes(
        build,
        strategy=way.get("strategy", "NO_SHARD"),  # what DDP is
        dtype="bf16" if way.get("bf16") else "fp32",
        **settings,
    )
    rows.append((name, planned, found))

KINDS = {  # the names of the predictions, and of the measurements
    "this rank's parameters": ("parameters", "parameter_bytes"),
    "optimizer state": ("optimizer", "optimizer_bytes"),
    "gradients": ("gradients", "gradient_bytes"),
}


def pairs(planned, found):
    """Predicted and measured bytes: of shards, and of unsharded parameters at the peak."""
    return (
        (sum(planned.persistent.values()), sum(found[key] for _, key in KINDS.values())),
        (planned.highest.get("unsharded", 0), found["peak_gathered_bytes"]),
    )


print(f"{'KiB on rank 0':20}{'shards':>24}{'peak unsharded':>24}")
print(f"{'':20}" + f"{'predicted':>12}{'measured':>12}" * 2)
for name, *both in rows:
    cells = (f"{one / 1024:12,.0f}{other / 1024:12,.0f}" for one, other in pairs(*both))
    print(f"{name:20}{''.join(cells)}")

# %% [markdown]
# The same as a picture. Bars show the predictions, divided by kind of memory; marks show the
# measurements.

# %%
names = [name for name, *_ in rows]
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
left = [0.0] * len(rows)
for kind in (*KINDS, "unsharded parameters"):
    if kind in KINDS:
        sizes = [planned.persistent[KINDS[kind][0]] / 2**20 for _, planned, _ in rows]
    else:
        sizes = [planned.highest.get("unsharded", 0) / 2**20 for _, planned, _ in rows]
    axes.barh(names, sizes, left=left, color=COLOURS[kind], label=kind)
    left = [before + size for before, size in zip(left, sizes)]
found = [[one for _, one in pairs(planned, found)] for _, planned, found in rows]
for mark, count, label in (("D", 1, "measured, shards"), ("o", 2, "measured, with unsharded")):
    sizes = [sum(both[:count]) / 2**20 for both in found]
    axes.plot(sizes, names, mark, ms=5, mfc="white", mec="black", label=label)
axes.invert_yaxis()
axes.set_xlabel(f"MiB on each of {RANKS} ranks")
axes.set_title("Shards and unsharded parameters are as predicted")
figure.legend(fontsize=8, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# Shards: predicted and measured bytes agree except for AdamW's step counts, a few bytes per
# parameter.
#
# Unsharded parameters: the prediction is the size of the unsharded buffers. It is exact in all
# rows. (Ranks that share memory need less: they map large shards into the buffers instead of
# copying them. The plan leaves this saving out.)
#
# [Predictions on CPUs](../docs/evidence.md#predictions-on-cpus) compares the peak of all tensors.
#
# ## Activations: batch and sequence length
#
# Forward keeps activations for backward. Their size depends on the rows of a rank and the length of
# a row, not on the number of ranks: data parallelism does not shard activations.
# `flatshard.plan` runs a forward and a backward of the large model on fake tensors, and records
# when autograd saves and frees each tensor.


# %%
def activation_bytes(outcome):
    """The most that is kept for backward at any moment of the step."""
    return outcome.highest["activations"]


shapes = ((1, 2048), (1, 4096), (2, 4096), (1, 8192))
steps = {}
for batch, seq in shapes:
    keywords = {"ranks": 64, "batch": batch, "seq": seq, "auto_wrap_policy": POLICY}
    kinds = [outcomes(Model, checkpoint=kind, **keywords) for kind in ("none", "block")]
    steps[batch, seq] = [outcome for (outcome,) in kinds]
print("GB of activations on each rank, in bfloat16")
print(f"{'rows':>4}{'length':>8}{'kept':>10}{'checkpointed':>14}")
for (batch, seq), pair in steps.items():
    kept, few = map(activation_bytes, pair)
    print(f"{batch:4}{seq:8,}{kept / GB:10.1f}{few / GB:14.1f}")

# %% [markdown]
# Activations grow with rows times length. Attention that is computed in tiles (FlashAttention)
# keeps no matrix of length times length, so two rows of 4,096 tokens need as much as one row of
# 8,192. Gradient accumulation allows larger batches in the same memory. Activation checkpointing
# keeps only the inputs of the blocks and computes the other activations again.
#
# The plot shows the memory of a rank at the moment of its peak, for 64 ranks. Each length has two
# bars: without and with activation checkpointing.

# %%
lengths = [2048, 4096, 8192]
kinds = {
    "this rank's parameters": ("parameters",),
    "optimizer state": ("optimizer",),
    "gradients": ("gradients", "reduction", "temporary"),
    "unsharded parameters": ("unsharded",),
    "activations": ("activations",),
}
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for offset, which in zip((-0.2, 0.2), range(2)):
    peaks = [steps[1, length][which].peak for length in lengths]
    places = [index + offset for index in range(len(lengths))]
    low = [0.0] * len(lengths)
    for kind, parts in kinds.items():
        sizes = [sum(peak.get(part, 0) for part in parts) / GB for peak in peaks]
        label = kind if offset < 0 else None
        axes.bar(places, sizes, 0.36, bottom=low, color=COLOURS[kind], label=label)
        low = [before + more for before, more in zip(low, sizes)]
axes.axhline(80, color="0.5", lw=0.8)
axes.text(-0.4, 82, "a device of 80 GB", fontsize=8, color="0.4")
axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
axes.set_xlabel("tokens in a row, one row on each rank (left: kept, right: checkpointed)")
axes.set_ylabel("GB on each of 64 ranks")
axes.set_title("70 billion parameters: memory at the peak")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# (Gradients: with the buffers to reduce gradients, and other temporary tensors.)
#
# ## Your model, your GPUs: what fits?
#
# Set three things: a function that builds your model, the number of GPUs, and the memory of a GPU.
# The plan assumes `auto_wrap_policy="auto"`, computation in bfloat16, and AdamW in float32. If your
# model takes other inputs than tokens, also pass a `step`, which runs a forward and returns the
# loss.

# %%
MODEL = Model  # with transformers: lambda: AutoModelForCausalLM.from_config(config)
GPUS = 32
MEMORY = "80GB"

print(flatshard.plan(MODEL, ranks=GPUS, memory=MEMORY, batch=1, seq=4096))
