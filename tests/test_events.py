"""Events: what a router makes of them, in either engine's words, is what there is; the log is bounded and wakes whoever
waits; the publisher's frames are vLLM's."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from router import CreatedData, Dictionary, Difference, Prefix, RemovedData, Router, UpdatedData, read

import vmmkv

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
zmq = pytest.importorskip("zmq", reason="needs the extra events")

from vmmkv.events import Dropped, Event, EventLog, Span, Stored, Updated, tensorrt_llm, vllm  # noqa: E402
from vmmkv.events.publisher import EventPublisher  # noqa: E402


class Cache:
    """A producer, with the plainest books: each span's own tokens and where they lie, and what continues it where."""

    def __init__(self, log: EventLog, keys: list[tuple[str | None, str | int | None]]) -> None:
        self.log = log
        self.keys = {log.root(*key): (key[0], None if key[1] is None else str(key[1])) for key in keys}
        self.parents: dict[Span, Span] = {}
        self.tokens: dict[Span, list[tuple[int, str]]] = {span: [] for span in self.keys}

    def path(self, span: Span, stop: int) -> list[tuple[int, str]]:
        own = self.tokens[span][: stop - span.start]
        return (self.path(self.parents[span], span.start) if span in self.parents else []) + own

    def aligned(self, span: Span, start: int, stop: int) -> list[int]:
        return [token for token, _ in self.path(span, stop)][start - start % self.log.block_size :]

    def store(self, parent: Span, start: int, ids: list[int], tier: str) -> None:
        head = self.aligned(parent, start, start)
        span = self.log.stored(parent, start, head + ids, tier=tier)  # type: ignore[arg-type]
        self.parents[span] = parent
        self.tokens[span] = [(token, tier) for token in ids]

    def needed(self, span: Span) -> int:
        """Where the last span begins that continues this one."""
        return max([child.start for child, parent in self.parents.items() if parent is span], default=span.start)

    def remove(self, span: Span, start: int) -> None:
        own = self.tokens[span]
        while len(own) > start - span.start:
            tier, stop = own[-1][1], len(own)
            while stop > start - span.start and own[stop - 1][1] == tier:
                stop -= 1
            self.log.removed(span, span.start + stop, tier=tier)  # type: ignore[arg-type]
            del own[stop:]
        if not own:
            del self.tokens[span], self.parents[span]

    def move(self, span: Span, start: int, stop: int, tiers: tuple[str, str]) -> None:
        """Moves the tokens of a range that lie in the first tier to the second, run by run."""
        own = self.tokens[span]
        for at in range(start, stop):
            if own[at - span.start][1] == tiers[0]:
                own[at - span.start] = (own[at - span.start][0], tiers[1])
                self.log.updated(span, at, self.aligned(span, at, at + 1), tier=tiers)  # type: ignore[arg-type]

    def clear(self) -> None:
        self.log.cleared()
        self.parents.clear()
        self.tokens = {span: [] for span in self.keys}

    def blocks(self) -> dict[Prefix, set[str]]:
        """Prefixes that end with a block, and where its last token lies."""
        medium = {"device": "GPU", "host": "CPU"}
        found = {}
        for span in self.tokens:
            root = span
            while root in self.parents:
                root = self.parents[root]
            path = self.path(span, span.start + len(self.tokens[span]))
            for stop in range(self.log.block_size, len(path) + 1, self.log.block_size):
                prefix = (*self.keys[root], *(token for token, _ in path[:stop]))
                found[prefix] = {medium[path[stop - 1][1]]}
        return found


