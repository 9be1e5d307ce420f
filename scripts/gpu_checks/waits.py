"""Part `sync`: no operation of a step makes the host wait for the GPU."""

import argparse
import contextlib
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import flatshard
from gpu_checks.places import (
    FAIL,
    FAKE_RANKS,
    NO_GPU,
    PASS,
    SKIP,
    Outcome,
    Place,
    group_without_cpu,
    in_ranks,
    simulate,
)
from gpu_checks.training import SMALL, WARMUP, Stepper


@contextlib.contextmanager
def sync_debug_mode(device: torch.device, mode: str) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def places_of_warnings(containing: str) -> Iterator[list[str]]:
    """Yields a list of the places in the code that warn with this text, each place once."""
    places: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        place = place_of(traceback.extract_stack()[:-1])
        if containing in str(message) and place not in places:
            places.append(place)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield places


def place_of(stack: Iterable[traceback.FrameSummary]) -> str:
    """Innermost line of flatshard in a stack; if there is none, the innermost line."""
    frames = [frame for frame in stack if Path(frame.filename).name != "warnings.py"]
    package = Path(flatshard.__file__).parent
    ours = [frame for frame in frames if package in Path(frame.filename).parents]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def find_syncs(rank: int, device: torch.device, place: Place, simulated: bool) -> list[str]:
    """Places where a step made the host wait: all places that warned, and the place that raised."""
    stepper = Stepper(SMALL, rank, device, group_without_cpu(device) if simulated else None)
    for _ in range(WARMUP + 1):
        stepper.step()
    with (
        sync_debug_mode(device, "warn"),
        places_of_warnings("called a synchronizing") as found,
    ):
        stepper.step()
        stepper.step()
    try:
        with sync_debug_mode(device, "error"):
            stepper.step()
    except RuntimeError as error:
        if "called a synchronizing" not in str(error):
            raise
        found.append(f"raised at {place_of(traceback.extract_tb(error.__traceback__))}")
    return found


def part_sync(place: Place, args: argparse.Namespace) -> Outcome:
    simulated = place.ranks == 1
    if simulated:
        device = torch.device("cuda", 0) if place.is_cuda else torch.device("cpu")
        simulate(device, FAKE_RANKS)
        found, where = find_syncs(0, device, place, True), "collectives that move nothing"
    else:
        found, where = in_ranks(find_syncs, place, False)[0], place.describe()
    if not place.is_cuda:
        return Outcome(SKIP, f"{NO_GPU} for which the host could wait; the steps themselves ran")
    if found:
        return Outcome(FAIL, f"{where}: the host waits at " + "; ".join(found), found)
    return Outcome(PASS, f"{where}: the host waits nowhere in forward, backward, clip and step")
