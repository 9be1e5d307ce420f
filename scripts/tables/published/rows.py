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
# Speed of the forward and of the backward of cuDNN attention, divided by the speed of
# FlashAttention-2, on H100. For heads of 128 elements, the forward is measured in
# pytorch/pytorch#142132 (631 and 329 TFLOP/s), and the backward in arXiv 2407.08608 (figure 6).
# For heads of 64 elements: figures 5 and 6.
CUDNN, CUDNN_64 = (1.9, 1.5), (1.28, 1.28)
# Speed of the forward and of the backward of FlashAttention in Triton, divided by the speed of
# FlashAttention-2, which is 1.3 to 1.5 times and 2 times as fast (arXiv 2307.08691, section 4.1).
TRITON = 1 / 1.4, 1 / 2
# Speed of the forward and of the backward of FlexAttention, divided by the speed of
# FlashAttention-2 (https://pytorch.org/blog/flexattention).
FLEX = 0.9, 0.85
# Mean number of tokens of a document in C4: 2271 bytes (dataset card of allenai/c4), of which about
# 100 are the address and the time. A token has about 4.5 bytes (an estimate).
DOCUMENT = 480
COLUMNS = (
    *("source", "url", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gpus"),
    *("gpu_type", "strategy", "tp", "pp", "cp", "local_batch", "seq_len", "ac", "compile"),
    *("param_dtype", "reduce_dtype", "optimizer", "peak_gib", "tokens_per_s_per_gpu", "notes"),
)
# Pairs: a regular expression that matches the GPU's name in the table, and a key of `DEVICES`.
DEVICE_NAMES = [
    *(("mi300", "mi300x"), ("mi325", "mi325x"), ("mi355", "mi355x"), ("gb200", "gb200")),
    *(("b200", "b200"), ("h200", "h200"), ("h100.*9[456]", "h100-96gb"), ("h100.*80 ?g", "h100")),
    *((r"a[18]00.*\b40 ?g", "a100-40gb"), ("a[18]00", "a100"), ("v100", "v100"), ("l40s", "l40s")),
    *(("4090", "rtx4090"), ("h800", "h100")),
]
# Numbers and dates of torchtitan's pull requests, about one for each week, in the order of the
# numbers. A run has the date of the last entry whose number is not larger than the run's. The dates
# say when a pull request was opened, because most runs were measured then. A few dates are from the
# log of a run.
PULLS = [
    *((101, "2024-03-01"), (124, "2024-03-08"), (148, "2024-03-15"), (157, "2024-03-22")),
    *((165, "2024-03-27"), (181, "2024-04-02"), (215, "2024-04-10"), (248, "2024-04-17")),
    *((265, "2024-04-24"), (289, "2024-05-01"), (315, "2024-05-09"), (338, "2024-05-16")),
    *((355, "2024-06-06"), (364, "2024-06-13"), (382, "2024-07-11"), (384, "2024-06-06")),
    *((395, "2024-06-13"), (436, "2024-07-08"), (464, "2024-07-16"), (481, "2024-07-26")),
    *((504, "2024-08-05"), (516, "2024-08-12"), (533, "2024-08-20"), (549, "2024-08-21")),
    *((563, "2024-08-30"), (569, "2024-09-07"), (576, "2024-09-19"), (589, "2024-09-27")),
    *((592, "2024-10-07"), (618, "2024-10-14"), (634, "2024-10-23"), (642, "2024-10-22")),
    *((643, "2024-10-23"), (663, "2024-10-30"), (672, "2024-11-21"), (705, "2024-12-02")),
    *((720, "2024-12-09"), (738, "2024-12-18"), (767, "2025-01-16"), (794, "2025-01-23")),
    *((804, "2025-01-30"), (817, "2025-02-06"), (838, "2025-02-13"), (863, "2025-02-20")),
    *((895, "2025-02-27"), (938, "2025-03-06"), (957, "2025-03-14"), (1001, "2025-03-21")),
    *((1029, "2025-03-29"), (1060, "2025-04-07"), (1098, "2025-04-14"), (1124, "2025-04-21")),
    *((1148, "2025-04-29"), (1164, "2025-05-06"), (1186, "2025-05-14"), (1211, "2025-05-22")),
    *((1235, "2025-05-29"), (1266, "2025-06-05"), (1287, "2025-06-12"), (1318, "2025-06-22")),
    *((1356, "2025-06-30"), (1371, "2025-07-08"), (1394, "2025-07-15"), (1440, "2025-07-22")),
    *((1481, "2025-07-29"), (1526, "2025-08-05"), (1555, "2025-08-12"), (1596, "2025-08-19")),
    *((1639, "2025-08-27"), (1672, "2025-09-03"), (1690, "2025-09-10"), (1701, "2025-09-12")),
    *((1721, "2025-09-22"), (1763, "2025-09-29"), (1803, "2025-10-08"), (1881, "2025-10-15")),
    *((1928, "2025-10-23"), (1969, "2025-11-01"), (2006, "2025-11-10"), (2048, "2025-11-17")),
    *((2082, "2025-11-24"), (2094, "2025-12-01"), (2123, "2025-12-08"), (2155, "2025-12-15")),
    *((2172, "2025-12-22"), (2185, "2025-12-29"), (2201, "2026-01-06"), (2204, "2026-01-14")),
    *((2267, "2026-01-23"), (2304, "2026-01-30"), (2321, "2026-02-06"), (2377, "2026-02-15")),
    *((2415, "2026-02-23"), (2464, "2026-03-02"), (2522, "2026-03-09"), (2579, "2026-03-17")),
    *((2677, "2026-03-24"), (2761, "2026-03-31"), (2859, "2026-04-07"), (2960, "2026-04-14")),
    *((2969, "2026-04-15"), (2993, "2026-04-16"), (3007, "2026-04-17"), (3023, "2026-04-20")),
    *((3036, "2026-04-21"), (3050, "2026-04-22"), (3062, "2026-04-23"), (3080, "2026-04-24")),
    *((3105, "2026-04-27"), (3129, "2026-04-28"), (3132, "2026-05-01"), (3141, "2026-04-27")),
    *((3148, "2026-04-29"), (3173, "2026-04-30")),
    *((3183, "2026-05-01"), (3203, "2026-05-04"), (3221, "2026-05-05"), (3327, "2026-05-12")),
    *((3395, "2026-05-19"), (3419, "2026-05-27"), (3488, "2026-06-03"), (3598, "2026-06-10")),
    *((3693, "2026-06-17"), (3759, "2026-06-24"), (3848, "2026-07-02"), (3887, "2026-07-10")),
    *((3934, "2026-07-20"), (3984, "2026-07-29"), (4054, "2026-08-05"), (4118, "2026-08-12")),
    *((4217, "2026-08-19"),),
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


def runs_cudnn(device: str, date: str) -> bool:
    """Whether torchtitan's attention was cuDNN's, and not FlashAttention-2.

    torch chose cuDNN attention on Hopper GPUs from 2024-07 to 2024-10. torchtitan has put cuDNN
    first on Blackwell GPUs since 2025-05-14 (pytorch/torchtitan#1196), and on all NVIDIA GPUs
    since 2025-10-09 (pytorch/torchtitan#1776).
    """
    if device.startswith(("b200", "gb200")):
        return date >= "2025-05-14"
    is_hopper = device.startswith("h")
    return is_hopper and ("2024-07" <= date < "2024-11" or "2025-10-09" <= date < "9999")


def is_titan(row: dict[str, str]) -> bool:
    """Whether torchtitan made the run; torchao's training benchmarks run torchtitan."""
    return re.match("torch(titan|ao)", row["source"]) is not None


def runs_flex(row: dict[str, str], date: str) -> bool:
    """Whether attention was FlexAttention, torchtitan's default since pytorch/torchtitan#3571."""
    return "flex" in row["notes"].lower() or "2026-06-09" <= date < "9999"


def attended_share(length: int, block: int = 128) -> float:
    """Return the share of causal attention that FlexAttention computes in torchtitan.

    A token attends to its own document only ("block_causal"), and FlexAttention skips blocks of
    scores that are masked completely. If the lengths of documents are distributed exponentially (an
    estimate), a token attends to ``DOCUMENT`` tokens on average. Blocks at the beginning and at the
    end of a document are computed completely.
    """
    return min(1.0, (DOCUMENT + block) / (length / 2 + block / 2))


def chunks_head(date: str, compiles_step: bool) -> bool:
    """Whether torchtitan computed logits and loss together, for one chunk at a time.

    This is the default since pytorch/torchtitan#2937, and for the graph trainer since
    pytorch/torchtitan#3248.
    """
    return ("2026-06-16" if compiles_step else "2026-04-27") <= date < "9999"


def attention_speeds(
    row: dict[str, str], device: str, date: str, head_size: int
) -> tuple[float, float]:
    """Return the speed of attention's forward and backward, divided by FlashAttention-2's speed."""
    model = row["model"].lower()
    # llm-foundry's tables were made with FlashAttention in Triton. Only some large runs used
    # FlashAttention-2 (`scripts/train/benchmarking/sweep.py` of llm-foundry, 2024-01-06).
    is_large = device == "h100" and int(row["gpus"]) >= 128 and not re.search("13b|30b", model)
    if model.startswith("mpt") and not is_large:
        return TRITON
    if is_titan(row) and runs_flex(row, date):
        share = attended_share(int(row["seq_len"]))
        return FLEX[0] / share, FLEX[1] / share
    if is_titan(row) and runs_cudnn(device, date):
        return CUDNN if head_size > 64 else CUDNN_64
    return 1.0, 1.0


def keeps_attention(device: str, date: str) -> bool:
    """Whether torchtitan's selective checkpointing kept the output of attention.

    Until 2025-12-01 (pytorch/torchtitan#2095), torchtitan's list of saved operators did not contain
    cuDNN attention.
    """
    return not runs_cudnn(device, date) or date >= "2025-12"


def fuses_norms(width: int, date: str) -> bool:
    """Whether RMSNorm is one kernel.

    The configurations of the smaller models chose torchtitan's Triton kernel in April 2024, and a
    compiled RMSNorm in the summer of 2024. torch has had its own kernel since 2.9.
    """
    if "2024-04-05" <= date < "2024-05-02":
        return width < 8192
    return "2024-07-10" <= date < "2024-08-19" or date >= "2025-08-15"


def state_bytes(optimizer: str, itemsize: int) -> float:
    """Return the bytes of an optimizer's state per element. ``itemsize``: bytes of an element."""
    if re.search("8-?bit|int8|fp8", optimizer):
        return 2.0
    if "bf16 states" in optimizer:
        return 4.0
    if re.search("lion|muon|momentum", optimizer):
        return itemsize
    return 0.0 if re.match("sgd|adafactor", optimizer) else 2.0 * itemsize


@dataclass(frozen=True)
class Run:
    """Settings of a published run, read from the row of the run."""

    form: Form
    batch: int
    device: str
    kind: str  # the device, and whether the source states a limit on power
    machine: Machine
    shards: int
    replicas: int
    pipeline_ranks: int
    pipeline_stages: int  # stages per rank
    microbatches: int
    is_compiled: bool
    compiles_step: bool  # whether one graph contains forward and backward
    stored: torch.dtype  # dtype of the shards and of the optimizer's state
    reduce_dtype: torch.dtype
    accumulate: int
    is_fsdp1: bool
    keeps_all: bool
    keeps_last: bool
    overlaps: bool  # whether all-gathers and reductions run at the same time as the computation
    is_foreach: bool
    state_bytes: float  # bytes of the optimizer's state per element
    gathers_float8: bool
    float8_rate: float
    scales_rows: bool  # whether float8 matrices have a scale for each row
    # speed of attention's forward and backward, divided by the speed of FlashAttention-2
    attention_speeds: tuple[float, float]
    hides_tensor_parallel: bool
    copies_on_reduce_stream: bool
    records_streams: bool  # whether tensor parallelism calls ``record_stream``
    expandable_segments: bool
    judges_reserved: bool
    workspace_bytes: int

    @property
    def tokens(self) -> float:
        form = self.form
        per_rank = self.batch * form.length * self.accumulate * self.microbatches
        return per_rank / form.tensor_ranks / form.context_ranks / self.pipeline_ranks


def read_row(row: dict[str, str]) -> Run | str:
    """Return the run of a row, or the reason why the run is not predicted."""
    notes, strategy = row["notes"], row["strategy"]
    words = f"{notes} {row['ac']} {row['param_dtype']}".lower()
    number = {key: int(float(row[key] or 1)) for key in ("tp", "pp", "cp", "gpus", "local_batch")}
    if "offload" in row["ac"].lower():
        return "activations offloaded to the host"
    name = row["gpu_type"].lower()
    device = next((key for pattern, key in DEVICE_NAMES if re.search(pattern, name)), None)
    if device is None and "h100" in name:
        device = "h100-96gb" if is_titan(row) else "h100"
    if device is None:
        return f"unknown GPU {row['gpu_type']}"
    of_titan = is_titan(row)
    date = date_of(row)
    is_gpt = re.match("mpt|gpt-?neo|gpt2$|gpt-", row["model"].lower()) is not None
    # torchtitan's compilers of whole steps do not fuse operators by default: the default backend is
    # `aot_eager`, and "regional inductor" compiles only FlexAttention.
    compiles_step = re.search("graph|simple|toolkit", strategy.lower()) is not None
    is_compiled = row["compile"].strip().lower() == "true" and (
        not compiles_step or re.search("full.inductor|inductor backend", words) is not None
    )
    width, heads = int(row["hidden"]), int(row["heads"])
    is_qwen = "qwen3" in row["model"].lower()
    float8 = re.search("float8|fp8", words) is not None
    float8 = float8 and not re.search(
        "(no|without) (float8|fp8)(?! all)|bf(loat)?16 baseline", words
    )
    ac = row["ac"].lower()
    kind, every = "none", 1
    if re.match("full|true|yes|all|block", ac):
        kind = "full"
    elif "layer" in ac:
        found = re.search(r"\d+", ac)
        kind, every = "layer", int(found[0]) if found else 2
    elif re.search("op|sac|selective", ac):
        kind = "op" if keeps_attention(device, date) else "op without attention"
        if compiles_step and date >= "2026-04-22":  # pytorch/torchtitan#3050
            kind = "op, all products"
    if of_titan and chunks_head(date, compiles_step) and number["pp"] == 1:
        loss = "chunked head"
    elif "chunked" in words or "computed in chunks" in words or "chunks of sequence" in words:
        loss = "chunked"
    elif of_titan and is_compiled and compiles_loss(date):
        loss = "compiled"
    elif is_gpt or (is_compiled and "whole model" in words):  # MPT's loss is one fused kernel
        loss = "compiled"
    else:
        loss = "in model" if of_titan and date < "2024-10-22" else "after"
        if of_titan and date < "2024-06-07":  # later, logits are freed before backward
            loss = "in model, held"
    layers = -(-int(row["layers"]) // number["pp"])
    form = Form(
        layers=max(layers - layers % every, 1),
        width=width,
        heads=heads,
        kv_heads=int(row["kv_heads"] or heads),
        hidden=int(row["ffn"]),
        vocab=int(row["vocab"]),
        length=int(row["seq_len"]),
        head_size=128 if is_qwen else width // heads,
        is_gpt=is_gpt,
        normalizes_heads=is_qwen,
        gathers_heads=is_qwen and date < "2025-10-14",  # torchtitan#1870 removed the all-gather
        rotates_halves=is_qwen or not of_titan,
        rotates_by_matrices=row["source"].startswith("fms"),
        fuses_norms="fused_rmsnorm" in words or (of_titan and fuses_norms(width, date)),
        tensor_ranks=number["tp"],
        context_ranks=number["cp"],
        checkpoint=kind,
        checkpoint_every=every,
        # Since 2025-08-29 (pytorch/torchtitan#1580). A compiler removes unused operators anyway.
        stops_early=not of_titan or date < "2025-08-29" or is_compiled or compiles_step,
        float8=float8,
        gathers_float8=float8
        and bool(re.search("fp8 all-gather(?! *off)", words))
        and "no fp8 all-gather" not in words,
        saves_float8=float8 and is_compiled and "force_recompute" not in words,
        sends_float8=float8 and number["tp"] > 1 and "rowwise" not in words,
        root_is_split=(of_titan and date >= "2025-07-28")
        or compiles_step
        or "own unit" in words
        or "thunder" in row["source"],
        loss=loss,
    )
    pipeline = number["pp"]
    # torchtitan makes one microbatch for each rank of the pipeline, and two stages per rank in
    # interleaved schedules.
    microbatches = min(pipeline, number["local_batch"])
    link = 50e9
    if found := re.search(r"(\d+) ?gb(?:it)?/?p?s", name):
        link = float(found[1]) / 8 * 1e9
        # A GPU reaches the network through 16 lanes of PCIe: 256 Gbit/s with version 4 (A100), and
        # 512 Gbit/s with version 5. A higher rate is the rate of a node.
        link = link / 8 if float(found[1]) > (256 if device[0] == "a" else 512) else link
    card = DEVICES[device]
    links = {"a100": 300e9, "v100": 150e9, "mi3": 64e9 * 7, "l40s": 32e9, "rtx4090": 32e9}
    links |= {"b200": 900e9, "gb200": 900e9}
    node_link = next((rate for key, rate in links.items() if device.startswith(key)), 450e9)
    machine = Machine(card, per_node=8, node_link=0.8 * node_link, link=0.8 * link)
    # Number of ranks that share one copy of the model.
    shards, ranks = number["gpus"] // number["tp"] // pipeline, 0
    if re.search("hsdp|hybrid", strategy.lower()):
        ranks, shards = shards, min(shards, max(1, 8 // number["tp"]))
    elif re.search(r"\bddp\b|no_shard|replicat", strategy.lower()):
        ranks, shards = shards, 1
    pure = "pure" in row["param_dtype"].lower() or row["param_dtype"].strip() == "bf16"
    found = re.search(r"(?:grad\w*[ _]accum\w*|accumulation steps)(?: steps)?[ =:of]*(\d+)", words)
    # With a pipeline, torchtitan reshards only after the last microbatch.
    keeps_all = re.search("zero-?2|shard_grad_op", strategy.lower()) is not None or pipeline > 1
    keeps_all = keeps_all or re.search(r"after_forward\W*(never|false)", words) is not None
    # For some days, the graph trainer saved all all-gathers for backward (pytorch/torchtitan#3060
    # and #3056).
    keeps_all = keeps_all or (compiles_step and "2026-04-23" <= date < "2026-04-28")
    return Run(
        form,
        number["local_batch"] // microbatches,
        device,
        f"{device} with limited power"
        if re.search(r"power limited|\b\d{3} ?w\b", name)
        else device,
        machine,
        shards=shards,
        replicas=max(1, ranks // shards),
        pipeline_ranks=pipeline,
        pipeline_stages=2 if "interleaved" in f"{words} {strategy}".lower() else 1,
        microbatches=microbatches,
        is_compiled=is_compiled,
        compiles_step=compiles_step,
        stored=torch.bfloat16 if pure else torch.float32,
        reduce_dtype=torch.bfloat16 if "bf16" in row["reduce_dtype"] else torch.float32,
        accumulate=int(found[1]) if found else 1,
        is_fsdp1="fsdp1" in strategy.lower(),
        keeps_all=keeps_all,
        # The graph trainer joined the all-gathers of a block and started them early only if told to
        # do so. Since 2026-04-20, this is the default (pytorch/torchtitan#2934).
        overlaps=re.search("graph.?trainer|toolkit", strategy.lower()) is None
        or date >= "2026-04-20"
        or "bucketing" in words,
        keeps_last=of_titan and not re.search(r"after_forward\W*always", words),
        state_bytes=state_bytes(row["optimizer"].lower(), 2 if pure else 4),
        # torchtitan's AdamW has been fused by default since 2025-02-24.
        is_foreach=(not of_titan or date < "2025-02-24")
        and "fused" not in words.replace("fused=false", "").replace("fused_rmsnorm", "")
        and "fused" not in row["optimizer"].replace("fused=False", ""),
        gathers_float8=form.gathers_float8,
        float8_rate=(FLOAT8_ROWS if "rowwise" in words else FLOAT8) * card.flops,
        scales_rows="rowwise" in words,
        attention_speeds=attention_speeds(row, device, date, form.head_size),
        hides_tensor_parallel=re.search("async[- ]?t(p|ensor)", f"{words} {strategy}".lower())
        is not None
        and re.search("(vanilla|no|without) (async|tp)", words) is None,
        copies_on_reduce_stream=date < "2024-07",
        # torchtitan set TORCH_NCCL_AVOID_RECORD_STREAMS on 2024-04-10, because collectives of
        # tensor parallelism held memory for too long (docs/composability.md in torchtitan).
        records_streams=of_titan and date < "2024-04-10",
        # torch for AMD GPUs has expandable segments since March 2026 (pytorch/pytorch#177974).
        # torchtitan's `run_train.sh` sets expandable segments since the afternoon of 2024-10-22,
        # some hours after the run of pytorch/torchtitan#642. Trainy's runs did not use them: the
        # command on Trainy's page starts torchrun without `run_train.sh`.
        expandable_segments=(
            (of_titan and date > "2024-10-22" and "trainy" not in row["source"].lower())
            or "expandable_segments:true" in words
        )
        and not (device.startswith("mi") and date < "2026-04"),
        judges_reserved="reserved" in words or not re.search("allocated|active", words),
        workspace_bytes=(32 << 20) if device[0] in "hgb" else (8 << 20) + (128 << 10),
    )
