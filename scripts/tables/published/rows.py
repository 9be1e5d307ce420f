"""``read_row``: reads the settings of a published run from a row of the table.

torchtitan's code changed over time. The rules here contain the dates of these changes, from
torchtitan's history, and a run follows the rules of its date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from flatshard.extras.plan.hardware import DEVICES, Machine
from published.models import Form

# Speed of matrix products in float8, divided by the speed in bfloat16: with one scale per tensor,
# and with one scale per row. The peaks differ by a factor of 2, but kernels reach a smaller
# fraction of the float8 peak.
FLOAT8, FLOAT8_ROWS = 1.56, 1.15
COLUMNS = (
    *("source", "url", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gpus"),
    *("gpu_type", "strategy", "tp", "pp", "cp", "local_batch", "seq_len", "ac", "compile"),
    *("param_dtype", "reduce_dtype", "optimizer", "peak_gib", "tokens_per_s_per_gpu", "notes"),
)
# Pairs: a regular expression that matches the GPU's name in the table, and a key of `DEVICES`.
DEVICE_NAMES = [
    *(("mi300", "mi300x"), ("mi325", "mi325x"), ("mi355", "mi355x"), ("gb200", "gb200")),
    *(("b200", "b200"), ("h200", "h200"), ("h100.*9[456]", "h100-96gb"), ("h100.*80", "h100")),
    *(("a100.*40", "a100-40gb"), ("a100", "a100"), ("v100", "v100"), ("l40s", "l40s")),
]
# Numbers and dates of some of torchtitan's pull requests.
PULLS = [
    *((165, "2024-03-27"), (355, "2024-06-06"), (364, "2024-06-13"), (382, "2024-07-11")),
    *((480, "2024-07-25"), (533, "2024-08-20"), (615, "2024-10-14"), (642, "2024-10-22")),
    *((660, "2024-11-01"), (700, "2024-11-25"), (745, "2024-12-18"), (812, "2025-01-31")),
    *((833, "2025-02-11"), (929, "2025-03-07"), (996, "2025-03-24"), (1033, "2025-04-02")),
    *((1319, "2025-06-20"), (1690, "2025-09-10"), (1884, "2025-10-15")),
]


def date_of(row: dict[str, str]) -> str:
    """Return the date of a run's code, from the source, the pull request's number or the notes."""
    for text in (row["source"], row["url"]):
        if found := re.search(r"20\d\d-?\d\d(-\d\d)?", text):
            date = found[0] if "-" in found[0] else f"{found[0][:4]}-{found[0][4:]}"
            return date if date.count("-") == 2 else f"{date}-31"
    if found := re.search(r"torchtitan.*#(\d+)", row["source"]):
        return max(([d for n, d in PULLS if n <= int(found[1])] or ["2024-03-01"])[-1:])
    found = re.search(r"20\d\d-\d\d(-\d\d)?", row["notes"])
    return (found[0] if found[1] else f"{found[0]}-31") if found else "9999"


def compiles_loss(date: str) -> bool:
    """Whether torchtitan compiled the loss with the blocks.

    Between the two periods, torchtitan did not compile the loss, because of CUDA errors.
    """
    return "2024-10-22" <= date < "2024-12-18" or date >= "2025-04-02"


def keeps_attention(device: str, date: str) -> bool:
    """Whether torchtitan's selective checkpointing kept the output of attention.

    Until 2025-12-01, torchtitan's list of saved operators did not contain cuDNN attention. torch
    chose cuDNN attention on H100 from 2024-07 to 2024-10. torchtitan has chosen cuDNN attention on
    B200 since 2025-05.
    """
    if device.startswith("h"):
        return not "2024-07" <= date < "2024-11"
    return not (device.startswith(("b200", "gb200")) and "2025-05-14" <= date < "2025-12")


@dataclass(frozen=True)
class Run:
    """Settings of a published run, read from the row of the run."""

    form: Form
    batch: int
    device: str
    machine: Machine
    shards: int
    replicas: int
    is_compiled: bool
    stored: torch.dtype  # dtype of the shards and of the optimizer's state
    reduce_dtype: torch.dtype
    accumulate: int
    is_fsdp1: bool
    keeps_all: bool
    keeps_last: bool
    is_foreach: bool
    gathers_float8: bool
    float8_rate: float
    hides_tensor_parallel: bool
    copies_on_reduce_stream: bool
    expandable_segments: bool
    judges_reserved: bool
    workspace_bytes: int

    @property
    def tokens(self) -> float:
        form = self.form
        per_rank = self.batch * form.length * self.accumulate
        return per_rank / form.tensor_ranks / form.context_ranks


def read_row(row: dict[str, str]) -> Run | str:
    """Return the run of a row, or the reason why the run is not predicted."""
    notes, strategy = row["notes"], row["strategy"]
    words = f"{notes} {row['ac']} {row['param_dtype']}".lower()
    number = {key: int(float(row[key] or 1)) for key in ("tp", "pp", "cp", "gpus", "local_batch")}
    if number["pp"] > 1:
        return "pipeline parallelism"
    if "offload" in row["ac"].lower():
        return "activations offloaded to the host"
    if "graph" in strategy.lower():
        return "a compiler of whole training steps"
    name = row["gpu_type"].lower()
    device = next((key for pattern, key in DEVICE_NAMES if re.search(pattern, name)), None)
    if device is None and "h100" in name:
        device = "h100-96gb" if re.match("torch(titan|ao)", row["source"]) else "h100"
    if device is None:
        return f"unknown GPU {row['gpu_type']}"
    is_titan = re.match("torch(titan|ao)", row["source"]) is not None
    date = date_of(row)
    is_gpt = re.match("mpt|gpt-?neo|gpt2$|gpt-", row["model"].lower()) is not None
    is_compiled = row["compile"].strip().lower() == "true"
    width, heads = int(row["hidden"]), int(row["heads"])
    is_qwen = "qwen3" in row["model"].lower()
    float8 = "float8" in words or "fp8" in words
    ac = row["ac"].lower()
    kind = "none"
    if "layer" in ac:
        kind = "layer"
    elif "op" in ac or "selective" in ac:
        kind = "op" if keeps_attention(device, date) else "op without attention"
    elif ac.startswith("full"):
        kind = "full"
    if "chunked" in words or "computed in chunks" in words or "chunks of sequence" in words:
        loss = "chunked"
    elif is_titan and is_compiled and compiles_loss(date):
        loss = "compiled"
    elif is_gpt or (is_compiled and "whole model" in words):  # MPT's loss is one fused kernel
        loss = "compiled"
    else:
        loss = "in model" if is_titan and date < "2024-10-22" else "after"
        if is_titan and date < "2024-06-07":  # later, logits are freed before backward
            loss = "in model, held"
    form = Form(
        layers=int(row["layers"]),
        width=width,
        heads=heads,
        kv_heads=int(row["kv_heads"] or heads),
        hidden=int(row["ffn"]),
        vocab=int(row["vocab"]),
        length=int(row["seq_len"]),
        head_size=128 if is_qwen else width // heads,
        is_gpt=is_gpt,
        normalizes_heads=is_qwen,
        rotates_halves=is_qwen or not is_titan,
        # RMSNorm is one kernel in torch 2.9 and later. Before, torchtitan had a Triton kernel for
        # some months.
        fuses_norms="fused_rmsnorm" in words
        or (is_titan and (date >= "2025-08-15" or date < "2024-05-31"))
        or (is_titan and "2024-07-10" <= date < "2024-08-19"),
        tensor_ranks=number["tp"],
        context_ranks=number["cp"],
        checkpoint=kind,
        float8=float8,
        root_is_split=(is_titan and date >= "2025-07-28")
        or "own unit" in words
        or "thunder" in row["source"],
        loss=loss,
    )
    shards = number["gpus"] // number["tp"]
    link = 50e9
    if found := re.search(r"(\d+) ?gb(?:it)?/?p?s", name):
        link = float(found[1]) / 8 * 1e9
        # More than 800 Gbit/s is the rate of a node, not of one GPU.
        link = link / 8 if float(found[1]) > 800 else link
    card = DEVICES[device]
    node_link = {"a100": 300e9, "v100": 150e9, "mi3": 64e9 * 7}.get(device[:4].rstrip("-"), 450e9)
    if device.startswith("a100"):
        node_link = 300e9
    machine = Machine(card, per_node=8, node_link=0.8 * node_link, link=0.8 * link)
    is_hybrid = "hsdp" in strategy.lower() or "hybrid" in strategy.lower()
    pure = "pure" in row["param_dtype"].lower() or row["param_dtype"].strip() == "bf16"
    found = re.search(r"grad accum (\d+)", words)
    keeps_all = "zero-2" in strategy.lower() or "never" in notes
    return Run(
        form,
        number["local_batch"],
        device,
        machine,
        shards=min(shards, 8) if is_hybrid else shards,
        replicas=max(1, shards // 8) if is_hybrid else 1,
        is_compiled=is_compiled,
        stored=torch.bfloat16 if pure else torch.float32,
        reduce_dtype=torch.bfloat16 if "bf16" in row["reduce_dtype"] else torch.float32,
        accumulate=int(found[1]) if found else 1,
        is_fsdp1="fsdp1" in strategy.lower(),
        keeps_all=keeps_all,
        keeps_last=is_titan and "always" not in notes,
        is_foreach="fused" not in words.replace("fused=false", "").replace("fused_rmsnorm", "")
        and "fused" not in row["optimizer"].replace("fused=False", ""),
        gathers_float8=float8
        and bool(re.search("fp8 all-gather(?! *off)", words))
        and "no fp8 all-gather" not in words,
        float8_rate=(FLOAT8_ROWS if "rowwise" in words else FLOAT8) * card.flops,
        hides_tensor_parallel="async tp" in words or "asynctp" in words,
        copies_on_reduce_stream=date < "2024-07",
        expandable_segments=(is_titan and date >= "2024-10-22")
        or "expandable_segments:true" in words,
        judges_reserved="reserved" in words or not re.search("allocated|active", words),
        workspace_bytes=(32 << 20) if device[0] in "hgb" else (8 << 20) + (128 << 10),
    )
