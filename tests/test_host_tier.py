"""Evicted prefixes and suspended sequences in host memory: by the tree, and by the public methods of a cache."""

from __future__ import annotations

import ctypes
import functools
import time
from random import Random

import pytest
import torch
from conftest import ROUNDS, on_driver, randoms, small_driver
from core_rows import Row, token_at
from faulty import FaultyDriver
from host_machine import HostMachine, host_memory  # noqa: F401
from interruption import interrupted_after
from prefix_machine import Ids, Tables, bytes_of, common, some_ids

import vmmkv
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.driver.fence import Fence
from vmmkv.layout import KVLayout
from vmmkv.prefix.prefixes import NO_NAMES, Prefixes
from vmmkv.tier.host_tier import HostTier

LAYOUT = vmmkv.KVLayout(3, 2, 16, torch.float32, layers_per_range=2)
"""Two ranges, of 512 and 256 bytes a token: pages of the host hold 8 and 16."""
PAGE = 4096
LAYOUTS = {
    "even": KVLayout(2, 1, 64, torch.float32),
    "pages end within tokens": KVLayout(2, 1, 36, torch.float32),
    "tokens of several pages": KVLayout(1, 1, 600, torch.float32),
    "ranges": KVLayout(3, [2, 1, 2], 24, torch.float32, layers_per_range=1),
}


@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
def test_any_operations_in_any_order(faults: bool) -> None:
    for random in randoms(8):
        HostMachine(random, faults=faults).run(120)


# ---------------------------------------------------------------------- prefixes


def fill(row: Row, ids: Ids, first: int) -> None:
    """Writes the bytes of the tokens of these ids from one on."""
    row.tokens = bytes_of(NO_NAMES, ids)
    for part in range(len(row.sequence.cache.ranges)):
        place, record = token_at(row.sequence.cache, row.sequence.row, part, first)
        content = b"".join(bytes([byte]) * record for byte in row.tokens[first:])
        ctypes.memmove(int(place), content, len(content))


