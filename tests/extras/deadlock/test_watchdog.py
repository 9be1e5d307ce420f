"""A rank that waits long says for whom, before anything times out."""

import _thread
import functools
import multiprocessing
import pickle
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from flatshard import CollectiveError, ShardedWrapper
from flatshard.comm.work import WaitCondition, watched
from flatshard.extras import deadlock
from flatshard.extras.deadlock import detector
from tests.harness import assert_raises, on_ranks
from tests.models import CASES
from tests.outcomes import QUICK, logged
from tests.scripts import run_code

pytestmark = pytest.mark.by_turns


def _part(rank: int, model: ShardedWrapper, inputs: torch.Tensor) -> object:
    """The ranks take different branches."""
    return model.state_dict() if rank == 0 else model(inputs)


def _begin(rank: int) -> tuple[ShardedWrapper, torch.Tensor, list[str]]:
    """A model, this rank's inputs, and the lines that flatshard logs."""
    lines, case = logged(), CASES["mlp"]
    return case.wrap(case.model()), case.batch(rank, 2)[0], lines


@pytest.mark.uncoalesced  # the message names one layer
@on_ranks(3, fresh=True)
def test_long_waits_are_logged(rank: int, world_size: int) -> None:
    deadlock.PATIENCE_SECONDS = 1.0
    model, inputs, lines = _begin(0)
    model(inputs)
    lines.clear()
    if rank == 1:
        time.sleep(2.5)
    model(inputs)
    expected = (
        r"waiting for .*unit 'fc1', rank .*gathering parameters for forward over ranks 0, 1, 2 "
        r"\(rank 1 has not arrived\), at tests/models\.py:.*self\.fc1\(x\)+\. If another rank is "
        r"only slow.*on every rank, not under `if rank == 0:`\."
    )
    if rank != 1:
        (line,) = lines
        assert re.fullmatch(expected, line), line


@on_ranks(2, group_timeout=3.0, fresh=True)
def test_a_rank_with_another_wrapper(rank: int, world_size: int) -> None:
    """After some seconds, the log says so, with this rank's line. Both ranks fail in the end."""
    deadlock.MEETING_SECONDS = 1.0
    lines = logged()
    with pytest.raises(RuntimeError):
        (ShardedWrapper, nn.parallel.DistributedDataParallel)[rank](nn.Linear(3, 3))
    place = r"ShardedWrapper: comparing process groups, rank 0.*test_watchdog\.py:"
    if rank == 0:
        (line,) = lines
        assert re.search(rf"{place}.*uses DistributedDataParallel", line), line


@pytest.mark.parametrize("phases", [1, 2], ids=["forward", "step"])
@pytest.mark.uncoalesced  # the message names one layer
@on_ranks(2, group_timeout=4)
def test_one_rank_runs_more(rank: int, world_size: int, phases: int) -> None:
    """Rank 1 begins another forward, or step, before the last backward, and the ranks part."""
    model, inputs, _ = _begin(0)

    def go_on() -> None:
        for _ in range(rank):
            more = model(inputs).sum()
            if phases == 2:
                more.backward()
        loss.backward()
        model(inputs)

    model(inputs).sum().backward()
    loss = model(inputs).sum()
    expected = rf"unit 'fc\d', rank {rank}: .* for (forward|backward) over ranks 0, 1.* failed"
    assert_raises(CollectiveError, expected, go_on)


ENDLESS = "for one another in different"


def init_by_tcp(rank: int, world_size: int, port: int, timeout: float) -> None:
    """As ``torchrun`` does."""
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", **group)


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@on_ranks(2, init_group=False, fresh=True)
def test_a_new_group_reads_no_old_finding(rank: int, world_size: int, port: int) -> None:
    """After a caught deadlock, a slow rank in a new group with the same store is no deadlock."""
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, limit)
    inputs = CASES["mlp"].batch(rank, 2)[0]
    for is_first in (True, False):
        # Gloo itself may read old addresses in a store, so only flatshard gets the same store.
        apart = dist.PrefixStore(str(is_first), store)
        dist.init_process_group("gloo", store=apart, rank=rank, world_size=2, timeout=limit)
        own = mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=store)
        with own, mock.patch.multiple(detector, **QUICK):
            model = CASES["mlp"].wrap(CASES["mlp"].model())
            model(inputs).sum().backward()
            if is_first:
                assert_raises(CollectiveError, ENDLESS, _part, rank, model, inputs)
            else:
                time.sleep(2 * rank)
                model(inputs).sum().backward()
        del model
        dist.destroy_process_group()


# ---------------------------------------------------------------- the program's own


