"""Metrics for Prometheus, of all pools of this process; needs the extra `vmmkv[metrics]`.

    prometheus_client.REGISTRY.register(vmmkv.metrics.PoolCollector())

Names are in vLLM's manner. A scrape takes a snapshot of each pool (`FramePool.stats`); in between nothing is counted
that is not counted anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .cache import KVCache
from .errors import VmmkvError
from .pool import FramePool, holders, pool_stats
from .stats import CacheStats, FramePoolStats

Value = Callable[[FramePoolStats], float]

GAUGES: dict[str, tuple[str, Value]] = {
    "vmmkv:kv_cache_usage_perc": (
        "What is in use of a pool's limit: 1 is all of it.",
        lambda stats: stats.used_bytes / stats.limit_bytes,
    ),
    "vmmkv:limit_bytes": ("The most that a pool may take.", lambda stats: stats.limit_bytes),
    "vmmkv:physical_bytes": ("What a pool takes.", lambda stats: stats.physical_bytes),
    "vmmkv:leased_bytes": ("What memory pools of torch have of a pool, or may take.", lambda stats: stats.leased_bytes),
    "vmmkv:reserved_bytes": ("What is reserved for accounts.", lambda stats: stats.reserved_bytes),
    "vmmkv:num_accounts": ("Caches, tensors and memory pools on a pool.", lambda stats: stats.holders),
    "vmmkv:num_sequences": ("Live sequences.", lambda stats: stats.sequences),
    "vmmkv:num_tokens": ("Tokens of live sequences.", lambda stats: stats.tokens),
}


class PoolCollector(Collector):
    """Collects the metrics of all open pools at each scrape of `prometheus_client`.

    All metrics are labelled by `pool`, its number in this process, and `device`:

    - gauges `vmmkv:kv_cache_usage_perc` (1 is full), `vmmkv:limit_bytes`, `vmmkv:physical_bytes`,
      `vmmkv:leased_bytes`, `vmmkv:reserved_bytes`, `vmmkv:num_accounts`, `vmmkv:num_sequences`, `vmmkv:num_tokens`;
    - the gauge `vmmkv:pages`, also by `state`: `used`, `surplus` (mapped, ready to be adopted or reclaimed), `free`;
    - counters `vmmkv:pages_created_total`, and `vmmkv:pages_mapped_total` by `by`: the `mapper`, ahead of need, or the
      `user` who grew;
    - counters `vmmkv:prefix_cache_queries_total` and `vmmkv:prefix_cache_hits_total`, in tokens: of prompts that were
      looked up, and those of them whose K and V were there;
    - gauges `vmmkv:host_bytes` and `vmmkv:host_prefix_pages`, what suspended sequences and evicted prefixes
      of caches with `host_bytes` take of the host's memory, and the pages that are known there;
    - the counter `vmmkv:kv_events_dropped_total`, of the caches on the pool that have an `event_log`;
    - counters `vmmkv:driver_calls_total` and `vmmkv:driver_seconds_total`, by `call` and `thread`: `user` or `mapper`.
    """

    def collect(self) -> Iterator[Metric]:
        """A snapshot of all pools."""
        pools = pool_stats()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["pool", "device"])
            for pool, stats in pools.items():
                gauge.add_metric(_labels(pool), value(stats))
            yield gauge
        yield from _pages(pools)
        yield from _prefixes(pools)
        yield from _host(pools)
        yield _events(pools)
        yield from _driver(pools)

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the pools."""
        return []


def _labels(pool: FramePool, *more: str) -> list[str]:
    return [str(pool.number), str(pool.device), *more]


def _pages(pools: dict[FramePool, FramePoolStats]) -> Iterator[Metric]:
    """Pages by state, created, and mapped."""
    pages = GaugeMetricFamily("vmmkv:pages", "Pages by state.", labels=["pool", "device", "state"])
    created = CounterMetricFamily(
        "vmmkv:pages_created", "Pages created since the beginning.", labels=["pool", "device"]
    )
    mapped = CounterMetricFamily(
        "vmmkv:pages_mapped", "Pages mapped since the beginning.", labels=["pool", "device", "by"]
    )
    for pool, stats in pools.items():
        surplus = stats.physical_bytes - stats.free_bytes - stats.used_bytes
        sizes = {"used": stats.used_bytes, "surplus": surplus, "free": stats.free_bytes}
        for state, size in sizes.items():
            pages.add_metric(_labels(pool, state), size // pool.page_size)
        created.add_metric(_labels(pool), stats.pages_created)
        mapped.add_metric(_labels(pool, "mapper"), stats.pages_mapped["ahead"])
        mapped.add_metric(_labels(pool, "user"), stats.pages_mapped["in need"])
    yield from (pages, created, mapped)


def _prefixes(pools: dict[FramePool, FramePoolStats]) -> Iterator[Metric]:
    """Tokens of prompts that were looked up, and found."""
    labels = ["pool", "device"]
    queries = CounterMetricFamily("vmmkv:prefix_cache_queries", "Tokens of prompts that were looked up.", labels=labels)
    hits = CounterMetricFamily("vmmkv:prefix_cache_hits", "Those whose K and V were there.", labels=labels)
    for pool, stats in pools.items():
        queries.add_metric(_labels(pool), stats.prompt_tokens)
        hits.add_metric(_labels(pool), stats.cached_tokens)
    yield from (queries, hits)


def _host(pools: dict[FramePool, FramePoolStats]) -> Iterator[Metric]:
    """What is on the host."""
    labels = ["pool", "device"]
    sizes = GaugeMetricFamily("vmmkv:host_bytes", "Host memory of suspended sequences and prefixes.", labels=labels)
    pages = GaugeMetricFamily("vmmkv:host_prefix_pages", "Pages that are known on the host.", labels=labels)
    caches = [owner for owner in holders() if isinstance(owner, KVCache)]
    for pool in pools:
        if mine := [stats for cache in caches if cache.pool is pool and (stats := _stats(cache))]:
            sizes.add_metric(_labels(pool), sum(stats.host_bytes for stats in mine))
            pages.add_metric(_labels(pool), sum(stats.host_prefix_pages for stats in mine))
    yield from (sizes, pages)


def _stats(cache: KVCache) -> CacheStats | None:
    """What a cache says, unless it was closed meanwhile."""
    with suppress(VmmkvError):
        return cache.stats()
    return None


def _events(pools: dict[FramePool, FramePoolStats]) -> Metric:
    """Events that nobody drained in time."""
    dropped = CounterMetricFamily("vmmkv:kv_events_dropped", "Events that were dropped.", labels=["pool", "device"])
    logs = [(owner.pool, owner.event_log) for owner in holders() if isinstance(owner, KVCache)]
    for pool in pools:
        if mine := [log for of, log in logs if of is pool and log]:
            dropped.add_metric(_labels(pool), sum(log.dropped for log in mine))
    return dropped


def _driver(pools: dict[FramePool, FramePoolStats]) -> Iterator[Metric]:
    """Calls of the memory system, and the time in them."""
    labels = ["pool", "device", "call", "thread"]
    counts = CounterMetricFamily("vmmkv:driver_calls", "Calls of the memory system.", labels=labels)
    seconds = CounterMetricFamily("vmmkv:driver_seconds", "Time in calls of the memory system.", labels=labels)
    for pool, stats in pools.items():
        for thread, calls in (("user", stats.driver_calls), ("mapper", stats.mapper_calls)):
            for name, call in calls.items():
                counts.add_metric(_labels(pool, name, thread), call.count)
                seconds.add_metric(_labels(pool, name, thread), call.seconds)
    yield from (counts, seconds)
