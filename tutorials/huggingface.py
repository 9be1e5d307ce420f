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
# # Shard a Hugging Face model: train it, save it, fine-tune it with LoRA
#
# A model of Hugging Face's `transformers` is an `nn.Module` like any other. This notebook takes the
# Llama architecture, shards it by its layers, trains it in a plain loop, saves files that
# `from_pretrained` reads, and fine-tunes the model with LoRA by `peft`. The weights are random and
# the model is small, so nothing is downloaded. The cells are the same for a model of
# `LlamaForCausalLM.from_pretrained(...)`.
#
# It takes three minutes on two CPU cores. To run it on your machine:
# `pip install -e ".[tutorials]"` in a clone, then open this file with Jupyter.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from flatshard import ShardedWrapper, leave_empty
from flatshard.checkpoint import full_state_dict, load_safetensors, save_safetensors
from flatshard.wrap import ModuleWrapPolicy

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # ranks share the cores
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Ranks
#
# `launch(train)` runs a function on two ranks and returns the result of each rank. The ranks are
# processes that torch's own launcher forks from this notebook; [mnist.ipynb](mnist.ipynb) explains
# the details. Start a program of your own with `torchrun`.

# %%
from helpers import COLOURS, launch

# %% [markdown]
# ## Model and text
#
# The text is Shakespeare if `TEXT_FILE` names the file. Otherwise it is Python's own documentation,
# which comes with Python. A token is a byte, so no tokenizer is needed.

# %%
text_file = Path(os.environ.get("TEXT_FILE", "../data/tinyshakespeare/input.txt"))
if text_file.exists():
    text = text_file.read_bytes()
else:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
print(f"{len(text):,} bytes")

config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
)


def build():
    torch.manual_seed(0)  # the same weights on every rank
    return LlamaForCausalLM(config)


print(f"{sum(parameter.numel() for parameter in build().parameters()):,} parameters")

# %% [markdown]
# ## Wrapping
#
# Each `LlamaDecoderLayer` is a unit. The policy needs only the class of the repeated block, and
# `auto_wrap_policy="auto"` finds that class by itself. flatshard coalesces neighbouring units that
# together have less than 4 MiB, as the report shows.


# %%
def shard(model):
    return ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}))