@on_ranks(3, init_group=False, fresh=True, timeout=100)
def test_own_collectives_that_cannot_end(rank: int, world_size: int, port: int) -> None:
    """`if rank == 0: torch.save(model.state_dict(), ...)` and a barrier are named soon."""
    init_by_tcp(rank, world_size, port, 90)
    lines = logged()
    case = CASES["mlp"]
    inputs, _ = case.batch(rank, 2)
    idle = ThreadPoolExecutor()
    idle.submit(int).result()  # a library's thread, which begins nothing
    for collectives, call, own, group_ranks in (
        ("auto", "state_dict()", "barrier(group)", [0, 1, 2]),
        ("native", "(inputs)", "all_gather_object([None] * 2, 1, group=group)", [0, 1]),
    ):
        model = case.wrap(case.model(), collectives=collectives, process_group=dist.new_group())
        model(inputs).sum().backward()
        group = dist.new_group(group_ranks)
        dist.monitored_barrier()  # counts differently on rank 0
        program = f"model.{call}" if rank == 0 else f"dist.{own}"
        program = program.replace(".(", "(")
        if rank not in group_ranks:
            continue
        start = time.monotonic()
        with mock.patch.multiple(detector, **QUICK), pytest.raises(RuntimeError) as error:
            exec(compile(program, f"train{rank}.py", "exec"), globals() | locals())
        assert time.monotonic() - start < 20
        found = str(error.value) if rank == 0 else "\n".join(lines)
        lines.clear()
        assert ENDLESS in found, found
        what = re.escape(f"torch.distributed.{own.partition('(')[0]}()")
        # One of the ranks in it is enough.
        assert re.search(r"rank 0 in \[.*, at train0.py:1", found), found
        assert re.search(rf"rank ([12]) in \[{what}, at train\1.py:1", found), found
        assert "flatshard.checkpoint.save() on every rank" in found, found
    idle.shutdown()


@on_ranks(2, fresh=True)
def test_different_collectives_at_the_same_position_of_a_group(rank: int, world_size: int) -> None:
    """Each rank has begun as many collectives as the other, so none seems to be missing."""
    _, _, lines = _begin(rank)
    program = "ShardedWrapper(nn.Linear(2, 2))" if rank else "dist.broadcast(torch.ones(2), 0)"
    with mock.patch.multiple(detector, **QUICK), pytest.raises(RuntimeError) as error:
        eval(program)
    found = "\n".join([str(error.value), *lines])
    assert "rank 0 began [gloo:broadcast]; rank 1 began [gloo:all_reduce of 1024" in found, found


@on_ranks(3, fresh=True)
def test_no_alarm_where_the_programs_own_collectives_end(rank: int, world_size: int) -> None:
    """Each begins with waits of ours and of the program's, and ends when a slow rank comes."""
    model, inputs, lines = _begin(rank)
    pair, other = dist.new_group([0, 1]), dist.new_group()
    numbers = torch.ones(1)
    for _ in range(3):  # gloo's public numbers now differ between the ranks
        dist.monitored_barrier()
        if rank != 0:
            (dist.send if rank == 1 else dist.recv)(numbers, 3 - rank)
    model(inputs)

    def slow(seconds: float = 1.2) -> None:
        time.sleep(seconds)

    with mock.patch.multiple(detector, **QUICK):
        # Slow data, from another process, on one rank; the others wait in a barrier.
        if rank == 0:
            with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
                worker = {"num_workers": 1, "multiprocessing_context": "fork"}
                list(DataLoader([1.2], collate_fn=lambda items: slow(items[0]), **worker))
        dist.barrier()
        # A rank in a barrier, one in a forward, and both wait for the third.
        if rank == 0:
            dist.barrier()
        if rank == 1:
            dist.barrier(async_op=True)
        if rank == 2:
            slow()
            dist.barrier()
        model(inputs)
        # A rank in a group without the slow rank's.
        if rank != 2:
            dist.barrier(pair)
        else:
            slow()
        model(inputs)
        # Asynchronous works.
        work = dist.all_reduce(numbers, async_op=True)
        if rank == 1:
            work.wait()
        if rank == 2:
            slow()
        model(inputs)
        work.wait()
        # Messages, and a barrier that looks at each rank.
        if rank == 2:
            slow()
        dist.monitored_barrier()
        if rank != 0:
            if rank == 2:
                slow()
            (dist.send if rank == 1 else dist.recv)(numbers, 3 - rank)
        model(inputs)

        # A second thread comes to the barrier for which the other ranks wait. Before the barrier,
        # the thread computes, and then reads from a DataLoader.
        def read_and_meet() -> None:
            slow()
            list(DataLoader([1.2], collate_fn=lambda items: slow(items[0])))
            dist.barrier(other)

        thread = threading.Thread(target=read_and_meet)
        if rank == 0:
            thread.start()
        else:
            dist.barrier(other)
        model(inputs)
        if rank == 0:
            thread.join()
    assert not lines


