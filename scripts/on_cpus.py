"""Runs a script for NVIDIA GPUs on CPUs, without changing the script.

    flatshard try scripts/on_cpus.py train.py --epochs 1
    torchrun --nproc-per-node 2 scripts/on_cpus.py train.py --epochs 1

Devices named "cuda" are the CPU, NCCL is gloo, and functions that only manage GPUs do nothing.
SyncBatchNorm, which needs a GPU, stays ordinary BatchNorm. Numbers are those of the CPU; times and
memory say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FACTORIES = """tensor as_tensor zeros ones empty full rand randn randint randperm arange linspace
    logspace eye zeros_like ones_like empty_like full_like rand_like randn_like randint_like normal
    tril_indices triu_indices hann_window load Generator"""
METHODS = "to new_zeros new_ones new_empty new_full new_tensor"

# Functions of torch.cuda, and what they return.
CUDA: dict[str, Any] = {
    "current_device": 0,
    "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    "get_device_capability": (8, 0),
    "get_device_name": "CPU",
    "get_device_properties": SimpleNamespace(name="CPU", total_memory=2**34, major=8, minor=0),
    "get_rng_state": torch.zeros(8, dtype=torch.uint8),
    "is_available": True,
    "is_bf16_supported": False,
    "is_current_stream_capturing": False,
    "is_initialized": False,
    "max_memory_allocated": 0,
    "max_memory_cached": 0,
    "max_memory_reserved": 0,
    "memory_allocated": 0,
    "memory_reserved": 0,
}
NOTHING = """_lazy_init empty_cache init manual_seed manual_seed_all reset_max_memory_allocated
    reset_peak_memory_stats seed_all set_device set_rng_state synchronize"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    given = parser.parse_args()
    replace_tensor_functions()
    replace_cuda()
    replace_distributed()
    sys.argv = [given.script, *given.arguments]
    if given.module:
        sys.path[0] = ""
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.script).resolve().parent)
        runpy.run_path(given.script, run_name="__main__")


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])  # x.to(0)
        kwargs = {name: _to_cpu(one) for name, one in kwargs.items() if name != "pin_memory"}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return function(*map(_to_cpu, args), **kwargs)

    return call


def replace_tensor_functions() -> None:
    for owner, names in ((torch, FACTORIES), (torch.Tensor, METHODS), (nn.Module, "to")):
        for name in names.split():
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    for kind in (torch.Tensor, nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    loader: Any = torch.utils.data.DataLoader
    make = loader.__init__
    loader.__init__ = lambda self, *args, **kwargs: make(
        self, *args, **{**kwargs, "pin_memory": False}
    )


def replace_cuda() -> None:
    for name, value in {**dict.fromkeys(NOTHING.split()), **CUDA}.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    event = {"record": None, "synchronize": None, "wait": None, "elapsed_time": 1.0, "query": True}
    event |= {"wait_stream": None, "wait_event": None, "record_event": None}
    functions = {name: lambda *_, _value=value: _value for name, value in event.items()}
    made: Any = torch.cuda
    made.Stream = made.current_stream = lambda *_, **__: SimpleNamespace(**functions)
    made.stream = lambda *_, **__: nullcontext()
    made.Event = lambda *_, **__: SimpleNamespace(**functions)
    optimizer: Any = torch.optim.Optimizer
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(optimizer, name, lambda self: None)  # asks for the stream of a GPU
    profile: Any = torch.autograd.profiler.profile
    make = profile.__init__  # had a keyword `use_cuda` until torch 2.8
    profile.__init__ = lambda self, *args, use_cuda=False, **kwargs: make(self, *args, **kwargs)


def replace_distributed() -> None:
    start: Any = dist.init_process_group

    @functools.wraps(start)
    def init_process_group(_: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs = {n: one for n, one in kwargs.items() if n not in ("backend", "device_id")}
        start("gloo", *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    wrapper: Any = nn.parallel.DistributedDataParallel
    wrap = wrapper.__init__

    def wrap_on_cpu(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **given: Any,
    ) -> None:
        wrap(self, module, None, None, *args, **given)

    # No line of this file is a line of the program.
    wrap_on_cpu.__code__ = wrap_on_cpu.__code__.replace(co_filename="<frozen on_cpus>")
    wrapper.__init__ = wrap_on_cpu
    sync: Any = nn.SyncBatchNorm
    sync.convert_sync_batchnorm = classmethod(lambda _, module, *__: module)


if __name__ == "__main__":
    main()