def ddp(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def units():
    dist.init_process_group("gloo")
    report = str(shard(build()).unit_report())
    dist.destroy_process_group()
    return report


print(launch(units)[0])

# %% [markdown]
# ## Training
#
# The loop is the same as under DistributedDataParallel: each rank computes the loss of its own
# rows. At the end `save_safetensors` writes the model. All ranks call it, and each rank writes the
# bytes of its shards; no rank ever has the whole model. With a `config.json` beside the weights,
# `from_pretrained` can read the folder.
#
# `fused=True` selects the same AdamW kernel for both runs: on a CPU, flatshard chooses the fused
# kernel by itself and torch does not, and the two kernels round differently.

# %%
STEPS, ROWS, LENGTH = 100, 16, 96


def rows_of(text, step):
    """This rank's rows of a step; all ranks' together are the same on any number of ranks."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(
        len(tokens) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step)
    )
    return tokens[starts + torch.arange(LENGTH)][dist.get_rank() :: dist.get_world_size()]


def fit(model, optimizer, text, steps):
    """Trains; returns the loss of each step over all ranks."""
    losses = []
    for step in range(steps):
        rows = rows_of(text, step)
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def pretrain(wrap):
    dist.init_process_group("gloo")
    model = wrap(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = fit(model, optimizer, text, STEPS)
    if wrap is shard:
        save_safetensors(model, folder / "llama")
        if dist.get_rank() == 0:
            config.save_pretrained(folder / "llama")
    dist.destroy_process_group()
    return losses


losses = {"DDP": launch(pretrain, ddp)[0], "flatshard": launch(pretrain, shard)[0]}
apart = max(abs(a - b) for a, b in zip(*losses.values()))
print(f"loss {losses['flatshard'][-1]:.3f}; largest difference from DDP in a step: {apart:.1e}")
print("saved:", ", ".join(sorted(path.name for path in (folder / "llama").iterdir())))

# %% [markdown]
# The curves of both runs coincide:

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(losses["DDP"], color=COLOURS["DDP"], lw=4, alpha=0.6, label="DDP")
axes.plot(losses["flatshard"], color=COLOURS["flatshard"], lw=1, label="flatshard")
axes.set_xlabel("step")
axes.set_ylabel("loss, nats per byte")
axes.set_title("A small Llama, random at first")
axes.legend()
plt.show()

# %% [markdown]
# ## from_pretrained
#
# The notebook's own process is not a rank. It loads the folder as any program of `transformers`
# would. The loss of the loaded model at the beginning of the text is near the loss of the last
# step. A random model gives each of the 256 bytes the same chance, a loss of log(256) = 5.55.

# %%
plain = LlamaForCausalLM.from_pretrained(folder / "llama")
tokens = torch.tensor([list(text[:4096])]).unflatten(1, (-1, 256))[0]
with torch.no_grad():
    print(f"loss of the loaded model: {plain(input_ids=tokens, labels=tokens).loss:.2f}")

# %% [markdown]
# The other direction: build a model that fits on no rank on the meta device, wrap it, and load the
# files. Each rank reads only its shards. flatshard computes the tensors that the files do not
# contain, such as the frequencies of rotary embeddings.


# %%
def load():
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = ShardedWrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        param_init_fn=leave_empty,
        device_id="cpu",  # these ranks are processes on the CPU; on GPUs: the rank's GPU
    )
    load_safetensors(model, folder / "llama")
    rows = torch.arange(16)[None]
    with torch.no_grad():
        logits = model(rows).logits
    dist.destroy_process_group()
    return logits.tolist()


with torch.no_grad():
    expected = plain(torch.arange(16)[None]).logits
apart = (torch.tensor(launch(load)[0]) - expected).abs().max().item()
print(f"logits of the sharded and of the unwrapped model differ by at most {apart:.1e}")

# %% [markdown]
# ## LoRA
#
# `peft` freezes the model and adds small trainable matrices beside its linear layers. Wrap the
# result of `get_peft_model`. Frozen parameters are sharded too, but have no gradients and no
# optimizer state. The text for fine-tuning is the same text in capitals.


# %%
def held_bytes(tensors):
    """What this rank holds of them."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def fine_tune():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(folder / "llama")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = shard(get_peft_model(model, lora))
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = fit(model, optimizer, text.upper(), STEPS)
    states = [value for state in optimizer.state.values() for value in state.values()]
    memory = {
        "this rank's parameters": held_bytes(parameters),
        "gradients": held_bytes(parameter.grad for parameter in trained),
        "optimizer state": held_bytes(states),
    }
    weights = full_state_dict(model)  # on rank 0; all ranks call it
    if dist.get_rank() == 0:
        model.module.save_pretrained(folder / "lora", state_dict=weights)
    dist.destroy_process_group()
    return losses, memory


tuned, memory = launch(fine_tune)[0]
print(f"loss on capitals: {tuned[0]:.3f} at first, {tuned[-1]:.3f} at the end")
for kind, size in memory.items():
    print(f"{kind:24}{size / 2**10:10,.0f} KiB on rank 0")
print("saved:", ", ".join(sorted(path.name for path in (folder / "lora").iterdir())))

# %% [markdown]
# The same bytes as bars. To train all parameters, gradients would need as much memory as the
# parameters, and AdamW's averages twice as much.

# %%
figure, axes = plt.subplots(figsize=(8, 1.6), layout="constrained")
full = memory["this rank's parameters"]
ways = {
    "LoRA, measured": memory,
    "all parameters, computed": {**memory, "gradients": full, "optimizer state": 2 * full},
}
left = [0.0, 0.0]
for kind in memory:
    sizes = [way[kind] / 2**20 for way in ways.values()]
    axes.barh(list(ways), sizes, left=left, color=COLOURS[kind], label=kind)
    left = [before + size for before, size in zip(left, sizes)]
axes.invert_yaxis()
axes.set_xlabel("persistent MiB on each of 2 ranks")
figure.legend(loc="outside upper center", ncols=3)
plt.show()

# %% [markdown]
# `peft` loads the folder as it loads any adapter. The model now writes capitals:


# %%
def capitals(model):
    """Lets the model write 160 bytes; returns the share of capitals among the letters."""
    torch.manual_seed(0)
    start = torch.tensor([list(b"The ")])
    found = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=160,
        do_sample=True,
        pad_token_id=0,
    )
    written = bytes(found[0, 4:].tolist()).decode(errors="replace")
    return sum(map(str.isupper, written)) / max(sum(map(str.isalpha, written)), 1)


before = capitals(plain)
after = capitals(PeftModel.from_pretrained(plain, folder / "lora"))
print(f"Capitals: {100 * before:.0f} % of the letters, and {100 * after:.0f} % with the adapter.")

# %% [markdown]
# ## Trainer, TRL, Accelerate
#
# Programs that have no loop of their own change one line:
#
# ```diff
# -from transformers import Trainer
# +from flatshard.integrations.transformers import FlatshardTrainer as Trainer
# ```
#
# Checkpoints, `save_model`, LoRA adapters, `bf16`, gradient checkpointing and accumulation work as
# usual: see [frameworks](../docs/frameworks.md), which also has Accelerate, TRL and Lightning.
# [Evidence](../docs/evidence.md) lists the architectures of `transformers` that were tried.