@on_ranks(3, fresh=True, group_timeout=4)
def test_a_rank_that_waits_for_an_asynchronous_work_is_named(rank: int, world_size: int) -> None:
    """Nothing raises before the group's timeout, but the log says which rank is not coming."""
    deadlock.PATIENCE_SECONDS = 1.5
    model, inputs, lines = _begin(rank)
    model(inputs)
    with mock.patch.multiple(detector, **QUICK):
        if rank != 0:
            work = dist.barrier(async_op=True)
            with pytest.raises(RuntimeError):
                work.wait()
            assert not lines
            return
        with pytest.raises(CollectiveError):
            model.state_dict()
    (line,) = lines
    silent = r"model\.state_dict\(\)\. No wait is reported by rank 1, 2, which computes"
    assert re.search(rf"tests/extras/deadlock/test_watchdog\.py:.*{silent}", line), line


# ---------------------------------------------------------------- what does not switch it off


class Unreliable:
    """A store that fails at times."""

    def __init__(self, store: Any, failures: int) -> None:
        self.store, self.failures = store, failures

    def __getattr__(self, name: str) -> Any:
        if self.failures:
            self.failures -= 1
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self.store, name)


@on_ranks(2, init_group=False, fresh=True)
def test_an_unreachable_store_delays_no_error(rank: int, world_size: int, port: int) -> None:
    """After the process group's timeout, an error arrives, although it cannot be explained."""
    init_by_tcp(rank, world_size, port, 3)
    model, inputs, _ = _begin(rank)
    model(inputs)
    if rank == 0:
        time.sleep(6)
        return
    # The host of the store was cut from the network: no call returns.
    detector._stores[dist.group.WORLD] = mock.Mock(check=lambda _: time.sleep(600))
    began = time.monotonic()
    assert_raises(CollectiveError, "timeout", model, inputs)
    deadlock._tell("the end of its program")  # returns at once
    assert time.monotonic() - began < 3 + 2 * deadlock._END_SECONDS


@on_ranks(2, init_group=False, fresh=True)
def test_detection_survives_threads_and_failures(rank: int, world_size: int, port: int) -> None:
    """Neither a thread that has ended nor failures of the store switch detection off."""
    init_by_tcp(rank, world_size, port, 30)
    model, inputs, lines = _begin(rank)
    other = threading.Thread(target=model, args=(inputs,))  # evaluates, and ends
    other.start()
    other.join()
    model(inputs)
    store, left = detector._own_store, [2]

    def own_store() -> Any:
        return Unreliable(store(), left.pop() if left else 0)

    store_fails = mock.patch.object(detector, "_own_store", own_store)
    with mock.patch.multiple(detector, **QUICK), store_fails:
        assert_raises(CollectiveError, ENDLESS, _part, rank, model, inputs)
    (line,) = lines
    assert line == "a check for deadlocks failed, and is tried again: Connection reset by peer"


@on_ranks(2, fresh=True, group_timeout=4)
def test_a_second_thread_that_lives_is_said(rank: int, world_size: int) -> None:
    """It may begin what others wait for, so nothing is certain; who waits long says that."""
    deadlock.PATIENCE_SECONDS = 1.5
    model, inputs, lines = _begin(rank)
    is_over = threading.Event()
    other = threading.Thread(target=lambda: (model(inputs), is_over.wait()))
    other.start()
    time.sleep(0.5)
    with mock.patch.multiple(detector, **QUICK), pytest.raises(CollectiveError) as error:
        _part(rank, model, inputs)
    is_over.set()
    other.join()
    assert ENDLESS not in str(error.value)
    assert any("2 threads of this process communicate" in line for line in lines), lines


@pytest.mark.parametrize("place", ["forward", "backward"])
@on_ranks(2)
def test_two_threads_in_one_model_are_refused(rank: int, world_size: int, place: str) -> None:
    """Each rank names both threads, and both end."""
    model, inputs, _ = _begin(rank)
    is_inside = threading.Event()

    def hold(*_: Any) -> None:
        is_inside.set()
        time.sleep(0.5)

    def train() -> None:
        output = model(inputs)
        output.register_hook(hold)
        output.sum().backward()

    if place == "forward":
        model.module.fc2.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1, "other") as pool:
        other = pool.submit(train)
        is_inside.wait()
        expected = "thread 'MainThread' used a model while thread 'other_0' was in a forward"
        assert_raises(CollectiveError, expected, model, inputs)
        assert_raises(CollectiveError, expected, other.result)


