"""A device for tests whose work runs later: streams are queues over host memory, and work is checked when it runs.

On a GPU a page that is unmapped, zeroed or handed on too early is rarely caught in the act. Here every order of work
that streams and events allow can happen, and work that meets a page which is gone, or bytes that it does not expect,
fails then and there.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import ClassVar, NamedTuple

import pytest
import torch
from conftest import small_driver
from faulty import CALLS, FaultyDriver


class Stream:
    """Work in order. `device` is what a `torch.cuda.Stream` says it is on."""

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name
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


class NotReady(Exception):  # noqa: N818
    """What a query fails with that says no, whatever there is to say."""


class Event(NamedTuple):
    """A point in a stream's work, of a device that runs it."""

    simulated: SimulatedDevice
    stream: Stream
    position: int

    def is_past(self) -> bool:
        """Whether the stream has come to it."""
        return self.stream.done >= self.position

    def query(self) -> bool:
        try:
            self.simulated.meet("query")
        except NotReady:
            return False
        return self.is_past()

    def synchronize(self) -> None:
        self.simulated.meet("wait_for")
        self.simulated.run_until(self.is_past)

    def wait(self, stream: Stream) -> None:
        self.simulated.meet("wait")
        stream.submit(self.is_past)


class SimulatedDevice(FaultyDriver):
    """A driver whose streams run when `run` is called, or when the host waits. All calls can be made to fail: also
    `record`, `synchronize`, `new_stream`, and an event's `query`, `wait` and (of the host) `wait_for`.

    Args:
        random: chooses which stream goes on.
        streams: how many there are.
    """

    host: ClassVar[dict[int, int]] = {}
    """By address, bytes of host memory that may be used."""
    calls = (*CALLS, "record", "synchronize", "new_stream", "query", "wait", "wait_for")

    def __init__(self, random: Random, streams: int = 3) -> None:
        super().__init__(small_driver("cpu"))
        self.random = random
        self.streams = [Stream(chr(ord("a") + index)) for index in range(streams)]
        self.current = self.streams[0]

    def memory_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def current_stream(self) -> Stream:
        return self.current

    def record(self, stream: Stream) -> Event:
        self.meet("record")
        return Event(self, stream, stream.submitted)

    def synchronize(self) -> None:
        self.meet("synchronize")
        self.finish()

    def finish(self) -> None:
        """Does all work, without a call."""
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def fill(self, address: int, nbytes: int, value: int, stream: Stream) -> None:
        self.meet("fill")
        self._before_fill(address, nbytes, value, stream)
        stream.submit(lambda: self.touch(address, nbytes, lambda: ctypes.memset(address, value, nbytes)))

    def new_stream(self) -> Stream:
        self.meet("new_stream")
        self.streams.append(Stream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        self.meet("copy")

        def copy() -> None:
            self.touch(source, nbytes, lambda: None)
            self.touch(destination, nbytes, lambda: ctypes.memmove(destination, source, nbytes))

        (stream or self.current).submit(copy)

    @contextmanager
    def interrupted_behind_a_copy(self) -> Iterator[None]:
        """Ctrl-C comes as soon as a copy is queued: as the block must let it do."""

        def copy(*arguments: int) -> None:
            SimulatedDevice.copy(self, *arguments)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "copy", copy)
            with pytest.raises(KeyboardInterrupt):
                yield

    def touch(self, address: int, nbytes: int, work: Callable[[], object]) -> None:
        """Does work on memory that must be accessible now: of the device, or else of the host."""
        if not nbytes:  # the address may be the end of a range
            work()
            return
        size = self.inner.page_size
        if not any(start <= address < start + length for start, length in self.ranges.items()):
            assert any(start <= address < start + length for start, length in self.host.items()), "gone from the host"
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
