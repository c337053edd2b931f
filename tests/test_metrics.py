"""What pools tell of themselves: to Prometheus, to a profiler, and to `vmmkv top`, whatever becomes of a process."""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import socket
import threading
from collections.abc import Iterator
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import join, run_python, soon
from loopback import looped
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import vmmkv
from vmmkv import publication
from vmmkv.cli.app import app
from vmmkv.cli.top import draw
from vmmkv.events import EventLog
from vmmkv.metrics import PoolCollector
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB


def make_pool() -> vmmkv.FramePool:
    return vmmkv.FramePool("160KiB", device="cpu", page_size=4096)


def scrape(pool: vmmkv.FramePool) -> dict[tuple[str, ...], float]:
    """Values of one pool by name and further labels, from the text that Prometheus gets."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    values = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("pool") == str(pool.number):
                assert labels.pop("device") == "cpu"
                values[sample.name, *labels.values()] = sample.value
    return values


def test_what_prometheus_reads_is_so() -> None:
    pool = make_pool()
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool, reserved="16KiB", lookahead=8)
    tensor = GrowableTensor((100, 1024), torch.float32, pool=pool, max_bytes="40KiB")
    tensor.resize(2)
    lengths = [random.randint(1, 40), random.randint(1, 40), 8 * random.randint(1, 5)]  # the last needs a page soon
    first, *_ = [cache.sequence(length) for length in lengths]
    first.truncate(0)
    lengths[0] = 0
    used = sum(-(-length // 8) for length in lengths) + 2
    soon(lambda: not pool.word("hungry"))
    values, stats, physical = scrape(pool), cache.stats(), pool.stats().physical_bytes
    expected = {("kv_cache_usage_perc",): pytest.approx(used / 40), ("limit_bytes",): 160 << 10}
    expected |= {("reserved_bytes",): 16 << 10, ("physical_bytes",): physical, ("num_accounts",): 2}
    expected |= {("num_sequences",): 3, ("num_tokens",): sum(lengths), ("pages", "used"): used}
    expected |= {("pages", "surplus"): stats.pages["surplus"], ("pages_created_total",): stats.pages_created}
    expected["pages", "free"] = physical // 4096 - used - stats.pages["surplus"]
    for thread, calls, kind in (("user", stats.driver_calls, "in need"), ("mapper", stats.mapper_calls, "ahead")):
        expected["pages_mapped_total", thread] = stats.pages_mapped[kind]
        for name, call in calls.items():
            expected["driver_calls_total", name, thread] = call.count
            expected["driver_seconds_total", name, thread] = pytest.approx(call.seconds)
    assert {key: values[f"vmmkv:{key[0]}", *key[1:]] for key in expected} == expected
    assert min(values["vmmkv:pages_mapped_total", "mapper"], values["vmmkv:driver_calls_total", "map", "mapper"]) > 0


def test_hits_are_counted_of_all_caches_that_a_pool_has_had() -> None:
    pool = make_pool()
    assert scrape(pool)["vmmkv:prefix_cache_queries_total",] == 0
    prompts, hits = 0, 0
    for _ in range(2):
        with vmmkv.KVCache(LAYOUT, 4, 80, pool=pool) as cache:
            ids = np.arange(random.randint(9, 40))
            with cache.sequence(token_ids=ids) as first:
                first.commit(ids)
                sequences = [cache.sequence(token_ids=ids), cache.sequence(token_ids=ids, reuse=False)]
                prompts, hits = prompts + 2 * len(ids), hits + sequences[0].cached_tokens
            stats = cache.stats()
            assert (stats.prompt_tokens, stats.cached_tokens) == (2 * len(ids), sequences[0].cached_tokens)
            assert stats.prefix_pages == len(ids) // 8
            values = scrape(pool)
            assert values["vmmkv:prefix_cache_queries_total",] == prompts
            assert values["vmmkv:prefix_cache_hits_total",] == hits > 0
    assert scrape(pool)["vmmkv:prefix_cache_hits_total",] == hits


def test_what_is_on_the_host_is_counted() -> None:
    pool = make_pool()
    caches = [vmmkv.KVCache(LAYOUT, 4, 80, pool=pool, host_bytes="1MiB") for _ in range(2)]
    away = [cache.sequence(random.randint(1, 40)) for cache in caches]
    pages = sum(-(-sequence.length // 8) for sequence in away)
    for sequence in away:
        sequence.suspend()
    values, stats = scrape(pool), [cache.stats() for cache in caches]
    assert values["vmmkv:host_prefix_pages",] == sum(of.host_prefix_pages for of in stats)
    assert values["vmmkv:host_bytes",] == sum(of.host_bytes for of in stats) == 4096 * pages
    away[0].free()
    assert scrape(pool)["vmmkv:host_bytes",] < values["vmmkv:host_bytes",]


def test_events_that_were_dropped_are_counted() -> None:
    pool = make_pool()
    caches = [vmmkv.KVCache(LAYOUT, 4, 80, pool=pool)]
    assert ("vmmkv:kv_events_dropped_total",) not in scrape(pool)
    caches += [vmmkv.KVCache(LAYOUT, 4, 80, pool=pool, event_log=EventLog(8, max_events=1)) for _ in range(2)]
    told = [random.randint(0, 5) for _ in caches[1:]]
    for cache, count in zip(caches[1:], told):
        for token in range(count):
            with cache.sequence(token_ids=[token] * 8) as sequence:
                sequence.commit([token] * 8)
    assert scrape(pool)["vmmkv:kv_events_dropped_total",] == sum(max(count - 1, 0) for count in told)


def test_pools_come_and_go() -> None:
    """What is closed, or nobody holds any more, is no longer told of; a collector keeps no pool."""
    kept, closed, lost = (vmmkv.FramePool("16KiB", device="cpu", page_size=4096) for _ in range(3))
    assert scrape(kept)
    assert scrape(closed)
    closed.close()
    assert not scrape(closed)
    cache = vmmkv.KVCache(LAYOUT, 1, 8, max_bytes="16KiB", device="cpu", page_size=4096)
    assert scrape(cache.pool)
    cache.close()
    assert not scrape(cache.pool)
    number = lost.number
    del lost
    gc.collect()
    assert not scrape(SimpleNamespace(number=number))  # type: ignore[arg-type]
    assert scrape(kept)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What begins and ends on a profiler's time line."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    return calls


def test_what_copies_or_maps_is_a_range(ranges: list[str]) -> None:
    options = {"max_bytes": "40KiB", "host_bytes": "1MiB", "large_frames": False}
    with vmmkv.KVCache(LAYOUT, 5, 80, device="cpu", page_size=4096, **options) as cache, looped():
        cache.pool.nvtx = torch.cuda.nvtx.range

        def known() -> vmmkv.Sequence:
            return cache.sequence(token_ids=np.arange(27))

        with known() as first:
            first.commit(np.arange(27))
        for what, operation in {
            "prefix hit": known,
            "fork": (sequence := known()).fork,
            "reorder": lambda: cache.reorder([sequence, cache.sequence(20)], [1, 1]),
            "suspend": sequence.suspend,
            "resume": sequence.resume,
            "send": lambda: sequence.send(1),
            "receive": lambda: cache.receive(1),
        }.items():
            del ranges[:]
            kept = operation()
            assert f"vmmkv: {what}" in ranges, what
            assert ranges.count("end") * 2 == len(ranges)
            del kept


def test_ranges_are_nothing_without_a_gpu_and_balanced_with_one(ranges: list[str]) -> None:
    with vmmkv.KVCache(LAYOUT, 2, 80, device="cpu", page_size=4096, max_bytes="40KiB") as cache:
        cache.sequence(9).free()
        assert ranges == []
        cache.pool.nvtx = torch.cuda.nvtx.range
        growing, other = cache.sequence(9), cache.sequence(60)
        del ranges[:]
        growing.extend(3)  # within its pages
        assert ranges == []
        with pytest.raises(vmmkv.OutOfPagesError):
            growing.extend(60)
        other.free()
        growing.extend(60)
        assert ranges == ["vmmkv: growth", "end"] * 2


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests that run at the same time do not see one another."""
    monkeypatch.setattr(publication, "PREFIX", f"vmmkv-test-{secrets.token_hex(8)}-")
    yield
    vmmkv.unpublish()


