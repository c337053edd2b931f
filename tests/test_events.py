"""Events: what a router makes of them, in vLLM's words, is what there is; the log is bounded and wakes whoever
waits; the publisher's frames are vLLM's, and what it queues for clients is bounded, however slowly they read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from conftest import join, run_python
from ring import Ring
from router import read

import vmmkv

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
zmq = pytest.importorskip("zmq", reason="needs the extra events")

from vmmkv.events import Cleared, Event, EventLog, Stored, vllm  # noqa: E402
from vmmkv.events.publisher import MESSAGE_BYTES, EventPublisher  # noqa: E402

MIB = 1 << 20


def test_what_events_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and priorities; priorities are none of vLLM's business. What goes on without a gap is one event."""
    seconds = count(1e9)
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    log, names = EventLog(2), ("salt", 3, None)
    ring = Ring(log)
    first = ring.store(range(5), names=names, priority=80)
    second = ring.store(range(5, 8), first, 5, names, 80)
    third = ring.store([8, 9], second, 8, names, 20)
    high, low = log.events()
    assert isinstance(high, Stored)
    assert high.time == low.time > 1e9
    assert (high.priority, high.blocks.salt, high.blocks.adapter, high.blocks.ids.tolist()) == (
        80,
        "salt",
        3,
        [*range(8)],
    )
    assert (high.blocks.start, high.blocks.parent, low.blocks.start) == (0, None, 8)
    assert (low.priority, low.blocks.parent, low.blocks.ids.tolist()) == (20, high.blocks.hashes[-1], [8, 9])
    for node in (third, second):
        ring.remove(node)
    (removed,) = log.events()
    assert removed.hashes == (*low.blocks.hashes, *high.blocks.hashes[:1:-1])
    assert vllm.encode([]) is None
    batch = read(vllm.encode([high, removed], data_parallel_rank=5))
    assert (batch.ts, batch.data_parallel_rank) == (removed.time, 5)
    assert [(type(each).__name__, each.medium, tuple(each.block_hashes)) for each in batch.events] == [
        ("BlockStored", "GPU", high.blocks.hashes),
        ("BlockRemoved", "GPU", removed.hashes),
    ]
    assert (batch.events[0].lora_id, batch.events[0].lora_name) == (3, "3")


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    log, closed = EventLog(4), EventLog()
    ring = Ring(log)
    ring.store(range(10))
    closed.close()
    for error, call in [
        (vmmkv.LayoutError, lambda: EventLog(0)),
        (vmmkv.ArgumentError, lambda: EventLog(float("nan"))),
        (vmmkv.ArgumentError, lambda: EventLog(max_events="9")),
        (vmmkv.BudgetError, lambda: EventLog(max_events=0)),
        (vmmkv.BudgetError, lambda: log.events(most=0)),
        (vmmkv.ArgumentError, lambda: log.events(most=1.5)),
        (vmmkv.ArgumentError, lambda: log.events(float("nan"))),
        (vmmkv.ArgumentError, lambda: log.events(1e300)),
        (vmmkv.ArgumentError, lambda: log.events(-1)),
        (vmmkv.ArgumentError, log.check_new),
        (vmmkv.ArgumentError, lambda: closed.follow(ring)),
        (vmmkv.ArgumentError, lambda: EventPublisher(log, "inproc://events")),
        (vmmkv.BudgetError, lambda: EventPublisher(log, "tcp://127.0.0.1:*", max_replay=0)),
        (vmmkv.ArgumentError, lambda: EventPublisher(log, "tcp://127.0.0.1:99999")),
        (OSError, lambda: EventPublisher(log, "tcp://127.0.0.1:*", replay_endpoint="tcp://nowhere.invalid:1")),
    ]:
        with pytest.raises(error):
            call()
    assert [type(each) for each in log.events()] == [Stored]


