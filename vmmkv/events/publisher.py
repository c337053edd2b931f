"""Sends events by ZeroMQ as vLLM's `ZmqEventPublisher` does, so that routers subscribe to either.

A live message is three frames: topic, sequence number (8 bytes, big-endian), batch. A client that has missed some sends
the first number that it wants, as 8 bytes behind an empty frame, to the replay endpoint. The publisher sends the
messages that are kept from there on, an empty frame before each, and at last a message without topic and batch, with a
number of all ones. Up to vLLM 0.23 replayed messages had no frame for the topic.

Memory is bounded, independent of the clients' requests and of their speed:
 1. A message has at most `MESSAGE_BYTES`, or one event.
 2. Messages that are kept for replays have at most `max_replay_bytes` in all.
 3. A client is sent a message of a replay only when it has read all but the last two.
 4. For each subscriber ZeroMQ queues at most `max_waiting` messages, which subscribers share.
"""

from __future__ import annotations

import atexit
import errno
import threading
from collections.abc import Sequence
from typing import Self

import zmq

from ..errors import ArgumentError, BudgetError
from . import vllm
from .log import Event, EventLog

INTERVAL = 0.1
"""Seconds after which the threads look whether they are to end, if there are no events or requests."""
BATCH = 256
"""Events in a message, at most."""
MESSAGE_BYTES = 64 << 10
"""Bytes of a message with several events, at most."""
REQUEST_BYTES = 4096
"""Bytes of a request or a subscription, at most: ZeroMQ disconnects clients that send more."""
PATIENCE = 50
"""Milliseconds in which a client has to read a replayed message; then others have their turn."""
LINGER = 1000
"""Milliseconds that messages have to leave, at the end."""
END = b"\xff" * 8