def names() -> list[str]:
    """The names of sockets of this test."""
    with open("/proc/net/unix") as file:
        return [line.split("@")[1].strip() for line in file if publication.PREFIX in line]


def top() -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["top", "--once", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(pool: vmmkv.FramePool) -> dict[str, Any]:
    (record,) = top()
    assert record["pid"] == os.getpid()
    (found,) = (each for each in record["pools"] if each["number"] == pool.number)
    return found


def test_what_is_published_is_shown_and_follows() -> None:
    assert top() == []
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool)
    vmmkv.publish()
    vmmkv.publish()
    found = shown(pool)
    assert (found["limit_bytes"], found["physical_bytes"], found["holders"]) == (160 << 10, 0, 1)
    with cache.sequence(20):
        found = shown(pool)
        assert found["tokens"] == 20
        assert (found["used_bytes"], found["sequences"]) == (3 * 4096, 1)
        assert found["driver_calls"]["map"]["count"] == 3
    assert shown(pool)["sequences"] == 0
    vmmkv.unpublish()
    assert top() == []
    assert names() == []


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()"])
def test_other_processes_are_shown_until_they_end(end: str) -> None:
    """However they do. A forked child publishes only for itself, and does not end what its parent does."""
    code = """
        import os, sys
        import vmmkv
        from vmmkv import publication
        publication.PREFIX = sys.argv[1]
        vmmkv.publish()
        if os.fork() == 0:
            sys.exit()
        os.wait()
        (record,) = publication.read_all()
        assert record["pid"] == os.getpid()
        print("shown", flush=True)
    """
    process = run_python(f"{dedent(code)}\n{end}", publication.PREFIX)
    assert process.stdout == "shown\n", process.stderr
    assert top() == []
    assert names() == []


