"""Recorded steps: figures that agree with what really happens, and errors on all ranks."""

import contextlib
import gc
import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from flatshard import ShardedWrapper, collectives, sharded_modules
from flatshard.collectives import Event
from flatshard.engine.events import Kind, StepExtension
from flatshard.extras.recording.step_report import Range, StepReport
from flatshard.module.wrappers import handles_in
from flatshard.options.extras import EXTRAS
from tests.harness import allow_warnings, on_ranks
from tests.models import CASES, loss_of
from tests.oracle import assert_identical, snapshot, step_and_zero

THREAD = set(Kind) - {Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.GATHER, Kind.REDUCE}
SLEEP = 0.2


def _step(case: str, model: nn.Module, number: int = 0) -> list[Event]:
    inputs, target = CASES[case].batch(number, 4)
    with collectives.record() as events:
        loss_of(model(inputs), target).backward()
    return events


def _gathered(model: nn.Module) -> int:
    return sum(handle.buffer.untyped_storage().nbytes() for handle in handles_in(model))


@pytest.mark.parametrize("case", ["transformer", "checkpointed"])
@pytest.mark.uncoalesced
@on_ranks(2)
def test_figures(rank: int, world_size: int, case: str) -> None:
    model = CASES[case].wrap()
    _step(case, model)
    seen: list[tuple[int, int]] = []

    def look(*_: object) -> None:
        samples = model._sharded_unit.context.extension("recording")._samples
        seen.append((_gathered(model), samples[-1].gathered_bytes))

    hooks = [module.register_forward_hook(look) for module in model.blocks]
    with model.record_steps() as reports:
        events = [_step(case, model, number) for number in (1, 2)]
        with torch.no_grad():
            with collectives.record() as gathers:
                model(CASES[case].batch(1, 4)[0])
            events.append(gathers)
        with pytest.raises(RuntimeError, match="being recorded already"), model.record_steps():
            raise AssertionError("it is being recorded already")
    for hook in hooks:
        hook.remove()
    assert [report.number for report in reports] == [0, 1, 2]
    for report, listed in zip(reports[:2], events[:2], strict=True):
        _check_bytes(report, listed)
    assert reports[2].moved_bytes == sum(event.nbytes for event in events[2])
    assert seen
    assert all(really == recorded for really, recorded in seen)
    last = reports[1]
    assert last.memory[-1][1:] == (0, 0)
    units = [wrapper._sharded_unit.handles for wrapper in sharded_modules(model)]
    largest = max(sum(one.flat_param.nbytes for one in unit) for unit in units)
    assert last.peak_gradient_bytes >= largest * world_size
    for report in reports:
        busy = sum(one.end - one.begin for one in report.ranges if one.kind in THREAD)
        assert 0 < report.blocked_seconds < busy <= report.seconds
        assert report.other_seconds >= 0
    assert reports[2].backward_seconds == 0
    # Every collective that was begun has ended.
    ended = Counter(one.kind for report in reports for one in report.ranges)
    begun = Counter(event.kind for listed in events for event in listed)
    assert ended[Kind.GATHER] == begun["gather"] > 0
    assert ended[Kind.REDUCE] == begun["reduce"] > 0
    before = _kept()
    _step(case, model)
    assert _kept() == before > 0, "a step that is not recorded leaves records"


def _check_bytes(report: StepReport, listed: list[Event]) -> None:
    assert report.moved_bytes == sum(event.nbytes for event in listed)
    assert [unit.name for unit in report.units][-1] == ""
    moved: Counter[tuple[str, str]] = Counter()
    for event in listed:
        moved[event.kind, event.unit_fqn] += event.nbytes
    for unit in report.units:
        in_both = unit.gathered_forward_bytes + unit.gathered_backward_bytes
        assert in_both == moved["gather", unit.name] > 0
        assert unit.reduced_bytes == moved["reduce", unit.name] > 0
        # All but the root are gathered again.
        assert unit.gathered_backward_bytes == (unit.gathered_forward_bytes if unit.name else 0)
        assert min(unit.forward_seconds, unit.backward_seconds) > 0


