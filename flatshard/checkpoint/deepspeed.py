"""DeepSpeed's ZeRO folders: fp32 weights in flat partitions, as its ``zero_to_fp32.py`` has them.

stages 1, 2   each group of parameters is one vector, cut into a part per rank
stage 3       each parameter is cut into a part per rank, padded; a rank's parts are one vector
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.checkpoint.torch_files import load_torch


class Pieces(NamedTuple):
    """A tensor that lies in several mapped tensors, row by row, perhaps with padding behind it."""

    shape: tuple[int, ...]
    parts: list[Tensor]

    def read(self) -> Tensor:
        flat = torch.cat([part.reshape(-1) for part in self.parts])
        return flat[: math.prod(self.shape)].view(self.shape)


def find_folder(path: Path) -> Path | None:
    """The folder with the files, of the step that ``latest`` names; None: it is not DeepSpeed's."""
    latest = path / "latest"
    folder = path / latest.read_text().strip() if latest.is_file() else path
    return folder if list(folder.glob("*_model_states.pt")) else None


def find_pieces(folder: Path) -> tuple[dict[str, Pieces], dict[str, str], dict[str, object]]:
    """The weights by name, other names of tied ones, and what else is known.

    Raises:
        ValueError: a file is missing or corrupt; the model was cut by tensor parallelism.
    """
    models = [load_torch(one, "deepspeed") for one in _by_rank(folder, "model")]
    states = [load_torch(one, "deepspeed") for one in _by_rank(folder, "optim")]
    first = models[0]
    if list(folder.glob("*mp_rank_01_*")) or list(folder.glob("*expert*")):
        raise ValueError(f"{folder}: parts of tensor or expert parallelism, which is not known")
    facts = {"DeepSpeed": first["ds_version"], "step": first["global_steps"]}
    ties, whole = first.get("shared_params") or {}, first["module"]
    if not states:  # without ZeRO
        found = {n: Pieces(tuple(t.shape), [t]) for n, t in whole.items() if n not in ties}
        return found, ties, facts | {"world size": first["dp_world_size"]}
    optims = [one["optimizer_state_dict"] for one in states]
    stage, counts = optims[0]["zero_stage"], optims[0]["partition_count"]
    stage = getattr(stage, "args", [stage])[0]
    size = max(counts) if isinstance(counts, list) else counts
    if len(states) != size or (stage == 3 and len(models) != size):
        raise ValueError(f"{folder}: incomplete: expected files of {size} ranks, got {len(states)}")
    names = first["buffer_names"] if stage == 3 else [name for name in whole if name not in ties]
    found = {name: Pieces(tuple(whole[name].shape), [whole[name]]) for name in names}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        found[name] = Pieces(tuple(shape), [one["frozen_param_fragments"][name] for one in models])
    merge = _stage_3 if stage == 3 else _stage_2
    found.update(merge(first["param_shapes"], optims))
    return found, ties, facts | {"ZeRO stage": stage, "world size": size}


def _by_rank(folder: Path, kind: str) -> list[Path]:
    found = folder.glob(f"*_{kind}_states.pt")
    return sorted(found, key=lambda one: [int(n) for n in re.findall(r"\d+", one.name)])


def _stage_2(groups: list[Any], optims: list[Any]) -> Iterator[tuple[str, Pieces]]:
    for number, shapes in enumerate(groups):
        vectors = [one["single_partition_of_fp32_groups"][number] for one in optims]
        paddings = optims[0].get("param_alignment_paddings") or [[0] * len(shapes)] * len(groups)
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings[number], strict=True):
            end = start + math.prod(shape)
            yield name, Pieces(tuple(shape), _cut(vectors, start, end))
            start = end + padding


def _stage_3(groups: list[Any], optims: list[Any]) -> Iterator[tuple[str, Pieces]]:
    start = 0
    for name, shape in (item for shapes in groups for item in shapes.items()):
        end = start + -(-math.prod(shape) // len(optims))
        parts = [part for one in optims for part in _cut(one["fp32_flat_groups"], start, end)]
        yield name, Pieces(tuple(shape), parts)
        start = end


def _cut(vectors: Iterable[Tensor], start: int, end: int) -> list[Tensor]:
    """The elements ``[start, end)`` of the concatenation of these."""
    parts = []
    for one in vectors:
        parts.append(one[max(0, start) : max(0, end)])
        start, end = start - one.numel(), end - one.numel()
    return parts
