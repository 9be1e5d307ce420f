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
# both for models that are far too large for this machine. `flatshard.memory_plan.predict` plans the
# shards of a model as `ShardedWrapper` would make them, from the shapes of the parameters.
# `flatshard.plan` adds the activations: it runs a step on tensors that have shapes but no memory.
# In between, the notebook trains a model that fits, and compares the plan with measurements. The
# last cell computes the plan for your model and your GPUs.
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
from helpers import COLOURS, PEAK, compare_strategies, launch, train_transformer
from torch import nn

import flatshard
from flatshard import MixedPrecision
from flatshard.memory_plan import predict
from flatshard.wrap import ModuleWrapPolicy

torch.set_num_threads(1)  # ranks share the cores
GB = 1e9
DEPTH = 80  # blocks

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

# %% [markdown]
# AdamW keeps two averages for each parameter. In float32 that makes 4 bytes for the parameter and 8
# for the averages: **12 bytes per parameter are persistent.** (The same 12 are 2 + 2 + 8: bfloat16
# parameters and gradients beside float32 averages.)

# %%
for ranks in (1, 8, 16):
    plan = predict(large, world_size=ranks, auto_wrap_policy=BLOCKS)
    stays = plan.parameter_bytes + plan.optimizer_bytes
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
with torch.device("meta"):
    in_bf16 = Model().bfloat16()
paper = {
    "NO_SHARD": 2 + 2 + K,
    "SHARD_OP": 2 + (2 + 2 + K) / N,
    "SHARD_GRAD_OP": (2 + 2 + K) / N,
    "FULL_SHARD": (2 + 2 + K) / N,
}
print(f"{N} ranks, GB on each        formula    predicted    peak of a step")
for strategy, bytes_each in paper.items():
    plan = predict(
        in_bf16,
        world_size=N,
        auto_wrap_policy=POLICY,
        sharding_strategy=strategy,
        optimizer_bytes=K,
    )
    print(
        f"{strategy:22}{bytes_each * psi / GB:14.1f}{plan.persistent_bytes / GB:13.1f}"
        f"{plan.peak_bytes / GB:16.1f}"
    )

# %% [markdown]
# Stages 2 and 3 have the same persistent memory; their peaks in the last column differ. During a
# step `SHARD_GRAD_OP` unshards the whole model, and `FULL_SHARD` a few units at a time.
#
# flatshard's mixed precision needs no second copy of the weights: the float32 shards are the master
# weights, and only unsharded parameters are bfloat16.

# %%
precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
plan = predict(large, world_size=N, auto_wrap_policy=POLICY, mixed_precision=precision)
print(plan)

# %% [markdown]
# ## More ranks, smaller units
#
# With more ranks, the memory of the shards goes towards zero. The memory of unsharded units does
# not: it is a lower limit, and the wrap policy decides how high the limit is. The plot shows the
# peak memory of a rank over the number of ranks for three policies. The dotted line is the
# persistent memory.

# %%
ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
policies = {
    "one unit": None,
    "a unit per block": BLOCKS,
    "a unit per layer": POLICY,
}
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (label, policy), style in zip(policies.items(), ("o-", "s--", "^-.")):
    keywords = {"auto_wrap_policy": policy, "mixed_precision": precision}
    plans = [predict(large, world_size=n, **keywords) for n in ranks]
    axes.loglog(
        ranks,
        [plan.peak_bytes / GB for plan in plans],
        style,
        color=COLOURS["flatshard"],
        ms=4,
        label=label,
    )
between = [plan.persistent_bytes / GB for plan in plans]
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
# A small transformer fits on this machine.
# [scripts/compare_strategies.py](../scripts/compare_strategies.py) trains it for a few steps under
# each strategy. It measures the memory of all tensors and the peak of unsharded parameters.
# `predict` gets the same keywords. The ranks are processes that torch's own launcher forks from
# this notebook; [mnist.ipynb](mnist.ipynb) explains the details.

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

with torch.device("meta"):
    fits = train_transformer.Transformer(**SIZES, heads=4, context=128)

rows = []
for name, found in measured.items():
    way = compare_strategies.WAYS[name]
    plan = predict(
        fits,
        world_size=RANKS,
        ranks_per_node=NODE,
        auto_wrap_policy=ModuleWrapPolicy({train_transformer.Block}),
        sharding_strategy=way.get("strategy", "NO_SHARD"),  # what DDP is
        mixed_precision=train_transformer.BF16 if way.get("bf16") else None,
        collectives="sockets",
    )
    rows.append((name, plan, found))