class EventPublisher:
    """Drains a log in a separate thread and sends its events, until the publisher or the log is closed. Another thread
    answers requests for replays.

    The log is the queue: it bounds what waits to be sent, and producers never wait for the network. A forked child has
    no publisher.

    Attributes:
        endpoint: where events are published, with the port.
        replay_endpoint: where messages are sent again, with the port; None if nowhere.
    """

    def __init__(
        self,
        log: EventLog,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        bind: bool = True,
        topic: str = "",
        replay_endpoint: str | None = None,
        max_replay: int = 10_000,
        max_replay_bytes: int = 64 << 20,
        max_waiting: int = 1000,
        data_parallel_rank: int = 0,
        arrays: bool = False,
    ) -> None:
        """Opens the endpoints and starts.

        Args:
            log: the log; it has no other consumer.
            endpoint: where to publish: `tcp://`, with the port `*` for one that is free, or `ipc://`. Each rank needs
                one of its own. Events hold the token ids of prompts and answers, unencrypted, for all who can connect:
                `tcp://*:5557`, all interfaces, only where the network is trusted.
            bind: whether subscribers come to the endpoint; else it is theirs, and this connects to it.
            topic: the first frame, by which subscribers choose.
            replay_endpoint: where to answer clients that have missed messages; None: nowhere.
            max_replay: how many messages are kept for them.
            max_replay_bytes: how many bytes these have at most.
            max_waiting: how many messages may wait for a slow subscriber; it misses what is more.
            data_parallel_rank: the rank of the cache, among several.
            arrays: whether to write events and replays as vLLM did up to 0.23.

        Raises:
            ArgumentError: an endpoint that no other process could reach.
            BudgetError: a bound is not positive.
            OSError: an endpoint is in use, or cannot be.
        """
        if min(max_replay, max_replay_bytes, max_waiting) < 1:
            raise BudgetError(
                f"max_replay={max_replay}, max_replay_bytes={max_replay_bytes}, max_waiting={max_waiting}: all have to "
                "be positive"
            )
        self._log, self._topic = log, topic.encode()
        self._rank, self._arrays = data_parallel_rank, arrays
        self._sent: dict[int, bytes] = {}
        self._oldest = self._next = self._sent_bytes = 0  # messages [oldest, next) are in `_sent`
        self._max_replay, self._max_bytes = max_replay, max_replay_bytes
        self._replays: dict[bytes, tuple[int, int]] = {}  # by client the next message, and behind the last one
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vmmkv-events", daemon=True)
        self._context = zmq.Context()
        try:
            self._publishing, self.endpoint = self._open(zmq.PUB, endpoint, max_waiting, bind)
            self._replaying, self.replay_endpoint = None, None
            if replay_endpoint is not None:
                self._replaying, self.replay_endpoint = self._open(zmq.ROUTER, replay_endpoint, 1)
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
        socket.setsockopt(zmq.SNDHWM, limit)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says so where a client is gone, or its queue is full
            socket.setsockopt(zmq.SNDTIMEO, PATIENCE)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise OSError(
                error.errno, f"{'binding' if bind else 'connecting to'} {endpoint}: {error.strerror}"
            ) from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        replays = threading.Thread(target=self._answer, name="vmmkv-replays", daemon=True)
        replays.start()
        try:
            while not (self._is_over.is_set() or self._log.closed):
                self._publish(self._log.events(INTERVAL, most=BATCH))
            for _ in range(0, self._log.max_events, BATCH):  # not as long as producers go on
                self._publish(self._log.events(most=BATCH))
        finally:
            self._is_over.set()
            replays.join()
            self._context.destroy(linger=LINGER)
            atexit.unregister(self.close)

    def _publish(self, events: Sequence[Event]) -> None:
        batch = vllm.encode(events, data_parallel_rank=self._rank, arrays=self._arrays)
        if batch is None:
            return
        if len(batch) > MESSAGE_BYTES and len(events) > 1:
            half = len(events) // 2
            self._publish(events[:half])
            self._publish(events[half:])
            return
        self._keep(batch)
        self._publishing.send_multipart((self._topic, (self._next - 1).to_bytes(8, "big"), batch))

    def _keep(self, batch: bytes) -> None:
        """Keeps a message for replays, instead of the oldest ones where it is too much."""
        self._sent[self._next] = batch
        self._next += 1
        self._sent_bytes += len(batch)
        while len(self._sent) > self._max_replay or self._sent_bytes > self._max_bytes:
            self._sent_bytes -= len(self._sent.pop(self._oldest))
            self._oldest += 1

    # Replays, in a thread of their own.

    def _answer(self) -> None:
        """Answers requests until the publisher ends."""
        socket = self._replaying
        while socket and not self._is_over.is_set():
            if socket.poll(int(INTERVAL * 1000)):
                self._begin(socket.recv_multipart())
            for client in list(self._replays):
                self._go_on(socket, client)

    def _begin(self, request: list[bytes]) -> None:
        """Begins a replay, instead of one that the client has asked for before. What is no request is ignored."""
        if len(request) == 3 and len(request[2]) == 8:
            self._replays[request[0]] = int.from_bytes(request[2], "big"), self._next

    def _go_on(self, socket: zmq.Socket[bytes], client: bytes) -> None:
        """Sends a client what is kept of the messages that it asked for, as long as it reads them."""
        (number, stop), flags = self._replays[client], zmq.NOBLOCK
        try:
            while not self._is_over.is_set():
                number = max(number, self._oldest)
                if number >= stop:
                    socket.send_multipart(self._message(client, b"", END, b""), flags)
                    break
                batch = self._sent.get(number)  # None: it went meanwhile
                if batch is not None:
                    message = self._message(client, self._topic, number.to_bytes(8, "big"), batch)
                    socket.send_multipart(message, flags)
                    flags = zmq.Flag(0)
                number += 1
        except zmq.Again:
            self._replays[client] = number, stop
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:  # it has disconnected
                raise
        del self._replays[client]

    def _message(self, client: bytes, topic: bytes, number: bytes, batch: bytes) -> list[bytes]:
        return [client, b"", *([] if self._arrays else [topic]), number, batch]
