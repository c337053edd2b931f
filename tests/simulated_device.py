"""A device for tests whose work runs later: streams are queues over host memory, and work is checked when it runs.

On a GPU a page that is unmapped, zeroed or handed on too early is rarely caught in the act. Here every order of work
that streams and events allow can happen, and work that meets a page which is gone, or bytes that it does not expect,
fails then and there.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from conftest import small_driver
from faulty import CALLS, FaultyDriver

from vmmkv.driver.table import NOT_READY


class Stream:
    """Work in order. `device` is what a `torch.cuda.Stream` says it is on, `cuda_stream` its handle."""

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name
        self.cuda_stream = next(_handles)
        self.queue: deque[Callable[[], bool]] = deque()
        self.submitted = self.done = 0

    def submit(self, work: Callable[[], bool | None]) -> None:
        """Adds work; it returns False where it has to wait, and is asked again later."""
        self.queue.append(work)  # type: ignore[arg-type]
        self.submitted += 1

    def __hash__(self) -> int:
        """Sets of streams are in the same order in each run."""
        return int.from_bytes(self.name.encode())

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


_handles = itertools.count(1000)


class NotReady(Exception):  # noqa: N818
    """What a query fails with that says no, whatever there is to say."""


@dataclass
class Event:
    """A point in a stream's work, the last that was recorded."""

    stream: Stream | None = None
    position: int = 0

    def is_past(self) -> bool:
        """Whether the stream has come to it."""
        return self.stream is None or self.stream.done >= self.position


class SimulatedDevice(FaultyDriver):
    """A driver whose streams run when `run` is called, or when the host waits. All calls can be made to fail: also
    `record`, `synchronize`, `new_stream`, `query`, `wait` and (of the host) `wait_for`.

    Args:
        random: chooses which stream goes on.
        streams: how many there are.
    """

    memory = 1 << 40
    """Tables of a pool are for all memory of its device, and stay mapped: tests of many pools have little."""
    host: ClassVar[dict[int, int]] = {}
    """By address, bytes of host memory that may be used."""
    calls = (*CALLS, "record", "synchronize", "new_stream", "query", "wait", "wait_for")
    functions = (*CALLS, "make_event", "record", "query", "wait", "wait_for", "deallocate")

    def __init__(self, random: Random, streams: int = 3) -> None:
        super().__init__(small_driver("cpu"))
        self.random = random
        self.streams = [Stream(chr(ord("a") + index)) for index in range(streams)]
        self.current = self.streams[0]
        self.events: list[Event] = []
        self.recorded: list[Stream] = []
        """Streams of all events, in the order in which they were recorded."""

    def memory_info(self) -> tuple[int, int]:
        return self.memory, self.memory

    def current_stream(self) -> Stream:
        return self.current

    def current_handle(self) -> int:
        return self.current.cuda_stream

    def stream_of(self, handle: int) -> Stream:
        """The stream that a call was made for."""
        return next(stream for stream in (self.current, *self.streams) if stream.cuda_stream == handle)

    def _c_make_event(self, out: int, flags: int) -> None:
        self.events.append(Event())
        ctypes.c_int64.from_address(out).value = len(self.events)

    def _c_record(self, event: int, handle: int) -> None:
        self.meet("record")
        stream, recorded = self.stream_of(handle), self.events[event - 1]
        recorded.stream, recorded.position = stream, stream.submitted
        self.recorded.append(stream)

    def _c_query(self, event: int) -> int:
        try:
            self.meet("query")
        except NotReady:
            return NOT_READY
        return 0 if self.events[event - 1].is_past() else NOT_READY

    def _c_wait(self, handle: int, event: int, flags: int) -> None:
        self.meet("wait")
        waited_for = copy(self.events[event - 1])  # as it is now, also when it is recorded again
        self.stream_of(handle).submit(waited_for.is_past)

    def _c_wait_for(self, event: int) -> None:
        self.meet("wait_for")
        self.run_until(self.events[event - 1].is_past)

    def _c_deallocate(self, address: int) -> None:
        """What the host calls to wait for the device."""
        self.synchronize()

    def synchronize(self) -> None:
        self.meet("synchronize")
        self.finish()

    def finish(self) -> None:
        """Does all work, without a call."""
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def _make_fill(self, address: int, nbytes: int, value: int, handle: int) -> None:
        work = lambda: self.touch(address, nbytes, lambda: ctypes.memset(address, value, nbytes))  # noqa: E731
        self.stream_of(handle).submit(work)

    def new_stream(self) -> Stream:
        self.meet("new_stream")
        self.streams.append(Stream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def _make_copy(self, destination: int, source: int, nbytes: int, handle: int) -> None:
        def copy() -> None:
            self.touch(source, nbytes, lambda: None)
            self.touch(destination, nbytes, lambda: ctypes.memmove(destination, source, nbytes))

        self.stream_of(handle).submit(copy)

    def touch(self, address: int, nbytes: int, work: Callable[[], object]) -> None:
        """Does work on memory that must be accessible now: of the device, or else of the host."""
        if not nbytes:  # the address may be the end of a range
            work()
            return
        size = self.inner.page_size
        if not any(start <= address < start + length for start, length in self.ranges.items()):
            last = address + nbytes
            holds = (start <= address and last <= start + length for start, length in self.host.items())
            assert any(holds), "gone from the host, or over two of its allocations"
            work()
            return
        first, last = address // size * size, (address + nbytes - 1) // size * size
        assert self.accessible.issuperset(range(first, last + 1, size)), "work has met a page that is gone"
        work()

    def run(self, steps: int) -> None:
        """Does up to so many pieces of work, of streams at random."""
        for _ in range(steps):
            ready = [stream for stream in self.streams if stream.queue]
            if not ready:
                return
            stream = self.random.choice(ready)
            if stream.queue[0]() is not False:
                done = stream.queue.popleft()
                stream.done += 1
                del done  # only now: whoever ends with it may wait for the device

    def run_until(self, finished: Callable[[], bool]) -> None:
        """What the host does when it waits."""
        while not finished():
            assert any(stream.queue for stream in self.streams), "the host waits for ever"
            self.run(1)