print(f"{'KiB on rank 0':20}{'persistent':>24}{'peak unsharded':>24}{'peak of all':>24}")
print(f"{'':20}" + f"{'predicted':>12}{'measured':>12}" * 3)
for name, plan, found in rows:
    pairs = (
        (plan.persistent_bytes, found["between_bytes"]),
        (plan.peak_gathered_bytes, found["peak_gathered_bytes"]),
        (plan.peak_bytes, found["peak_bytes"]),
    )
    cells = "".join(f"{one / 1024:12,.0f}{other / 1024:12,.0f}" for one, other in pairs)
    print(f"{name:20}{cells}")

# %% [markdown]
# Persistent and peak memory as a picture. Bars show the predictions, divided by kind of memory;
# marks show the measurements.

# %%
names = [name for name, *_ in rows]
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
kinds = {
    "this rank's parameters": lambda plan: plan.parameter_bytes,
    "optimizer state": lambda plan: plan.optimizer_bytes,
    "gradients": lambda plan: plan.gradient_bytes,
    "unsharded parameters": lambda plan: (
        plan.persistent_bytes
        - plan.parameter_bytes
        - plan.optimizer_bytes
        - plan.gradient_bytes
        - plan.buffer_bytes
    ),
}
left = [0.0] * len(rows)
for kind, size_of in kinds.items():
    sizes = [size_of(plan) / 2**20 for _, plan, _ in rows]
    axes.barh(names, sizes, left=left, color=COLOURS[kind], label=kind)
    left = [before + size for before, size in zip(left, sizes)]
more = [plan.peak_bytes / 2**20 - at for (_, plan, _), at in zip(rows, left)]
axes.barh(names, more, left=left, label="more in a step", **PEAK)
for mark, key in {"D": "between_bytes", "o": "peak_bytes"}.items():
    sizes = [found[key] / 2**20 for *_, found in rows]
    label = {"D": "measured, persistent", "o": "measured, peak"}[mark]
    axes.plot(sizes, names, mark, ms=5, mfc="white", mec="black", label=label)
axes.invert_yaxis()
axes.set_xlabel(f"MiB on each of {RANKS} ranks")
axes.set_title("Persistent memory is exact, the peak depends on timing")
figure.legend(fontsize=8, loc="outside lower center", ncols=4)
plt.show()

# %%
worst, most = (
    max(abs(found[key] / predicted(plan) - 1) for _, plan, found in rows)
    for key, predicted in (
        ("between_bytes", lambda plan: plan.persistent_bytes),
        ("peak_bytes", lambda plan: plan.peak_bytes),
    )
)
print(f"persistent memory: at most {100 * worst:.2f} % apart; peaks: at most {100 * most:.0f} %")

# %% [markdown]
# Persistent memory: predicted and measured bytes agree except for AdamW's step counts, a few bytes
# per parameter.
#
# Unsharded parameters: the prediction is the size of the unsharded buffers. It is exact in all
# rows but two. Over sockets, a shard of at least 1 MiB is not copied into its unsharded buffer but
# mapped there, which needs no memory. Under `HYBRID_SHARD` and `HYBRID_SHARD_ZERO2` the two ranks
# of a node shard each block, so the shard of a block is that large, and half of each unsharded
# block costs nothing. `predict` leaves this saving out, also for ranks that share memory.
#
# The peak is not exact for the same reason, and because the order in which reductions end depends
# on timing. `predict` leaves activations out; the next section counts them.
#
# ## Activations: batch and sequence length
#
# Forward keeps activations for backward. Their size depends on the rows of a rank and the length of
# a row, not on the number of ranks: data parallelism does not shard activations.
# `flatshard.plan` runs a forward and a backward of the large model on fake tensors, and records
# when autograd saves and frees each tensor.


# %%
def planned(batch, seq, checkpoint):
    """The memory of a step on 64 ranks, in bfloat16."""
    options = {"strategy": "FULL_SHARD", "auto_wrap_policy": POLICY}
    made = flatshard.plan(Model, ranks=64, batch=batch, seq=seq, checkpoint=checkpoint, **options)
    return made.choices[0].outcome


def activation_bytes(outcome):
    """The most that is kept for backward at any moment of the step."""
    return outcome.highest["activations"]


KINDS = ("none", "block")
shapes = ((1, 2048), (1, 4096), (2, 4096), (1, 8192))
outcomes = {shape: [planned(*shape, kind) for kind in KINDS] for shape in shapes}
print("GB of activations on each rank, in bfloat16")
print(f"{'rows':>4}{'length':>8}{'kept':>10}{'checkpointed':>14}")
for (batch, seq), pair in outcomes.items():
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
    peaks = [outcomes[1, length][which].peak for length in lengths]
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