def _kept() -> int:
    """Records that are alive."""
    return sum(isinstance(one, Range | StepReport) for one in gc.get_objects())


@pytest.mark.uncoalesced
@on_ranks(2)
def test_times(rank: int, world_size: int) -> None:
    """Waits are no computing, a unit's time is not that of the unit around it, nor the loss's."""
    model = CASES["nested"].wrap()
    _step("nested", model)
    inputs, target = CASES["nested"].batch(0, 4)
    with model.record_steps() as reports:
        with pytest.raises(TypeError):
            model("no tensor")
        failing = model.outer.first.linear.bias.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs).sum().backward()
        failing.remove()

        model.outer.first.linear.register_forward_pre_hook(lambda *_: time.sleep(SLEEP))
        model.outer.shift.register_hook(lambda _: time.sleep(SLEEP))
        time.sleep(SLEEP * rank)
        loss = loss_of(model(inputs), target)
        time.sleep(SLEEP)
        loss.backward()
    units = {unit.name: unit for unit in reports[-1].units}
    assert list(units) == ["outer", "outer.first", "outer.second", ""]
    slept = [units["outer.first"].forward_seconds, units["outer"].backward_seconds]
    assert all(seconds >= SLEEP for seconds in slept)
    # What a unit sleeps is counted once: not for the root, which it is a part of, too.
    longest = max(unit.forward_seconds + unit.backward_seconds for unit in units.values())
    assert longest <= reports[-1].seconds - 2 * SLEEP
    assert reports[-1].other_seconds >= SLEEP
    # After a failure a start waits, too, until the others have taken what was given last.
    starting = sum(unit.starting_seconds for unit in units.values())
    blocked = reports[-1].blocked_seconds + starting
    assert blocked > SLEEP / 2 or rank == 1
    share = 100 * reports[-1].blocked_seconds / reports[-1].seconds
    assert f" ms ({share:.1f} %), " in str(reports[-1])


def test_table() -> None:
    with allow_warnings():
        model = ShardedWrapper(CASES["mlp"].model())
    with model.record_steps() as reports:
        _step("mlp", model)
    report = reports[-1]
    rows = [line.split()[0] for line in str(report).splitlines()]
    times = r"rank 0, step 0: [\d.]+ ms \(forward [\d.]+, backward [\d.]+, other [\d.]+\)"
    assert re.search(times, str(report))
    assert rows == ["unit", "(root)", "total", "rank", "blocked:", "communication", "peak", "peak"]


# ---------------------------------------------------------------- watchers change nothing


EVENTS = {"begin_forward", "end_forward", "after_forward", "begin_backward", "end_backward"}
EVENTS |= {"enter_forward", "leave_forward", "enter_backward", "leave_backward", "on_grad", "span"}


class _Everything(StepExtension):
    """Counts each event."""

    name = list(EXTRAS)[-1]
    watches = True

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            self.heard[name] += 1
        return super().__getattribute__(name)


def _train(case: str, rank: int, strategy: str, watcher: StepExtension | None) -> Any:
    model = CASES[case].wrap(sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with contextlib.ExitStack() as stack:
        if watcher is not None:
            if rank == 0:  # not every rank has to record
                stack.enter_context(model.record_steps())
            stack.enter_context(collectives.record())
            stack.enter_context(torch.profiler.profile(acc_events=True))
            model._sharded_unit.context.extend(watcher)
        for step in range(4):
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                inputs, target = CASES[case].batch(2 * step + rank, 4)
                loss = loss_of(model(inputs), target)
                loss.backward()
            losses.append(loss.item())
            if step != 1:
                model.clip_grad_norm_(0.1)
                step_and_zero(optimizer)
            with torch.no_grad():
                losses.append(loss_of(model(inputs), target).item())
    return losses, snapshot(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("case", ["nested", "checkpointed"])
@on_ranks(2)
def test_nothing_changes(rank: int, world_size: int, case: str, strategy: str) -> None:
    everything = _Everything()
    expected, found = (_train(case, rank, strategy, one) for one in (None, everything))
    assert set(everything.heard) == EVENTS
    assert_identical(found, expected)
