"""Metrics, as Prometheus reads them."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run_python, soon
from loopback import looped
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import vmmkv
from vmmkv.events import EventLog
from vmmkv.metrics import PoolCollector
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB


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
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool, reserved="16KiB", lookahead=8)
    tensor = GrowableTensor((100, 1024), torch.float32, pool=pool, max_bytes="40KiB")
    tensor.resize(2)
    lengths = [random.randint(1, 40), random.randint(1, 40), 8 * random.randint(1, 5)]  # the last needs a page soon
    first, *_ = [cache.sequence(length) for length in lengths]
    first.truncate(0)
    lengths[0] = 0
    used = sum(-(-length // 8) for length in lengths) + 2
    soon(lambda: not pool.word("hungry"))
    values, stats = scrape(pool), cache.stats()
    assert values["vmmkv:kv_cache_usage_perc",] == pytest.approx(used / 40)
    assert values["vmmkv:limit_bytes",] == 160 << 10
    assert values["vmmkv:reserved_bytes",] == 16 << 10
    assert values["vmmkv:physical_bytes",] == pool.stats().physical_bytes
    assert values["vmmkv:num_accounts",] == 2
    assert values["vmmkv:num_sequences",] == 3
    assert values["vmmkv:num_tokens",] == sum(lengths)
    states = {state: values["vmmkv:pages", state] for state in ("used", "surplus", "free")}
    assert states["used"] == used
    assert sum(states.values()) * 4096 == pool.stats().physical_bytes
    assert states["surplus"] == stats.pages["surplus"]
    assert values["vmmkv:pages_created_total",] == stats.pages_created
    assert values["vmmkv:pages_mapped_total", "user"] == stats.pages_mapped["in need"]
    assert values["vmmkv:pages_mapped_total", "mapper"] == stats.pages_mapped["ahead"] > 0
    for thread, calls in (("user", stats.driver_calls), ("mapper", stats.mapper_calls)):
        for name, call in calls.items():
            assert values["vmmkv:driver_calls_total", name, thread] == call.count
            assert values["vmmkv:driver_seconds_total", name, thread] == pytest.approx(call.seconds)
    assert values["vmmkv:driver_calls_total", "map", "mapper"] > 0


def test_hits_are_counted_of_all_caches_that_a_pool_has_had() -> None:
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
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
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
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
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
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


def test_without_the_extra_the_rest_works() -> None:
    child = run_python(
        """
        import sys
        import vmmkv
        print("prometheus_client" in sys.modules)
        """
    )
    assert child.stdout == "False\n", child.stderr


def test_what_copies_or_maps_is_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
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
            del calls[:]
            kept = operation()
            assert f"vmmkv: {what}" in calls, what
            assert calls.count("end") * 2 == len(calls)
            del kept


def test_ranges_are_nothing_without_a_gpu_and_balanced_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with vmmkv.KVCache(LAYOUT, 2, 80, device="cpu", page_size=4096, max_bytes="40KiB") as cache:
        cache.sequence(9).free()
        assert calls == []
        cache.pool.nvtx = torch.cuda.nvtx.range
        growing, other = cache.sequence(9), cache.sequence(60)
        del calls[:]
        growing.extend(3)  # within its pages
        assert calls == []
        with pytest.raises(vmmkv.OutOfPagesError):
            growing.extend(60)
        assert calls == ["vmmkv: growth", "end"]
        other.free()
        growing.extend(60)
        assert calls[2:] == ["vmmkv: growth", "end"]