@pytest.mark.few(3)
@pytest.mark.parametrize("large", [False, True], ids=["pages", "large frames"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_that_was_committed_is_lost(layout: str, large: bool, random: Random) -> None:
    """A host with room for all has what the device has not; but for the part of a page at the end."""
    records, most = LAYOUTS[layout].record_bytes, 150
    pages = sum(-(-most * record // PAGE) for record in records)
    pool = Pool(small_driver("cpu"), 3 * pages + 40)
    cache = Cache(pool, records, 6, most, large=large)
    tier = HostTier(cache, 1 << 30, 0)
    tree, known, live, from_host = Prefixes(cache, tier=tier), list[Ids](), list[Row](), 0
    for _ in range(80 * ROUNDS):
        ids = some_ids(random, known, most)
        while len(live) > random.choice([0, 1, 2]):
            live.pop(random.randrange(len(live))).sequence.free()
        if random.random() < 0.3:
            tree.evict(random.choice([1, 5, 40, 1 << 30]))
        before = sum(tier.prefixes.pages.values())
        sequence, cached = tree.start(ids, whole=random.random() < 0.7)
        equal = max((common(ids[:-1], each) for each in known), default=0)
        whole = equal
        while not large and whole != (end := min(whole * record // PAGE * PAGE // record for record in records)):
            whole = end
        assert cached <= equal
        assert cached >= whole or large, (cached, whole, equal)
        from_host += before > 0 and cached > 0
        row = Row(sequence)
        sequence.extend(len(ids) - sequence.length)
        fill(row, ids, cached)
        row.verify()
        tree.commit(sequence, ids)
        known.append(ids)
        live.append(row)
        Tables(tree).check()
    assert from_host > 5
    for row in live:
        row.verify()
        row.sequence.free()
    tree.close()
    tier.finish(1 << 30)
    assert tier.used == 0
    check(pool, [cache])


def prompts(count: int) -> list[list[int]]:
    """Ids of different prompts, of 48 tokens: 9 pages each."""
    return [[number * 1000 + token for token in range(48)] for number in range(count)]


def make(pages: int = 40, driver: FaultyDriver | None = None, **options: object) -> vmmkv.KVCache:
    options = {"host_bytes": "1GiB", "large_frames": False, "max_bytes": pages * PAGE, "page_size": PAGE, **options}
    if driver:
        options.pop("page_size")
        return on_driver(driver, vmmkv.KVCache, LAYOUT, 5, 200, **options)  # type: ignore[no-any-return]
    return vmmkv.KVCache(LAYOUT, 5, 200, device="cpu", **options)  # type: ignore[arg-type]


def write(sequence: vmmkv.Sequence, ids: list[int], first: int = 0) -> None:
    """Writes numbers that follow from the ids."""
    for layer in range(LAYOUT.num_layers):
        sequence.k(layer)[first:] = torch.tensor(ids[first:]).view(-1, 1, 1) + layer
        sequence.v(layer)[first:] = -sequence.k(layer)[first:]


def holds(sequence: vmmkv.Sequence, ids: list[int]) -> bool:
    """Whether it holds these numbers."""
    expected = torch.tensor(ids).view(-1, 1, 1).expand(-1, 2, 16)
    layers = range(LAYOUT.num_layers)
    return all(torch.equal(sequence.k(n), expected + n) and torch.equal(sequence.v(n), -expected - n) for n in layers)


def compute(cache: vmmkv.KVCache, ids: list[int], retention: tuple[vmmkv.Retention, ...] = ()) -> int:
    """Runs a request of these ids. Returns how many tokens were cached."""
    sequence = cache.sequence(token_ids=ids)
    write(sequence, ids, sequence.cached_tokens)
    assert holds(sequence, ids)
    sequence.commit(ids, retention=retention)
    sequence.free()
    return sequence.cached_tokens


def test_prompts_that_the_device_has_no_room_for_are_cached() -> None:
    cache = make()
    assert [compute(cache, ids) for ids in prompts(8)] == [0] * 8
    there = cache.stats()
    assert there.host_prefix_pages * PAGE == there.host_bytes > 0
    assert [compute(cache, ids) for ids in prompts(8)] == [47] * 8
    assert cache.stats().cached_tokens == 8 * 47
    sequence = cache.sequence(token_ids=[*prompts(8)[3], 7, 8], whole=False)
    assert sequence.length == sequence.cached_tokens == 48
    assert holds(sequence, prompts(8)[3])
    cache.check()
    cache.close()


def test_more_that_comes_to_the_host_during_a_start_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence has room for what was there before."""
    layout, extend, ids = vmmkv.KVLayout(2, 1, 64, torch.float32), vmmkv.Sequence.extend, [*range(100)]
    memory = {"max_bytes": 200 * PAGE, "device": "cpu", "page_size": PAGE, "host_bytes": 400 * PAGE}
    with vmmkv.KVCache(layout, 8, 400, **memory, large_frames=False) as cache:

        def leave_on_host(tokens: int) -> None:
            with cache.sequence(token_ids=ids[:tokens]) as sequence:
                sequence.commit(ids[:tokens])
            cache.trim()

        def meanwhile(sequence: vmmkv.Sequence, tokens: int) -> None:
            monkeypatch.setattr(vmmkv.Sequence, "extend", extend)
            leave_on_host(60)
            extend(sequence, tokens)

        leave_on_host(24)
        monkeypatch.setattr(vmmkv.Sequence, "extend", meanwhile)
        sequence = cache.sequence(token_ids=ids, whole=False)
        assert sequence.length == sequence.cached_tokens == 24
        cache.check()


@pytest.mark.parametrize("lowest", [None, 0, 30, 60])
def test_priorities_below_the_lowest_one_are_not_copied(lowest: int | None) -> None:
    cache = make(host_priority=lowest)
    for ids, priority in zip(prompts(8), (10, 50, 70, 90, 0, 30, 60, 80)):
        compute(cache, ids, (vmmkv.Retention(priority=priority),))
    cache.prefixes.evict(1 << 30)
    is_cached = [cache.sequence(token_ids=ids).cached_tokens > 0 for ids in prompts(4)]
    assert is_cached == [lowest is not None and priority >= lowest for priority in (10, 50, 70, 90)]
    for priority in (-1, 101, True, "30", 30.0):
        with pytest.raises(vmmkv.RetentionError, match="asked for priority"):
            make(host_priority=priority)


def test_a_full_host_keeps_what_is_needed_more() -> None:
    """The prefixes of a higher priority, and suspended sequences before all prefixes."""
    cache = make(host_bytes=20 * PAGE)
    for number, ids in enumerate(prompts(5)):
        compute(cache, ids, (vmmkv.Retention(priority=80 if number == 1 else 40),))
    cache.prefixes.evict(1 << 30)
    assert cache.stats().host_prefix_pages <= 20
    found = [cache.sequence(token_ids=ids, whole=False).cached_tokens > 30 for ids in prompts(5)]
    assert found == [False, True, False, False, True]
    sequence = cache.sequence(100)
    sequence.suspend()
    assert cache.stats().host_prefix_pages == 0
    cache.check()


def test_interrupted_requests_lose_nothing() -> None:
    """A timer interrupts prompts that evict others and load them from the host. What is found afterwards is right."""
    random, came = Random(), 0
    cache = make(25)
    until = time.monotonic() + 0.5 * ROUNDS
    while time.monotonic() < until:
        ids = random.choice(prompts(4))
        came += interrupted_after(functools.partial(compute, cache, ids), random.uniform(0, 0.002))
        compute(cache, random.choice(prompts(4)))
        cache.check()
    assert came
    cache.prefixes.evict(1 << 30)
    cache.host_tier.finish(1 << 30)  # type: ignore[union-attr]
    cache.prefixes.close()
    cache.pool.unstage()  # of an interruption within a driver call
    assert cache.pool.frames["held"].sum() == 0
    cache.close()


# ---------------------------------------------------------------------- suspended sequences


def test_what_is_away_takes_no_memory() -> None:
    cache = make(pages=30, host_bytes=32 * PAGE)
    first, ids = cache.sequence(100), [*range(100)]
    address = first.k(0).data_ptr()
    write(first, ids)
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.sequence(100)
    first.suspend()
    assert "suspended, 100 tokens on the host" in repr(first)
    for refused in (first.fork, lambda: first.extend(1), lambda: first.truncate(0), lambda: first.k(0)):
        with pytest.raises(vmmkv.SuspendedError):
            refused()
    second = cache.sequence(100)
    with pytest.raises(vmmkv.SuspendedError):
        cache.reorder([first, second], [1, 0])
    with pytest.raises(vmmkv.OutOfPagesError):
        first.resume()
    with pytest.raises(vmmkv.OutOfHostMemoryError, match="12 of 32"):
        second.suspend()
    second.free()
    first.resume()
    assert holds(first, ids)
    assert (first.k(0).data_ptr(), cache.stats().host_bytes) == (address, 0)
    cache.check()
    with pytest.raises(vmmkv.ArgumentError, match="host_bytes"):
        make(host_bytes=0).sequence(3).suspend()
    with pytest.raises(vmmkv.BudgetError):
        make(host_bytes="much")


def test_slots_of_a_long_sequence_are_few_runs() -> None:
    cache = make(host_bytes=100 * PAGE)
    slots = cache.host_tier.slots  # type: ignore[union-attr]
    taken = slots.take([40, 3, 20])
    assert [len(runs) for runs in taken] == [3, 1, 2]
    slots.give([taken[0]], Fence())
    assert slots.made == 32
    assert [len(runs) for runs in slots.take([16])] == [1]
    slots.give(taken[1:], Fence())