@given(st.randoms(use_true_random=True))
@settings(max_examples=100)
def test_routers_know_what_there_is(random: Random) -> None:
    """Through both encodings; where events were dropped they know less, but nothing that is not there."""
    log = EventLog(random.randint(1, 5), max_events=random.choice([3, 10_000]))
    cache = Cache(log, [(None, None), ("tenant", None), (None, "adapter"), (None, 7), ("tenant", "adapter")])
    routers = Router(), Router()
    arrays, encoder = random.random() < 0.5, tensorrt_llm.Encoder(100, attention_dp_rank=1)
    for step in range(random.randint(1, 60)):
        span = random.choice(list(cache.tokens))
        match random.choice(3 * ["store", "store", "remove", "move", "drain"] + ["clear"]):
            case "store":
                start = 0 if span in cache.keys else random.randint(span.start + 1, span.stop)
                ids = [1000 + step, *random.choices([0, 1], k=random.randrange(12))]  # no two continue a span alike
                cache.store(span, start, ids, random.choice(["device", "host"]))
            case "remove" if span in cache.parents and cache.needed(span) < span.stop:
                cache.remove(span, random.randrange(cache.needed(span), span.stop))
            case "move" if span in cache.parents:
                start = random.randrange(span.start, span.stop)
                tiers = random.choice([("device", "host"), ("host", "device")])
                cache.move(span, start, random.randint(start + 1, span.stop), tiers)
            case "drain":
                drain(log, routers, arrays, encoder)
            case "clear":
                cache.clear()
    drain(log, routers, arrays, encoder)
    cache.store(next(iter(cache.keys)), 0, [2000] * log.block_size, "device")  # what comes next shows what is missing
    drain(log, routers, arrays, encoder)
    there = cache.blocks()
    for router in routers:
        assert all(there[prefix] == tiers for prefix, tiers in router.known.items())
        assert log.dropped or router.known == there


def drain(log: EventLog, routers: tuple[Router, Router], arrays: bool, encoder: tensorrt_llm.Encoder) -> None:
    events = log.events()
    routers[0].read_vllm(events, arrays)
    routers[1].read_tensorrt_llm(encoder.encode(events))


def test_what_events_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times, tiers and priorities; priorities are none of vLLM's business."""
    seconds = count(1e9)
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    log = EventLog(2)
    log.created(1000, 500)
    span = log.stored(log.root("tenant", 3), 0, range(4), tier="host", priority=80)
    log.updated(span, 2, [2, 3], priority=(80, 20))
    log.updated(span, 1, range(3), tier=("host", "device"))
    log.removed(span, 3)
    events = _, stored, kept, moved, removed = log.events()
    assert [event.time for event in events] == [1e9 + each for each in range(5)]
    assert isinstance(stored, Stored)
    assert isinstance(moved, Updated)
    first, second = stored.blocks.hashes
    assert (stored.tier, stored.priority, stored.blocks.salt, stored.blocks.adapter) == ("host", 80, "tenant", 3)
    assert (moved.blocks.hashes, moved.blocks.parent, moved.blocks.start) == ((first,), None, 0)
    assert vllm.encode([kept]) is None
    assert vllm.encode([]) is None
    batch = read(vllm.encode([kept, moved, removed], data_parallel_rank=5))
    assert (batch.ts, batch.data_parallel_rank) == (removed.time, 5)
    assert [(type(each).__name__, each.medium, each.block_hashes) for each in batch.events] == [
        ("BlockStored", "GPU", [first]),
        ("BlockRemoved", "CPU", [first]),
        ("BlockRemoved", "GPU", [second]),
    ]
    assert (batch.events[0].lora_id, batch.events[0].lora_name) == (3, "3")
    dictionaries = msgspec.convert(tensorrt_llm.Encoder(64).encode(events), list[Dictionary])
    assert [each.event_id for each in dictionaries] == list(range(5))
    assert {(each.window_size, each.attention_dp_rank) for each in dictionaries} == {(64, None)}
    assert [each.data for each in dictionaries[:1] + dictionaries[2:]] == [
        CreatedData([1000, 500]),
        UpdatedData(second, None, Difference(80, 20)),
        UpdatedData(first, Difference(1, 0), None),
        RemovedData([second]),
    ]


def test_what_does_not_fit_is_dropped_and_told() -> None:
    """Nobody drains: the log holds no more than its bounds; the oldest go, and with them what needs them."""
    log = EventLog(1, max_events=5)
    first = log.stored(log.root(), 0, [0, 1])
    for token in range(6):
        log.stored(log.root(), 0, [token])
    log.removed(first, 1)
    log.updated(first, 0, [0], priority=(35, 36))
    log.stored(first, 1, [7])
    assert log.dropped == 5
    dropped, *rest = log.events()
    assert isinstance(dropped, Dropped)
    assert dropped.count == 5
    assert [each.blocks.ids.tolist() for each in rest] == [[4], [5]]
    log.stored(log.root(), 0, [8])
    assert [type(each) for each in log.events()] == [Stored]
    log = EventLog(4, max_tokens=100)
    for n in [Random().randint(4, 60) for _ in range(20)]:
        log.stored(log.root(), 0, range(n))
    dropped, *rest = log.events()
    assert 40 <= sum(len(each.blocks.ids) for each in rest) <= 100
    assert dropped.count + len(rest) == 20
    log.stored(log.root(), 0, range(101))
    assert [each.count for each in log.events()] == [1]
    for _ in range(3):  # what is drained makes room
        log.stored(log.root(), 0, range(60))
        assert [type(each) for each in log.events()] == [Stored]


