"""Collectives of a single process that simulate the collectives of several ranks."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import flatshard.comm.transports.native
from flatshard.comm.work import AsyncWork

SLEEP_CYCLES = 2_000_000  # about a millisecond
LATE_SECONDS = 0.002


def sleep(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


class Queued:
    """Work like NCCL's: `wait` makes the current stream wait, and not the host."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        return self.event.query()


class Threaded:
    """Work on a device without streams: a thread runs it late, and `wait` blocks the host."""

    def __init__(self, thread: ThreadPoolExecutor, work: Callable[[], object]) -> None:
        self._run = thread.submit(self._late, work)

    @staticmethod
    def _late(work: Callable[[], object]) -> None:
        time.sleep(LATE_SECONDS)
        with torch.no_grad():
            work()

    def wait(self) -> None:
        self._run.result()

    def is_completed(self) -> bool:
        return self._run.done()


def under_way(_: object, work: Any, op_name: str, *kept: Tensor, **more: Any) -> AsyncWork:
    """Replaces `NativeTransport._under_way`, which would report fake collectives as finished."""
    return AsyncWork([work], op_name, kept, **more)


class Finished:
    """Work of a collective that has already finished."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class Together:
    """Joins several works into one work."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class SimulatedCollectives:
    """Collectives on a separate stream, over ranks that all have the same data as rank 0."""

    def __init__(self, device: torch.device, slow: bool = False) -> None:
        self.slow = slow
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1)  # one thread runs collectives in order, as a stream
        self.really_reduce = dist.all_reduce

    def queue(self, work: Callable[[], object]) -> Queued | Threaded | Finished:
        if self.stream is None:
            if self.slow:
                return Threaded(self.thread, work)
            work()
            return Finished()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.slow:
                sleep(self.stream.device)
            work()
        if not self.slow:
            torch.cuda.synchronize()
            return Finished()
        return Queued(self.stream)

    def all_gather(
        self, out: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        parts = out.chunk(group.size())
        work = self.queue(lambda: [part.copy_(shard) for part in parts])
        if not async_op:
            work.wait()
        return work

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup, **_: Any) -> Any:
        return self.queue(lambda: out.copy_(whole.chunk(group.size())[0]))

    def all_reduce(self, tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        if not keywords.get("async_op"):
            return self.really_reduce(tensor, *args, **keywords)
        # All ranks have the same data, so the average equals the input. Write it nevertheless, as
        # a real all-reduce does.
        return self.queue(lambda: tensor.mul_(2).div_(2))

    def exchange(self, out: Tensor, whole: Tensor, **keywords: Any) -> Any:
        return self.all_gather(out, whole.chunk(keywords["group"].size())[0], **keywords)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the collectives of torch's fake backend, which move nothing."""
        inside = flatshard.comm.transports.native
        with contextlib.ExitStack() as stack:
            for owner, name, function in (
                (inside, "all_gather_single", self.all_gather),
                (inside, "_reduce_scatter_single", self.reduce_scatter),
                (dist, "all_reduce", self.all_reduce),
                (dist, "all_to_all_single", self.exchange),
                (inside.NativeTransport, "_under_way", under_way),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


class SingleRankCollectives(SimulatedCollectives):
    """Simulates ranks by a backend's real collectives over a group of only this rank."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        group = dist.new_group([0], backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        self.alone, self.device = group, device
        self.gather = flatshard.comm.transports.native.all_gather_single
        self.reduce = flatshard.comm.transports.native._reduce_scatter_single
        # Over one rank, sum and average are equal. gloo has no average.
        self.op = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM

    def all_gather(
        self, out: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if out.device != self.device:  # numbers that ranks exchange on the host
            return super().all_gather(out, shard, group, async_op)
        parts = out.chunk(group.size())
        works = [self.gather(part, shard, group=self.alone, async_op=async_op) for part in parts]
        return self.begun(works) if async_op else None

    def begun(self, works: Sequence[Any]) -> Any:
        together = Together(works)
        if self.stream is None:  # `is_completed` of gloo's works stays False until `wait`
            together.wait()
            return Finished()
        return together

    def reduce_scatter(
        self,
        out: Tensor,
        whole: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
        **_: Any,
    ) -> Any:
        part = whole.chunk(group.size())[0]
        work = self.reduce(out, part, op=self.op, group=self.alone, async_op=async_op)
        return self.begun([work]) if async_op else None

    def all_reduce(self, tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        if not keywords.get("async_op"):
            return self.really_reduce(tensor, *args, **keywords)
        keywords |= {"group": self.alone, "op": self.op}
        return self.begun([self.really_reduce(tensor, *args, **keywords)])
