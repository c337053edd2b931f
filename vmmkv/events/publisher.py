"""Sends events by ZeroMQ as vLLM's `ZmqEventPublisher` does, so that routers subscribe to either.

A live message is three frames: topic, sequence number (8 bytes, big-endian), batch. Who has missed some sends the first
number that it wants, as 8 bytes behind an empty frame, to the replay endpoint. It is sent what is kept from there on,
an empty frame before each message, and at last a message without topic and batch, whose number is all ones. Up to vLLM
0.23 replayed messages had no frame for the topic.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Sequence
from typing import Self

import zmq

from ..errors import ArgumentError, BudgetError
from . import vllm
from .kinds import Event
from .log import EventLog

INTERVAL = 0.1
"""Seconds after which the thread looks for requests, and whether it is to end, if there are no events."""
BATCH = 256
"""Events in a message, at most."""
LINGER = 1000
"""Milliseconds that messages have to leave, at the end."""
END = b"\xff" * 8


class EventPublisher:
    """Drains a log in a separate thread and sends its events, until the publisher or the log is closed.

    The log is the queue: it bounds what waits to be sent, and producers never wait for the network. A forked child has
    no publisher.

    Attributes:
        endpoint: where events are published, with the port.
        replay_endpoint: where messages are sent again, with the port; None if nowhere.
    """

    def __init__(
        self,
        log: EventLog,
        endpoint: str = "tcp://*:5557",
        *,
        bind: bool = True,
        topic: str = "",
        replay_endpoint: str | None = None,
        max_replay: int = 10_000,
        max_waiting: int = 100_000,
        data_parallel_rank: int = 0,
        arrays: bool = False,
    ) -> None:
        """Opens the endpoints and starts.

        Args:
            log: whose only consumer this is.
            endpoint: where to publish: `tcp://`, with the port `*` for one that is free, or `ipc://`. Each rank needs
                one of its own.
            bind: whether subscribers come to the endpoint; else it is theirs, and this connects to it.
            topic: the first frame, by which subscribers choose.
            replay_endpoint: where to answer those who have missed messages; None: nowhere.
            max_replay: how many messages are kept for them.
            max_waiting: how many messages may wait for a slow subscriber; it misses what is more.
            data_parallel_rank: whose events they are, among several ranks.
            arrays: whether to write events and replays as vLLM did up to 0.23.

        Raises:
            ArgumentError: an endpoint that no other process could reach.
            BudgetError: `max_replay` or `max_waiting` is not positive.
            OSError: an endpoint is in use, or cannot be.
        """
        if max_replay < 1 or max_waiting < 1:
            raise BudgetError(f"max_replay={max_replay}, max_waiting={max_waiting}: both have to be positive")
        self._log, self._topic = log, topic.encode()
        self._rank, self._arrays = data_parallel_rank, arrays
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=max_replay)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vmmkv-events", daemon=True)
        self._context = zmq.Context()
        try:
            self._publishing, self.endpoint = self._open(zmq.PUB, endpoint, max_waiting, bind)
            self._replaying, self.replay_endpoint = None, None
            if replay_endpoint is not None:  # a whole replay fits: a ROUTER throws away what is more
                self._replaying, self.replay_endpoint = self._open(zmq.ROUTER, replay_endpoint, max_replay + 1)
            self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """Sends what is left, waits until it has gone, for a second at most, and gives the endpoints back."""
        self._is_over.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, kind: int, endpoint: str, limit: int, bind: bool = True) -> tuple[zmq.Socket[bytes], str]:
        """A socket with at most so many messages waiting, and its endpoint."""
        port = endpoint.rpartition(":")[2]
        if not endpoint.startswith(("tcp://", "ipc://")) or (port.isdigit() and int(port) > 0xFFFF):
            raise ArgumentError(
                f"endpoint {endpoint!r}: it is tcp://HOST:PORT or ipc://PATH; within a process, drain the log"
            )
        socket = self._context.socket(kind)
        socket.set_hwm(limit)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise OSError(
                error.errno, f"{'binding' if bind else 'connecting to'} {endpoint}: {error.strerror}"
            ) from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        try:
            while not (self._is_over.is_set() or self._log.closed):
                self._publish(self._log.events(INTERVAL, most=BATCH))
                if self._replaying and self._replaying.poll(0):
                    self._replay(self._replaying)
            for _ in range(0, self._log.max_events, BATCH):  # not as long as producers go on
                self._publish(self._log.events(most=BATCH))
        finally:
            self._context.destroy(linger=LINGER)
            atexit.unregister(self.close)

    def _publish(self, events: Sequence[Event]) -> None:
        batch = vllm.encode(events, data_parallel_rank=self._rank, arrays=self._arrays)
        if batch is None:
            return
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._sent.append((number, batch))
        self._publishing.send_multipart((self._topic, number, batch))

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answers one request; what is none is ignored."""
        request = socket.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, _, first = request
        for number, batch in [*((number, batch) for number, batch in self._sent if number >= first), (END, b"")]:
            topic = self._topic if batch else b""
            socket.send_multipart((client, b"", number, batch) if self._arrays else (client, b"", topic, number, batch))