def test_odd_answers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut ones, those of another version and of another user, and none: whatever else is there is shown."""
    monkeypatch.setattr(publication, "PATIENCE", 0.05)
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    vmmkv.publish()
    (record,) = top()
    whole = json.dumps(record)
    odd = [*(whole[:end] for end in (0, 1, len(whole) // 2, len(whole) - 1)), "[1]", "null", "\0", None]
    odd += [json.dumps({name: value for name, value in record.items() if name != left}) for left in record]
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{publication.PREFIX}1")
        other.listen()

        def answer() -> None:
            for text in odd:
                with other.accept()[0] as client:
                    if text is None:
                        client.recv(1)  # until the reader has given up
                    else:
                        client.sendall(text.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        for text in odd:
            assert shown(pool)["number"] == pool.number, text
        join(thread)
    for value in ("x", None, [], {}, -1):
        strange = record | {"pools": [{"number": value}, {}, *record["pools"]]}
        assert f"pool {pool.number} (cpu)" in draw([strange], [record]).plain
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert top() == []


def test_a_reader_that_goes_or_does_not_read_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "PATIENCE", 0.05)
    monkeypatch.setattr(publication, "pool_stats", dict)
    monkeypatch.setattr(publication.sys, "orig_argv", ["x" * (1 << 22)])
    vmmkv.publish()
    (name,) = names()
    for _ in range(3):
        reader = socket.socket(socket.AF_UNIX)
        reader.connect(f"\0{name}")
        soon(lambda: len(top()) == 1)
        reader.close()