def test_an_interrupted_drain_says_what_it_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(1)
    for token in range(4):
        log.stored(log.root(), 0, [token])
    calls, store = iter(range(9)), Span.store

    def interrupted(span: Span, ids: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return store(span, ids)

    monkeypatch.setattr(Span, "store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.events()
    dropped, stored = log.events()
    assert dropped.count == 3
    assert stored.blocks.ids == [3]


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    log = EventLog(4)
    span = log.stored(log.root(), 0, range(10))
    for error, call in [
        (vmmkv.LayoutError, lambda: EventLog(0)),
        (vmmkv.ArgumentError, lambda: EventLog(float("nan"))),
        (vmmkv.ArgumentError, lambda: EventLog(max_events="9")),
        (vmmkv.ArgumentError, lambda: EventLog(max_tokens=1.5)),
        (vmmkv.BudgetError, lambda: EventLog(max_events=0)),
        (vmmkv.BudgetError, lambda: EventLog(max_tokens=0)),
        (vmmkv.BudgetError, lambda: log.events(most=0)),
        (vmmkv.ArgumentError, lambda: log.events(most=1.5)),
        (vmmkv.ArgumentError, lambda: log.events(float("nan"))),
        (vmmkv.ArgumentError, lambda: log.events(1e300)),
        (vmmkv.ArgumentError, lambda: log.events("1")),
        (vmmkv.ArgumentError, lambda: log.events(-1)),
        (vmmkv.ArgumentError, lambda: log.stored(span, 10, [8, 9, 10], tier="disk")),
        (vmmkv.ArgumentError, lambda: log.removed(span, 9, tier="GPU")),
        (vmmkv.ArgumentError, lambda: log.updated(span, 9, [8, 9], tier=("device", "disk"))),
        (vmmkv.ShapeError, lambda: EventLog(8).stored(span, 10, [8, 9, 10])),
        (vmmkv.ShapeError, lambda: EventLog(8).removed(span, 9)),
        (vmmkv.ArgumentError, lambda: log.stored(span, 10, [8.0, 9.0, 10.0])),
        (vmmkv.ArgumentError, lambda: log.stored(span, 10, [8, 9, -1])),
        (vmmkv.ArgumentError, lambda: log.stored(span, 10, [8, 9, 1 << 32])),
        (vmmkv.ShapeError, lambda: log.stored(span, 10, [8, 9])),
        (vmmkv.ShapeError, lambda: log.stored(span, 10, [[8, 9, 10]])),
        (vmmkv.ShapeError, lambda: log.stored(span, 11, [8, 9, 10, 11])),
        (vmmkv.ShapeError, lambda: log.stored(log.root(), -1, range(8))),
        (vmmkv.ShapeError, lambda: log.updated(span, 8, [8, 9, 10], tier=("device", "host"))),
        (vmmkv.ShapeError, lambda: log.removed(span, 10)),
        (vmmkv.ArgumentError, lambda: EventPublisher(log, "inproc://events")),
        (vmmkv.BudgetError, lambda: EventPublisher(log, "tcp://127.0.0.1:*", max_replay=0)),
        (vmmkv.ArgumentError, lambda: EventPublisher(log, "tcp://127.0.0.1:99999")),
        (OSError, lambda: EventPublisher(log, "tcp://127.0.0.1:*", replay_endpoint="tcp://nowhere.invalid:1")),
    ]:
        with pytest.raises(error):
            call()
    assert [type(each) for each in log.events()] == [Stored]
    log.removed(span, 9)
    with pytest.raises(vmmkv.ShapeError):
        log.removed(span, 9)


def test_who_only_reads_dictionaries_keeps_nothing_that_is_gone() -> None:
    """TensorRT-LLM has no word for what was cleared, or dropped: all that had been told of is removed."""
    log, encoder = EventLog(1, max_events=2), tensorrt_llm.Encoder(100)
    log.stored(log.root(), 0, [1, 2])
    first, second = encoder.encode(log.events())[0]["data"]["blocks"]
    names = {first["block_hash"], second["block_hash"]}
    log.cleared()
    (removed,) = encoder.encode(log.events())
    assert removed["data"].keys() == {"type", "block_hashes"}
    assert (removed["data"]["type"], set(removed["data"]["block_hashes"])) == ("removed", names)
    log.cleared()
    assert encoder.encode(log.events()) == []
    log.stored(log.root(), 0, [1, 2])
    encoder.encode(log.events())
    for token in range(3, 6):
        log.stored(log.root(), 0, [token])
    removed, *stored = encoder.encode(log.events())
    assert set(removed["data"]["block_hashes"]) == names
    assert [each["event_id"] for each in (removed, *stored)] == [4, 5, 6]


def test_a_log_is_one_caches() -> None:
    log = EventLog()
    log.check_new()
    log.created(10)
    for check in (log.check_new, lambda: log.created(10)):
        with pytest.raises(vmmkv.ArgumentError, match="another cache"):
            check()
    closed = EventLog()
    closed.close()
    with pytest.raises(vmmkv.ArgumentError, match="closed"):
        closed.created(10)
    assert closed.events() == []


def test_ids_are_copied() -> None:
    log, ids = EventLog(2), np.arange(4)
    log.stored(log.root(), 0, ids)
    ids[:] = 9
    assert log.events()[0].blocks.ids.tolist() == [0, 1, 2, 3]


def test_threads_lose_nothing() -> None:
    """Whoever waits is woken, and what each producer appends comes in order, once."""
    log, count, producers = EventLog(1), 300, 3
    received: list[tuple[int, int]] = []

    def consume() -> None:
        while events := log.events(timeout=None, most=7):
            received.extend(divmod(int(event.blocks.ids[-1]), count) for event in events)

    def produce(number: int) -> None:
        for i in range(count):
            log.stored(log.root(), 0, [number * count + i])

    consumer = threading.Thread(target=consume)
    threads = [threading.Thread(target=produce, args=(number,)) for number in range(producers)]
    for thread in (consumer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    consumer.join(timeout=300)
    assert not consumer.is_alive()
    assert log.dropped == 0
    for number in range(producers):
        assert [i for producer, i in received if producer == number] == list(range(count))


def test_closing_wakes_all_and_keeps_the_rest() -> None:
    log = EventLog(1)
    results: list[list[Event]] = []
    waiting = [threading.Thread(target=lambda: results.append(log.events(timeout=None))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    log.close()
    for thread in waiting:
        thread.join(timeout=300)
    assert results == [[], [], []]
    log = EventLog(1)
    log.stored(log.root(), 0, [1])
    log.close()
    log.stored(log.root(), 0, [2])
    assert log.closed
    assert [each.blocks.ids for each in log.events(timeout=None)] == [1]
    assert log.events(timeout=None) == []


def test_events_can_be_awaited() -> None:
    log = EventLog(1)

    async def follow() -> list[int]:
        return [int(event.blocks.ids[0]) async for event in log]

    async def main() -> list[int]:
        abandoned = asyncio.create_task(follow())
        await asyncio.sleep(0)
        abandoned.cancel()  # while it waits: it takes nothing with it
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        log.stored(log.root(), 0, [0])
        async for event in log:
            assert event.blocks.ids == [0]
            break
        following = asyncio.create_task(follow())
        for token in range(1, 20):
            await asyncio.to_thread(log.stored, log.root(), 0, [token])
        log.close()
        return await following

    assert asyncio.run(main()) == list(range(1, 20))


def test_who_is_cancelled_leaves_nobody_waiting() -> None:
    """`asyncio.run` waits for the threads of its tasks."""
    log = EventLog(1)

    async def main() -> None:
        waiting = asyncio.ensure_future(anext(aiter(log)))
        await asyncio.sleep(0)
        waiting.cancel()

    rescue = threading.Timer(300, log.close)
    rescue.start()
    asyncio.run(main())
    rescue.cancel()
    assert not log.closed


def test_a_forked_child_starts_empty() -> None:
    """Also where another thread was in the middle of an append, or drained, and where a publisher was at work. And the
    log itself needs no extra."""
    child = run_python(
        """
        import os, signal, sys, threading
        from vmmkv.events import EventLog
        assert not {"msgspec", "zmq"} & set(sys.modules)
        from vmmkv.events.publisher import EventPublisher
        signal.alarm(300)
        sys.setswitchinterval(1e-5)
        log, over = EventLog(1, max_events=50), threading.Event()
        publisher = EventPublisher(EventLog(1), "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
        def append():
            while not over.is_set():
                log.stored(log.root(), 0, [1, 2, 3])
        def drain():
            while not over.is_set():
                log.events(0.001)
        threads = [threading.Thread(target=work) for work in (append, drain)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            pid = os.fork()
            if not pid:
                assert log.events() == [] and log.dropped == 0
                log.stored(log.root(), 0, [1])
                assert len(log.events(timeout=None)) == 1
                publisher.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        over.set()
        for thread in threads:
            thread.join()
        publisher.close()
        print("all")
        """
    )
    assert child.stdout == "all\n", child.stderr


def test_logs_are_not_kept_alive() -> None:
    log = EventLog()
    log.stored(log.root(), 0, range(32))
    reference = weakref.ref(log)
    del log
    gc.collect()
    assert reference() is None


@pytest.fixture
def sockets() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def ask(dealer: zmq.Socket[bytes], first: int) -> list[list[bytes]]:
    """All messages of a replay from a number on, the last one included."""
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    replies: list[list[bytes]] = []
    while not replies or replies[-1][-2] != b"\xff" * 8:
        assert dealer.poll(300_000)
        empty, *frames = dealer.recv_multipart()
        assert empty == b""
        replies.append(frames)
    return replies


def store(log: EventLog, tokens: Iterable[int]) -> None:
    for token in tokens:
        log.stored(log.root(), 0, [token])


def tokens_of(batches: Iterable[bytes], arrays: bool = False) -> list[int]:
    return [event.token_ids[0] for batch in batches for event in read(batch, arrays).events]


@pytest.mark.parametrize("arrays", [False, True])
def test_a_publisher_sends_and_replays(sockets: zmq.Context[zmq.Socket[bytes]], arrays: bool) -> None:
    """Topic, number, batch; whoever comes late asks for what was before; what is left at the end is sent."""
    log = EventLog(1)
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
            store(log, [next(tokens)])
        last = next(tokens)
        store(log, [last])
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
        store(log, [70, 71])
    assert subscriber.poll(300_000)
    assert tokens_of([subscriber.recv_multipart()[2]], arrays) == [70, 71]
    store(log, [72])
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
    store(log, range(5))
    publisher = EventPublisher(log, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", max_replay=3)
    dealer = sockets.socket(zmq.DEALER)
    assert publisher.replay_endpoint
    dealer.connect(publisher.replay_endpoint)
    *replayed, _ = ask(dealer, 0)
    while not replayed:
        *replayed, _ = ask(dealer, 0)
    ((_, _, batch),) = replayed
    assert [type(each).__name__ for each in read(batch).events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
    for token in range(5, 9):
        store(log, [token])
        *replayed, _ = ask(dealer, token - 4)
        while not replayed:
            *replayed, _ = ask(dealer, token - 4)
        assert tokens_of([replayed[-1][2]]) == [token]
    *replayed, _ = ask(dealer, 0)
    assert tokens_of(frames[2] for frames in replayed) == [6, 7, 8]
    log.close()
    publisher.close()


def test_a_publisher_comes_to_subscribers(sockets: zmq.Context[zmq.Socket[bytes]]) -> None:
    subscriber = sockets.socket(zmq.SUB)
    subscriber.subscribe("")
    endpoint = f"tcp://127.0.0.1:{subscriber.bind_to_random_port('tcp://127.0.0.1')}"
    log = EventLog(1)
    with pytest.raises(OSError, match="in use"):
        EventPublisher(log, endpoint)
    with EventPublisher(log, endpoint, bind=False):
        while not subscriber.poll(50):
            store(log, [1])
    topic, _, batch = subscriber.recv_multipart()
    assert topic == b""
    assert set(tokens_of([batch])) == {1}