def test_closing_wakes_all_and_keeps_the_rest() -> None:
    log, results = EventLog(1), list[list[Event]]()
    waiting = [threading.Thread(target=lambda: results.append(log.events(timeout=None))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    log.close()
    join(*waiting)
    assert results == [[], [], []]
    log = EventLog(1)
    ring = Ring(log)
    ring.store([1])
    log.close()
    assert log.closed
    stored, cleared = log.events(timeout=None)
    assert (stored.blocks.ids, type(cleared)) == ([1], Cleared)
    ring.store([2])
    assert log.events(timeout=None) == []


def test_a_forked_child_starts_empty() -> None:
    """Also where another thread drained, and where a publisher was at work. And the log itself needs no extra."""
    child = run_python(
        """
        import os, sys, threading
        from vmmkv.events import EventLog
        assert not {"msgspec", "zmq"} & set(sys.modules)
        from vmmkv.events.publisher import EventPublisher
        from ring import Ring
        log, over = EventLog(1, max_events=50), threading.Event()
        ring = Ring(log)
        publisher = EventPublisher(EventLog(1), "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
        def work():
            while not over.is_set():
                ring.store([1, 2, 3])
                log.events(0.001)
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(10):
            pid = os.fork()
            if not pid:
                assert log.events() == log.events(0.01) == [] and log.dropped == 0
                publisher.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        over.set()
        thread.join()
        publisher.close()
        print("all")
        """
    )
    assert child.stdout == "all\n", child.stderr


@pytest.fixture
def sockets() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def request(dealer: zmq.Socket[bytes], first: int) -> None:
    """Asks for a replay from a number on."""
    dealer.send_multipart([b"", first.to_bytes(8, "big")])


def replies(dealer: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages of a replay, the last one included."""
    found: list[list[bytes]] = []
    while not found or found[-1][-2] != b"\xff" * 8:
        assert dealer.poll(300_000)
        empty, *frames = dealer.recv_multipart()
        assert empty == b""
        found.append(frames)
    return found


def ask(dealer: zmq.Socket[bytes], first: int) -> list[list[bytes]]:
    request(dealer, first)
    return replies(dealer)


def store(ring: Ring, tokens: Iterable[int]) -> None:
    for token in tokens:
        ring.store([token])


def tokens_of(batches: Iterable[bytes], arrays: bool = False) -> list[int]:
    every = (event for batch in batches for event in read(batch, arrays).events)
    return [event.token_ids[0] for event in every if type(event).__name__ == "BlockStored"]


@pytest.mark.parametrize("arrays", [False, True])
def test_a_publisher_sends_and_replays(sockets: zmq.Context[zmq.Socket[bytes]], arrays: bool) -> None:
    """Topic, number, batch; whoever comes late asks for what was before; what is left at the end is sent."""
    log = EventLog(1)
    ring = Ring(log)
    local = "tcp://127.0.0.1:*"
    topic = [] if arrays else [b"kv@pod@model"]
    with EventPublisher(
        log, local, topic="kv@pod@model", replay_endpoint=local, arrays=arrays, data_parallel_rank=2
    ) as publisher:
        subscriber, dealer = sockets.socket(zmq.SUB), sockets.socket(zmq.DEALER)
        subscriber.subscribe("kv@pod")
        subscriber.connect(publisher.endpoint)
        assert publisher.replay_endpoint
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", b"what"])  # no request
        tokens = iter(range(10_000))
        while not subscriber.poll(50):  # until the subscription has arrived
            store(ring, [next(tokens)])
        last = next(tokens)
        store(ring, [last])
        live = [subscriber.recv_multipart()]
        while last not in tokens_of((frames[2] for frames in live), arrays):
            live.append(subscriber.recv_multipart())
        *replayed, end = ask(dealer, 0)
        assert end == ([] if arrays else [b""]) + [b"\xff" * 8, b""]
        assert [frames[:-2] for frames in replayed] == [topic] * len(replayed)
        assert [int.from_bytes(frames[-2], "big") for frames in replayed] == list(range(len(replayed)))
        assert [frames[-2:] for frames in replayed[-len(live) :]] == [frames[1:] for frames in live]
        assert {frames[0] for frames in live} == {b"kv@pod@model"}
        seen = tokens_of((frames[-1] for frames in replayed), arrays)
        assert seen == list(range(last + 1))
        assert read(replayed[0][-1], arrays).data_parallel_rank == 2
        assert ask(dealer, len(replayed) - 1) == [replayed[-1], end]
        assert ask(dealer, len(replayed)) == [end]
        store(ring, [70, 71])
    assert subscriber.poll(300_000)
    assert tokens_of([subscriber.recv_multipart()[2]], arrays) == [70, 71]
    store(ring, [72])
    log.close()
    assert any(can_be_opened_again(log) for _ in range(20))
    assert log.events() == []


def can_be_opened_again(log: EventLog) -> bool:
    """Whether a publisher gives its port back, and nobody else on this machine takes it before another is opened."""
    publisher = EventPublisher(log, "tcp://127.0.0.1:*")
    publisher.close()
    try:
        EventPublisher(log, publisher.endpoint).close()
    except OSError:
        return False
    return True


def test_a_publisher_keeps_a_bounded_past_and_says_what_was_dropped(sockets: zmq.Context[zmq.Socket[bytes]]) -> None:
    log = EventLog(1, max_events=2)
    ring = Ring(log)
    store(ring, range(5))
    publisher = EventPublisher(log, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", max_replay=3)
    dealer = sockets.socket(zmq.DEALER)
    assert publisher.replay_endpoint
    dealer.connect(publisher.replay_endpoint)

    def replay(first: int) -> list[list[bytes]]:
        """Once there is something."""
        while not (replayed := ask(dealer, first)[:-1]):
            pass
        return replayed

    ((_, _, batch),) = replay(0)
    assert [type(each).__name__ for each in read(batch).events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
    for token in range(5, 9):
        store(ring, [token])
        assert tokens_of([replay(token - 4)[-1][2]]) == [token]
    assert tokens_of(frames[2] for frames in replay(0)) == [6, 7, 8]
    log.close()
    publisher.close()


CLIENTS = 60


def client(sockets: zmq.Context[zmq.Socket[bytes]], endpoint: str | None, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
    """One that keeps next to nothing that it has not read."""
    socket = sockets.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 4096)
    if kind == zmq.SUB:
        socket.subscribe("")
    socket.connect(endpoint)
    return socket


def memory() -> int:
    """Bytes that this process has, in which the clients are as well."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def numbers(replay: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frames[-2], "big") for frames in replay[:-1]]


def test_many_that_ask_and_do_not_read(sockets: zmq.Context[zmq.Socket[bytes]]) -> None:
    """8 bytes each: for none is more queued than two messages, others are served, and who reads late misses nothing."""
    log, local, first = EventLog(16), "tcp://127.0.0.1:*", count(1 << 20)
    ring = Ring(log)

    def store_large(events: int) -> None:
        """Some 20 KB each."""
        for _ in range(events):
            ring.store(np.arange(4000) + next(first))

    with EventPublisher(log, local, replay_endpoint=local, max_replay_bytes=8 * MIB) as publisher:
        subscribers = [client(sockets, publisher.endpoint, zmq.SUB) for _ in range(CLIENTS)]
        assert len(subscribers) == CLIENTS
        store_large(600)  # 12 MB
        honest, last, kept = client(sockets, publisher.replay_endpoint), -1, [0]
        while kept[0] == 0 or last < kept[-1]:  # until more was published than is kept, and nothing more comes
            last = kept[-1]
            kept = numbers(ask(honest, 0)) or [0]
        before = memory()
        stalled = [client(sockets, publisher.replay_endpoint) for _ in range(CLIENTS)]
        for _ in range(3):
            for each in stalled:
                request(each, 0)
        replay = ask(honest, 0)
        kept, sizes = numbers(replay), [len(frames[-1]) for frames in replay]
        store_large(10)
        ask(honest, kept[-1] + 1)
        assert memory() - before < 32 * MIB  # a replay for each is 480
        assert kept == list(range(kept[0], kept[-1] + 1))
        assert 7 * MIB < sum(sizes) <= 8 * MIB
        assert max(sizes) <= MESSAGE_BYTES
        late = numbers(replies(stalled[0]))
        assert set(late) == set(range(min(late), max(late) + 1))
        assert max(late) >= kept[-1]