def test_a_thread_of_autograd_is_no_second_thread_that_waits() -> None:
    """Waits in an accelerator's own thread for backward are watched as those of its program."""
    begun, over, dog = threading.Event(), threading.Event(), deadlock.Watchdog()

    def backward() -> None:
        threading.current_thread()  # as logging asks for
        with watched("a gradient"):
            begun.set()
            over.wait()

    thread = _thread.start_new_thread(backward, ())  # unknown to `threading`, as autograd's is
    begun.wait()
    dog.look()
    over.set()
    assert thread not in dog._users
    assert any(wait.describe() == "a gradient" for wait in dog._waits)


def test_reports_are_not_pickled() -> None:
    """Whoever reached the store could run code on every rank."""
    need = WaitCondition("group", ("gather", 4), 7, (1, 2), abort=print)
    report = detector._Report(3, 1, "text", need, {"group": {"('gather', 4)": (6, [])}})
    heard = detector._Report.from_json(report.to_json().encode())
    assert heard.need == WaitCondition("group", "('gather', 4)", 7, [1, 2])
    assert detector._missing(need, heard.begun) == detector._missing(heard.need, heard.begun) == 1
    with pytest.raises(ValueError, match=r"decode|Expecting"):
        detector._Report.from_json(pickle.dumps(report.text))


class Counting(dist.HashStore):
    """A store that counts bytes."""

    bytes = 0

    def set(self, key: str, value: str) -> None:
        self.bytes += len(value)
        super().set(key, value)

    def multi_get(self, keys: list[str]) -> list[Any]:
        values: list[Any] = super().multi_get(keys)
        self.bytes += sum(map(len, values))
        return values

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        self.bytes += len(value)
        return super().compare_set(key, expected, value)


def _looks(num_ranks: int, odd: int) -> int:
    """Have one rank wait in the model, and the others in a barrier; the most bytes of a look."""
    store, traffic = Counting(), []
    dogs = [detector.Deadlock() for _ in range(num_ranks)]
    everybody = ", ".join(map(str, range(num_ranks)))
    waits = []
    for rank in range(num_ranks):
        group, kind = ("7", "gather") if rank == odd else ("0", detector.PROGRAM)
        others = tuple({*range(num_ranks)} - {rank})
        text = functools.partial(str, f"the {kind} over {everybody}")
        waits.append(detector.BlockedWait(text, WaitCondition(group, kind, 3, others)))
    with (
        mock.patch.object(detector, "dist") as world,
        mock.patch.multiple(detector, FIRST_LOOK_SECONDS=-9, LOOK_SECONDS=0),
        mock.patch.object(detector, "_own_store", return_value=store),
        mock.patch.object(detector.program, "begun") as begun,
        mock.patch.object(detector.program, "is_member", return_value=True),
    ):
        for rank in [*range(num_ranks)] * 6:
            before, world.get_rank.return_value = store.bytes, rank
            begun.return_value = {"0": (2 if rank == odd else 3, [])}
            dogs[rank].look(waits[rank])
            traffic.append(store.bytes - before)
    for wait in waits:
        assert wait.is_given_up
        assert re.search(rf"{ENDLESS}.* rank {odd} in \[the gather over 0, 1, ", wait.verdict or "")
    return max(traffic)


def test_one_of_many_ranks_is_found_with_traffic_that_does_not_grow() -> None:
    """One of 120 ranks is found, with as many bytes as one of 80."""
    _looks(30, odd=0)
    few, many = _looks(80, odd=40), _looks(120, odd=40)
    assert many == pytest.approx(few, rel=0.1)


LOOKS_AT_THE_END = """
import threading, time
from flatshard.comm.work import History, watched
from flatshard.extras.deadlock import detector

def look(self, wait):
    begun.set()
    time.sleep(0.5)
    print("looked", flush=True)

begun = threading.Event()
detector.LOOK_SECONDS = 0.01
detector.Deadlock.look = look
History("a group", (0, 1), 0, None)
with watched("something"):
    begun.wait()
"""


def test_the_end_of_the_program_waits_for_a_look() -> None:
    """Exit handlers wait until the thread that looks for deadlocks has left gloo."""
    done = run_code(LOOKS_AT_THE_END)
    assert done.status == 0, done
    assert done.out.startswith("looked\n")  # under load the thread may look once more
