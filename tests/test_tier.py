"""The host tier against a plain model, on a device whose work runs late, with calls that fail."""

from __future__ import annotations

import threading
from contextlib import suppress
from random import Random

import pytest
import torch
from conftest import ROUNDS, join
from core_rows import Row, check_all, new_cache, new_pool, token_at
from tier_machine import TierMachine, host_memory  # noqa: F401

from vmmkv.core.reordering import reorder
from vmmkv.driver.fence import Fence
from vmmkv.errors import OutOfHostMemoryError, OutOfPagesError, OutOfRowsError, SuspendedError
from vmmkv.tier.host_tier import HostTier


@pytest.mark.usefixtures("host_memory")
@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
def test_any_operations_in_any_order(faults: bool) -> None:
    for _ in range(30 * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            TierMachine(Random(seed), faults=faults).run(100)
        except BaseException as error:
            error.add_note(f"TierMachine(Random({seed}), faults={faults}).run(100)")
            raise


def host_tier(host_pages: int, *, pages: int = 200) -> HostTier:
    """The host tier of a cache on host memory."""
    pool = new_pool(pages)
    return HostTier(new_cache(pool, large=False), host_pages * pool.driver.page_size)


def test_pages_of_a_suspended_sequence_are_for_others() -> None:
    random, tier = Random(1), host_tier(60, pages=40)
    rows = []
    for _ in range(2):  # of 29 pages each
        row = Row(tier.cache.start(75))
        row.write(random, 0)
        tier.suspend(row.sequence)
        rows.append(row)
        if len(rows) == 1:
            first = row.sequence
            address = token_at(tier.cache, first.row, 0, 0)
    assert tier.cache.pool.word("used") == 0
    tier.resume(rows[0].sequence)
    assert token_at(tier.cache, first.row, 0, 0) == address
    rows[0].verify()
    with pytest.raises(OutOfPagesError):
        tier.resume(rows[1].sequence)
    assert rows[1].sequence.length == 75
    first.free()
    tier.resume(rows[1].sequence)
    rows[1].verify()
    check_all(tier.cache.pool, tier.cache)


def test_a_suspended_sequence_is_not_reordered() -> None:
    tier = host_tier(40)
    one, two = tier.cache.start(10), tier.cache.start(12)
    tier.suspend(one)
    with pytest.raises(SuspendedError):
        reorder(tier.cache, [one, two], [1, 0])
    tier.resume(one)
    assert (one.length, two.length) == (10, 12)


def test_without_host_memory_a_sequence_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = host_tier(40)
    row = Row(tier.cache.start(50))
    row.write(Random(), 0)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no memory can be pinned")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(OutOfHostMemoryError, match="pinned"):
            tier.suspend(row.sequence)
    assert tier.used == tier.slots.made == 0
    row.verify()
    row.sequence.extend(1)


def test_slots_of_a_long_sequence_are_few_runs() -> None:
    tier = host_tier(100)
    taken = tier.slots.take([40, 3, 20])
    assert [len(runs) for runs in taken] == [3, 1, 2]
    tier.slots.give([taken[0]], Fence())
    assert tier.slots.made * tier.slots.page_size == 32 * tier.slots.page_size
    assert [len(runs) for runs in tier.slots.take([16])] == [1]


def test_threads_with_sequences_of_their_own() -> None:
    seed, tier = Random().randrange(1 << 32), host_tier(90, pages=90)
    errors: list[BaseException] = []

    def work(random: Random) -> None:
        live, away = list[Row](), list[Row]()
        try:
            for _ in range(300 * ROUNDS):
                with suppress(OutOfPagesError, OutOfHostMemoryError, OutOfRowsError):
                    if not live + away or (len(live + away) < 2 and random.random() < 0.5):
                        live.append(Row(tier.cache.start(random.choice([1, 20, 60]))))
                        live[-1].write(random, 0)
                    elif live and random.random() < 0.5:
                        tier.suspend(live[0].sequence)
                        away.append(live.pop(0))
                    elif away:
                        tier.resume(away[0].sequence)
                        live.append(away.pop(0))
                        live[-1].verify()
                        if random.random() < 0.3:
                            live.pop().sequence.free()
            for row in live + away:
                row.sequence.free()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            errors.append(error)

    threads = [threading.Thread(target=work, args=(Random(seed + index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    if errors:
        raise errors[0]
    assert tier.used == 0
    check_all(tier.cache.pool, tier.cache)
