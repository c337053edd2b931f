"""Metrics for Prometheus, of all pools of this process; needs the extra `vmmkv[metrics]`.

    prometheus_client.REGISTRY.register(vmmkv.metrics.PoolCollector())

Names are in vLLM's manner. A scrape takes a snapshot of each pool (`FramePool.stats`); nothing is counted for it in
between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .cache import KVCache
from .errors import VmmkvError
from .pool import FramePool, pool_stats
from .stats import CacheStats, CallStats, FramePoolStats

Samples = dict[tuple[str, ...], float]
"""Values by further labels."""


class Scrape(NamedTuple):
    """One pool at a scrape, and the caches on it that are open."""

    pool: FramePool
    stats: FramePoolStats
    caches: list[tuple[KVCache, CacheStats]]

    def pages(self) -> Samples:
        stats = self.stats
        surplus = stats.physical_bytes - stats.free_bytes - stats.used_bytes
        sizes = {"used": stats.used_bytes, "surplus": surplus, "free": stats.free_bytes}
        return {(state,): size // self.pool.page_size for state, size in sizes.items()}

    def mapped(self) -> Samples:
        """Pages that were mapped, by what mapped them."""
        mapped = self.stats.pages_mapped
        return {("mapper",): mapped["ahead"], ("user",): mapped["in need"]}

    def calls(self, value: Callable[[CallStats], float]) -> Samples:
        """A figure of each driver call, by call and thread."""
        threads = {"user": self.stats.driver_calls, "mapper": self.stats.mapper_calls}
        return {(name, thread): value(call) for thread, calls in threads.items() for name, call in calls.items()}

    def host(self, value: Callable[[CacheStats], float]) -> Samples:
        """A figure of the host tier, over all caches."""
        return {(): sum(value(stats) for _, stats in self.caches)} if self.caches else {}

    def dropped(self) -> Samples:
        """Events that were dropped, where a cache has an event log."""
        logs = [cache.event_log for cache, _ in self.caches if cache.event_log]
        return {(): sum(log.dropped for log in logs)} if logs else {}


GAUGES: dict[str, tuple[str, tuple[str, ...], Callable[[Scrape], Samples | float]]] = {
    "vmmkv:kv_cache_usage_perc": (
        "Used share of a pool's limit: 1 is all of it.", (), lambda of: of.stats.used_bytes / of.stats.limit_bytes,
    ),
    "vmmkv:limit_bytes": ("The most that a pool may take.", (), lambda of: of.stats.limit_bytes),
    "vmmkv:physical_bytes": ("Memory that a pool takes.", (), lambda of: of.stats.physical_bytes),
    "vmmkv:leased_bytes": ("Bytes leased to memory pools of torch.", (), lambda of: of.stats.leased_bytes),
    "vmmkv:reserved_bytes": ("Bytes reserved for accounts.", (), lambda of: of.stats.reserved_bytes),
    "vmmkv:num_accounts": ("Caches, tensors and memory pools on a pool.", (), lambda of: of.stats.holders),
    "vmmkv:num_sequences": ("Live sequences.", (), lambda of: of.stats.sequences),
    "vmmkv:num_tokens": ("Tokens of live sequences.", (), lambda of: of.stats.tokens),
    "vmmkv:pages": ("Pages by state.", ("state",), Scrape.pages),
    "vmmkv:host_bytes": (
        "Host memory of suspended sequences and prefixes.", (), lambda of: of.host(lambda stats: stats.host_bytes),
    ),
    "vmmkv:host_prefix_pages": (
        "Pages of prefixes on the host.", (), lambda of: of.host(lambda stats: stats.host_prefix_pages),
    ),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, tuple[str, ...], Callable[[Scrape], Samples | float]]] = {
    "vmmkv:pages_created": ("Pages created since the beginning.", (), lambda of: of.stats.pages_created),
    "vmmkv:pages_mapped": ("Pages mapped since the beginning.", ("by",), Scrape.mapped),
    "vmmkv:prefix_cache_queries": ("Tokens of prompts that were looked up.", (), lambda of: of.stats.prompt_tokens),
    "vmmkv:prefix_cache_hits": ("Tokens of these whose K and V were there.", (), lambda of: of.stats.cached_tokens),
    "vmmkv:kv_events_dropped": ("Events that were dropped.", (), Scrape.dropped),
    "vmmkv:driver_calls": (
        "Calls of the memory system.", ("call", "thread"), lambda of: of.calls(lambda call: call.count),
    ),
    "vmmkv:driver_seconds": (
        "Time in calls of the memory system.", ("call", "thread"), lambda of: of.calls(lambda call: call.seconds),
    ),
}  # fmt: skip


class PoolCollector(Collector):
    """Collects the metrics of all open pools at each scrape of `prometheus_client`.

    All metrics are labelled by `pool`, its number in this process, and `device`. `GAUGES` and `COUNTERS` name them; the
    guide "Watching and debugging" has a table.
    """

    def collect(self) -> Iterator[Metric]:
        """A snapshot of all pools."""
        scrapes = [Scrape(pool, stats, _caches(pool)) for pool, stats in pool_stats().items()]
        for family, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (text, labels, values) in metrics.items():
                metric = family(name, text, labels=["pool", "device", *labels])
                for scrape in scrapes:
                    samples = values(scrape)
                    for more, value in (samples if isinstance(samples, dict) else {(): samples}).items():
                        metric.add_metric([str(scrape.pool.number), str(scrape.pool.device), *more], value)
                yield metric

    def describe(self) -> list[Metric]:
        """Nothing: which metrics there are depends on the pools."""
        return []


def _caches(pool: FramePool) -> list[tuple[KVCache, CacheStats]]:
    found = []
    for holder in pool.holders.copy().values():
        with suppress(VmmkvError):  # it was closed meanwhile
            found += [(holder, holder.stats())] if isinstance(holder, KVCache) else []
    return found
