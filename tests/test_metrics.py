"""Metrics, as Prometheus reads them."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import soon
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import vmmkv
from vmmkv import nvtx
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


def test_ranges_are_nothing_without_a_gpu_and_balanced_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with vmmkv.KVCache(LAYOUT, 2, 80, device="cpu", page_size=4096, max_bytes="40KiB") as cache:
        cache.sequence(9).free()
        assert calls == []
        cache.pool.nvtx = nvtx.Ranges(torch.device("cuda"))
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
