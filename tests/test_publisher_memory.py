"""What the publisher queues for clients is bounded, however many ask, and however slowly they read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent

import pytest

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
zmq = pytest.importorskip("zmq", reason="needs the extra events")

from vmmkv.events.publisher import MESSAGE_BYTES  # noqa: E402

MIB = 1 << 20
END = b"\xff" * 8
CLIENTS = 60
PUBLISHER = """
    import sys
    import numpy as np
    from itertools import count
    from ring import Ring
    from vmmkv.events import EventLog
    from vmmkv.events.publisher import EventPublisher

    def memory():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    local, log, numbers = "tcp://127.0.0.1:*", EventLog(16), count(1 << 20)
    ring = Ring(log)
    with EventPublisher(log, local, replay_endpoint=local, max_replay_bytes=int(sys.argv[1])) as publisher:
        for line in sys.stdin:
            for _ in range(int(line)):
                ring.store(np.arange(4000) + next(numbers))
            print(memory(), publisher.endpoint, publisher.replay_endpoint, flush=True)
"""


class Publisher:
    """A publisher in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def store(self, events: int) -> tuple[int, str, str]:
        """Appends events of some 20 KB each; returns the memory that the process has, and the endpoints."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{events}\n")
        self._process.stdin.flush()
        memory, endpoint, replay_endpoint = self._process.stdout.readline().split()
        return int(memory), endpoint, replay_endpoint

    def memory(self) -> int:
        return self.store(0)[0]


@contextmanager
def publishing(max_replay_bytes: int) -> Iterator[Publisher]:
    command = [sys.executable, "-c", dedent(PUBLISHER), str(max_replay_bytes)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Publisher(process)
        finally:
            process.kill()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    yield context
    context.destroy(linger=0)


def client(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
    """One that keeps next to nothing that it has not read."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 4096)
    if kind == zmq.SUB:
        socket.subscribe("")
    socket.connect(endpoint)
    return socket


def replayed(socket: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """The numbers and sizes of the messages of a replay."""
    found = []
    while True:
        assert socket.poll(300_000)
        *_, number, batch = socket.recv_multipart()
        if number == END:
            return found
        found.append((int.from_bytes(number, "big"), len(batch)))


def ask(socket: zmq.Socket[bytes], number: int = 0) -> None:
    socket.send_multipart([b"", number.to_bytes(8, "big")])


def published(socket: zmq.Socket[bytes]) -> None:
    """Waits until more was published than is kept, and nothing more comes."""
    last, kept = -1, [(0, 0)]
    while kept[0][0] == 0 or last < kept[-1][0]:
        last = kept[-1][0]
        ask(socket)
        kept = replayed(socket) or [(0, 0)]


def test_many_that_ask_and_do_not_read(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """8 bytes each: for none is more queued than two messages, others are served, and who reads late misses nothing."""
    with publishing(8 * MIB) as publisher:
        _, endpoint, replays = publisher.store(0)
        subscribers = [client(context, endpoint, zmq.SUB) for _ in range(CLIENTS)]
        assert len(subscribers) == CLIENTS
        publisher.store(600)  # 12 MB
        honest = client(context, replays)
        published(honest)
        before = publisher.memory()
        stalled = [client(context, replays) for _ in range(CLIENTS)]
        for _ in range(3):
            for each in stalled:
                ask(each)
        ask(honest)
        kept = replayed(honest)
        publisher.store(10)
        ask(honest, kept[-1][0] + 1)
        replayed(honest)
        grown = publisher.memory() - before
        print(f"{grown / MIB=}")
        assert grown < 16 * MIB, grown / MIB
        numbers, sizes = zip(*kept)
        assert list(numbers) == list(range(numbers[0], numbers[-1] + 1))
        assert numbers[0] > 0
        assert 7 * MIB < sum(sizes) <= 8 * MIB
        assert max(sizes) <= MESSAGE_BYTES
        late = [number for number, _ in replayed(stalled[0])]
        assert set(late) == set(range(min(late), max(late) + 1))
        assert max(late) >= numbers[-1]
