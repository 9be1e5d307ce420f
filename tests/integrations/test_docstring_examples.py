"""Examples of flatshard/integrations in docstrings and docs/frameworks.md run on two ranks."""

import contextlib
import re
from pathlib import Path

import torch
import torch.distributed as dist

from flatshard import sharded_modules
from tests.documents import Fence, examples, fences, surroundings
from tests.harness import ROOT, naming, run_ranks
from tests.integrations import PRELOAD, as_under_torchrun, llama, needs

pytestmark = needs("accelerate", "lightning", "transformers", "trl")
MODULES = sorted((ROOT / "flatshard" / "integrations").glob("*.py"))
DOCSTRINGS = [fence for path in MODULES for fence in examples(path)]
PAGE = [
    fence
    for fence in fences(ROOT / "docs" / "frameworks.md")
    if fence.language == "python" and re.search("import (lightning|Fabric)", fence.text)
]


def _run(rank: int, world_size: int, pieces: list[Fence], folder: str) -> None:
    rows = [{"input_ids": torch.arange(n, n + 8), "labels": torch.arange(8)} for n in range(32)]
    for number, fence in enumerate(pieces):
        own = Path(folder) / str(number)
        own.mkdir(exist_ok=True)
        with contextlib.chdir(own), naming(fence), as_under_torchrun():
            if rank == 0:
                llama().save_pretrained("llama")
            dist.barrier()
            names = surroundings(fence.text, rank)
            names |= {"llama": llama(), "rows": rows}
            exec(compile(fence.text, f"{fence.document}: {fence.heading}", "exec"), names)
            trainer = names.get("trainer", names)
            model = getattr(trainer, "model_wrapped", getattr(trainer, "model", names["model"]))
            assert sharded_modules(model)
        dist.barrier()


def test_every_example_runs(tmp_path: Path) -> None:
    assert {fence.heading for fence in PAGE} == {"Lightning"}
    assert len(DOCSTRINGS) == 6  # an example for each public name
    pieces = [*DOCSTRINGS, *PAGE]
    run_ranks(_run, 2, pieces, str(tmp_path), fresh=True, preload=PRELOAD, timeout=150)
