"""Guarantees: what an owner does not use is lent, and comes back when it is needed, whatever others do with it.

The reference is an account book in plain integers, which knows nothing of rows, frames, fences or prefixes.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch
from conftest import ROUNDS, on_driver, small_driver
from faulty import FaultyDriver, has_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice, Stream

import vmmkv
from vmmkv.errors import DriverError, OutOfPagesError
from vmmkv.memory.frames import LARGE
from vmmkv.space.mapper import Mapper

TOKENS = 8
"""In a page of 4 KiB."""
LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
MAX_SEQ_LEN = 160


class Rested(Mapper):
    """Works only when it is called."""

    def ring(self) -> None:
        pass


def pages(tokens: int) -> int:
    return -(-tokens // TOKENS)


@dataclass
class Entry:
    """One holder's line in the account book, and its sequences: by prompt the length of each."""

    guaranteed: int
    most: int
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return sum(map(pages, self.lengths.values()))


def can_have(book: list[Entry], entry: Entry, limit: int) -> int:
    """Pages that a holder can have beside those that it uses."""
    promised = sum(max(other.used, other.guaranteed) for other in book if other is not entry)
    return min(limit - promised, entry.most) - entry.used


class House:
    """Caches on one pool of a device whose work runs late, and the book of what each should be able to have."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.device = SimulatedDevice(self.chance)
        self.limit = self.chance.randint(24, 40)
        size = self.device.page_size
        self.pool = on_driver(self.device, vmmkv.FramePool, self.limit * size)
        self.pool.mapper = Rested(self.pool)
        self.book: list[Entry] = []
        self.caches: list[vmmkv.KVCache] = []
        self.live: dict[tuple[int, int], vmmkv.Sequence] = {}
        self.streams: dict[tuple[int, int], Stream] = {}
        self.away: dict[tuple[int, int], int] = {}
        """Lengths of those that are suspended, which nothing is needed for."""
        left = self.limit
        for lookahead in (0, self.chance.choice([0, 12]), 12):
            guaranteed = self.chance.randint(0, left // 2)
            left -= guaranteed
            most = self.chance.choice([self.limit, self.chance.randint(max(guaranteed, 1), self.limit)])
            self.book.append(Entry(guaranteed, most))
            options = {"guaranteed": guaranteed * size, "max_bytes": most * size, "lookahead": lookahead}
            common = {"pool": self.pool, "large_frames": False, "host_bytes": "1MiB", "host_priority": None}
            self.caches.append(vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, **common, **options))

    def prompt(self, index: int, number: int, length: int) -> np.ndarray:
        """Ids that begin as those of no other number do."""
        return np.arange(length) + (index * 100 + number) * MAX_SEQ_LEN

    def read(self, sequence: vmmkv.Sequence) -> None:
        """Has work on the device read all tokens, when it comes to that."""
        address, nbytes = sequence.k(0).data_ptr(), sequence.length * LAYOUT.token_bytes
        self.device.current.submit(lambda: self.device.touch(address, nbytes, lambda: None))

    def grow(self, index: int, number: int, length: int) -> None:
        """Starts or extends a sequence, which the book says whether it can be done."""
        entry, cache = self.book[index], self.caches[index]
        before = entry.lengths.get(number, 0)
        missing, available = pages(length) - pages(before), can_have(self.book, entry, self.limit)
        sequence = self.live.get((index, number))
        with pytest.raises(OutOfPagesError) if missing > available else nullcontext():
            if sequence is not None:
                sequence.extend(length - before)
            elif self.chance.random() < 0.7:
                sequence = cache.sequence(token_ids=self.prompt(index, number, length))
            else:
                sequence = cache.sequence(
                    length, expected_tokens=self.chance.choice([0, min(length + 20, MAX_SEQ_LEN)])
                )
        if missing > available or sequence is None:
            return
        self.live[index, number], self.streams[index, number] = sequence, self.device.current
        entry.lengths[number] = length
        self.read(sequence)

    def end(self, index: int, number: int) -> None:
        """Frees a sequence, known or not."""
        sequence, _ = self.live.pop((index, number)), self.streams.pop((index, number))
        length = self.book[index].lengths.pop(number)
        if self.chance.random() < 0.7:
            with suppress(vmmkv.ArgumentError):  # it was begun without ids
                sequence.commit(self.prompt(index, number, length))
        sequence.free()

    def suspend(self, index: int, number: int) -> None:
        self.live[index, number].suspend()
        self.away[index, number] = self.book[index].lengths.pop(number)

    def resume(self, index: int, number: int) -> None:
        """Brings one back, which the book says whether it can be done."""
        entry, length = self.book[index], self.away[index, number]
        is_refused = pages(length) > can_have(self.book, entry, self.limit)
        with pytest.raises(OutOfPagesError) if is_refused else nullcontext():
            self.live[index, number].resume()
        if not is_refused:
            entry.lengths[number] = self.away.pop((index, number))
            self.read(self.live[index, number])

    def step(self) -> None:
        index, number = self.chance.randrange(len(self.caches)), self.chance.randrange(4)
        own = self.streams.get((index, number))
        self.device.current = own or self.chance.choice(self.device.streams[:3])
        entry, what = self.book[index], self.chance.randrange(12)
        held = entry.lengths.get(number)
        if what < 7 and (index, number) in self.away:
            self.resume(index, number)
        elif what < 4 and held is None:
            self.grow(index, number, self.chance.choice([self.chance.randint(1, 100), 60]))
        elif what < 4 and held is not None:
            self.grow(index, number, min(held + self.chance.randint(0, 40), MAX_SEQ_LEN))
        elif what < 6 and held is not None:
            self.end(index, number)
        elif what == 6 and held is not None:
            entry.lengths[number] = self.chance.randint(0, held)
            self.live[index, number].truncate(entry.lengths[number])
        elif what == 7:
            self.device.run(self.chance.randint(1, 20))
        elif what == 8:
            while self.pool.mapper.work():
                pass
        elif what in (9, 10) and held is not None:
            self.suspend(index, number)
        elif what == 11 and self.chance.random() < 0.3:
            self.set_limit(self.chance.randint(20, 44))

    def set_limit(self, limit: int) -> None:
        """Sets the pool's limit, where what is used and guaranteed allows that."""
        fits = sum(max(entry.used, entry.guaranteed) for entry in self.book) <= limit
        try:
            self.pool.set_limit(limit * self.pool.page_size)
        except (OutOfPagesError, vmmkv.BudgetError):
            assert not fits
        else:
            assert fits
            self.limit = limit

    def check(self) -> None:
        for entry, cache in zip(self.book, self.caches):
            cache.check()
            assert cache.stats().pages["used"] == entry.used
        stats = self.pool.stats()
        assert stats.physical_bytes == self.device.num_pages * self.pool.page_size <= self.limit * self.pool.page_size


@settings(max_examples=25 * ROUNDS)
@given(st.integers(0, 1 << 32))
def test_a_book_of_plain_numbers_says_who_can_have_what(seed: int) -> None:
    """Growth succeeds where the book has room for it, and only there: what is guaranteed is never refused, whoever has
    borrowed it, and work that still reads what was borrowed keeps it until it is done."""
    house = House(seed)
    for _ in range(40):
        house.step()
        house.check()
    for index, entry in enumerate(house.book):  # all at once have what they are guaranteed
        while (room := entry.guaranteed - entry.used) > 0:
            number = next(number for number in range(100, 200) if number not in entry.lengths)
            house.grow(index, number, min(room, MAX_SEQ_LEN // TOKENS) * TOKENS)
            house.check()
            if house.caches[index].stats().rows["live"] == house.caches[index].max_sequences:
                break
    house.device.finish()


def test_what_an_owner_does_not_use_keeps_prefixes_of_others() -> None:
    """Until the owner needs it: then they go, and what is live stays, as do prefixes within one's own guarantee."""
    driver = small_driver("cpu")
    size = driver.page_size
    pool = on_driver(driver, vmmkv.FramePool, 24 * size)
    owner = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, guaranteed=20 * size, large_frames=False)
    borrower = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, large_frames=False)
    prompts = [np.arange(4 * TOKENS) + 1000 * number for number in range(6)]
    for prompt in prompts:
        with borrower.sequence(token_ids=prompt) as sequence:
            sequence.commit(prompt)
    assert all(sequence.cached_tokens >= 3 * TOKENS for sequence in begin(borrower, prompts))
    with pytest.raises(OutOfPagesError):  # to live tokens nothing is lent
        borrower.sequence(5 * TOKENS)
    live = borrower.sequence(token_ids=prompts[0])
    own = owner.sequence(20 * TOKENS)
    assert (own.length, live.length) == (20 * TOKENS, 4 * TOKENS)
    own.free()
    with owner.sequence(token_ids=prompts[5]) as sequence:
        sequence.commit(prompts[5])
    live.free()
    borrower.sequence(4 * TOKENS).free()
    assert all(sequence.cached_tokens >= 3 * TOKENS for sequence in begin(owner, prompts[5:]))


@pytest.mark.parametrize("how", ["grow", "adopt", "hit", "hit in part", "unshare"])
def test_nothing_is_lent_to_live_tokens(how: str) -> None:
    """However they would come to lie on the owner's pages: 8 of 20, where 10 of the others are taken."""
    driver = small_driver("cpu")
    pool = on_driver(driver, vmmkv.FramePool, 20 * driver.page_size)
    owner = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, guaranteed=8 * driver.page_size)
    borrower = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, large_frames=False)
    ids = np.arange(6 * TOKENS + 3)  # the last of which lie in the row's own page
    with borrower.sequence(token_ids=ids) as known, borrower.sequence(3 * TOKENS) as parked:
        known.commit(ids)
        assert parked.length
    live = borrower.sequence(10 * TOKENS, row=5)
    fork = live.fork()
    refused = {
        "grow": lambda: fork.extend(3 * TOKENS),
        "adopt": lambda: borrower.sequence(3 * TOKENS),
        "hit": lambda: borrower.sequence(token_ids=np.append(ids, 7)),
        "hit in part": lambda: borrower.sequence(token_ids=np.append(ids[: 4 * TOKENS], 7)),
        "unshare": lambda: borrower.unshare([fork], 7 * TOKENS),
    }[how]
    if how in ("grow", "unshare"):
        pool.trim()  # now there is memory, at least
    with pytest.raises(OutOfPagesError):
        refused()
    borrower.check()
    assert owner.sequence(8 * TOKENS).length == 8 * TOKENS


def lent() -> tuple[vmmkv.KVCache, vmmkv.KVCache]:
    """An owner of 8 pages of 20, who has none of them, and a borrower."""
    driver = small_driver("cpu")
    pool = on_driver(driver, vmmkv.FramePool, 20 * driver.page_size)
    options = {"pool": pool, "lookahead": 0, "large_frames": False}
    owner = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, guaranteed=8 * driver.page_size, **options)  # type: ignore[arg-type]
    return owner, vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, **options)  # type: ignore[arg-type]


def test_what_begins_on_whole_pages_alone_is_not_lent_either() -> None:
    """It needs no page, but what is known of it was lent, and is to be its own."""
    owner, borrower = lent()
    ids = np.arange(8 * TOKENS)
    with borrower.sequence(token_ids=ids) as known:
        known.commit(ids)
    live = borrower.sequence(8 * TOKENS, row=5)
    sequence = borrower.sequence(token_ids=np.append(ids[: 6 * TOKENS], 7), whole=False)
    assert sequence.cached_tokens == 0
    borrower.check()
    assert owner.sequence(8 * TOKENS).length == live.length


def test_a_refused_start_with_a_hit_keeps_its_row() -> None:
    """On a row with pages that were lent: the row is there again each time, also when all of them have been tried."""
    owner, borrower = lent()
    ids = np.arange(10 * TOKENS)
    live = borrower.sequence(token_ids=ids[:TOKENS])
    borrower.sequence(8 * TOKENS).free()  # what the hit would be laid on
    live.extend(9 * TOKENS)
    live.commit(ids)
    before = borrower.stats()
    for _ in range(borrower.max_sequences):
        with pytest.raises(OutOfPagesError):
            borrower.sequence(token_ids=np.append(ids[: TOKENS // 2], ids + len(ids)))
        borrower.check()
        assert borrower.stats().rows["live"] == before.rows["live"]
    owner.sequence(8 * TOKENS)


@pytest.mark.parametrize("failing", [False, True])
def test_a_row_whose_beginning_cannot_be_had_is_not_found_with_what_it_has_lost(failing: bool) -> None:
    """Behind what a sequence would begin with pages go first, which the owner is guaranteed; then it is refused."""
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 10 * driver.page_size)
    owner = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, guaranteed=6 * driver.page_size)
    borrower = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, lookahead=0, large_frames=False)
    ids, states = np.arange(3 * TOKENS + 1), torch.randn(3 * TOKENS + 1, 2, 16)
    with borrower.sequence(token_ids=ids) as known:
        known.k(0)[...] = states
        known.commit(ids)
    live = borrower.sequence(2 * TOKENS)
    if failing:
        live.truncate(TOKENS)  # and what it leaves is to go last
        driver.fail("unmap", skip=1)
    with pytest.raises(DriverError if failing else OutOfPagesError):
        borrower.sequence(token_ids=np.append(ids[:-1], 100))
    borrower.check()
    live.free()
    with owner.sequence(6 * TOKENS) as other:  # also on a page that the row has left, if it has
        other.k(0)[...] = 7
    again = borrower.sequence(token_ids=np.append(ids, 101), whole=False)
    assert again.cached_tokens == (3 * TOKENS if failing else len(ids))
    assert torch.equal(again.k(0), states[: again.cached_tokens])
    borrower.check()


def test_a_reordering_that_would_take_what_is_guaranteed_changes_nothing() -> None:
    """Where several are to share, and each needs a page of its own beside that."""
    owner, borrower = lent()
    source = borrower.sequence(10 * TOKENS + 3)
    others = [borrower.sequence() for _ in range(2)]
    with pytest.raises(OutOfPagesError):
        borrower.reorder([source, *others], [0, 0, 0])
    assert [each.length for each in (source, *others)] == [10 * TOKENS + 3, 0, 0]
    borrower.check()
    borrower.reorder([source, others[0]], [0, 0])
    assert others[0].length == source.length
    assert owner.sequence(8 * TOKENS).length == 8 * TOKENS


@pytest.mark.parametrize("guaranteed", [19, 20])
def test_the_page_behind_all_tails_is_nobody_elses(guaranteed: int) -> None:
    """A cache that has one takes it from what nobody uses, not from what another is guaranteed."""
    driver = small_driver("cpu")
    pool = on_driver(driver, vmmkv.FramePool, 20 * driver.page_size)
    owner = vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, guaranteed=guaranteed * driver.page_size)
    if guaranteed == 20:
        with pytest.raises(OutOfPagesError):
            vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, zero_tail=True)
    else:
        owner.sequence(20 * TOKENS).free()
        vmmkv.KVCache(LAYOUT, 8, MAX_SEQ_LEN, pool=pool, zero_tail=True).check()
    owner.check()
    assert owner.sequence(guaranteed * TOKENS).length == guaranteed * TOKENS


def test_the_rest_of_a_large_frame_in_which_no_token_is_left_is_not_lent() -> None:
    """Where the next token needs no new page, the whole frame is used again."""
    limit, frame = 3 * LARGE, LARGE * TOKENS
    pool = on_driver(small_driver("cpu"), vmmkv.FramePool, limit * 4096)
    owner = vmmkv.KVCache(LAYOUT, 2, 4 * frame, pool=pool, guaranteed=LARGE * 4096)
    holder = vmmkv.KVCache(LAYOUT, 1, 4 * frame, pool=pool, large_frames=True)
    other = vmmkv.KVCache(LAYOUT, 2, 4 * frame, pool=pool, large_frames=False)
    sequence = holder.sequence(frame)
    middle = frame // 2
    sequence.truncate(middle)
    sequence.release_before(middle)  # at the end of a page
    taken = other.sequence((LARGE + LARGE // 4) * TOKENS)
    with suppress(OutOfPagesError):
        holder.extend([sequence], 1)
    owner.sequence(frame)
    assert taken.length == (LARGE + LARGE // 4) * TOKENS
    for cache in owner, holder, other:
        cache.check()


def begin(cache: vmmkv.KVCache, prompts: list[np.ndarray]) -> list[vmmkv.Sequence]:
    """Sequences of prompts, one after another."""
    sequences = []
    for prompt in prompts:
        with cache.sequence(token_ids=prompt) as sequence:
            sequences.append(sequence)
    return sequences


def test_what_is_guaranteed_need_not_be_whole_large_frames() -> None:
    """Who begins on a row with one that it would need a part of, beside pages of another range, has single pages."""
    random, driver = Random(), FaultyDriver(small_driver("cpu"))
    layout = vmmkv.KVLayout(2, 2, 16, torch.float32, layers_per_range=1)  # 16 tokens in a page, of each range
    for _ in range(3 * ROUNDS):
        pages = random.randint(LARGE // 2 + 1, LARGE - 1)
        pool = on_driver(driver, vmmkv.FramePool, 5 * LARGE * driver.page_size)
        owner = vmmkv.KVCache(layout, 3, 2 * LARGE * 16, pool=pool, guaranteed=2 * pages * driver.page_size)
        other = vmmkv.KVCache(LAYOUT, 2, 5 * LARGE * TOKENS, pool=pool, large_frames=False)
        owner.sequence(LARGE * 16).free()
        held = other.sequence((5 * LARGE - 2 * pages) * TOKENS)
        with pytest.raises(OutOfPagesError):
            owner.sequence(pages * 16 + 1)
        owner.check()
        sequence = owner.sequence(pages * 16 - random.randint(0, 15))
        assert has_memory(sequence, driver)
        assert has_memory(held, driver)
        for cache in (owner, other):
            cache.check()
            cache.close()
        pool.close()
        assert not driver.handles


def test_who_is_suspended_has_nothing_that_is_not_lent() -> None:
    """Also of a row whose front was dropped, and whose pages were counted by how it may grow."""
    driver = small_driver("cpu")
    pool = on_driver(driver, vmmkv.FramePool, 20 * driver.page_size)
    with vmmkv.KVCache(LAYOUT, 1, MAX_SEQ_LEN, pool=pool, large_frames=False) as before:
        before.sequence(20 * TOKENS)  # so that there are free pages, and nobody needs the front
    owner = vmmkv.KVCache(LAYOUT, 2, MAX_SEQ_LEN, pool=pool, guaranteed=8 * driver.page_size)
    other = vmmkv.KVCache(LAYOUT, 2, MAX_SEQ_LEN, pool=pool, large_frames=False, host_bytes="1GiB")
    sequence = other.sequence(12 * TOKENS)
    sequence.k(0).fill_(7)
    sequence.release_before(4 * TOKENS)
    kept = other.sequence(4 * TOKENS)
    sequence.suspend()
    other.check()
    assert owner.sequence(8 * TOKENS).length == 8 * TOKENS
    kept.free()
    sequence.resume()
    assert (sequence.k(0) == 7).all()
    for cache in (owner, other):
        cache.check()


def beside_guarantees(options: dict[str, bool]) -> tuple[vmmkv.KVCache, vmmkv.KVCache]:
    """A cache that may suspend, and one on its pool that is guaranteed half of the pages, 16 that hold tokens."""
    driver = small_driver("cpu")
    pool = on_driver(driver, vmmkv.FramePool, (16 + options.get("zero_tail", False)) * driver.page_size)
    common = {"pool": pool, "lookahead": 0, "large_frames": False}
    mine = vmmkv.KVCache(LAYOUT, 3, MAX_SEQ_LEN, host_bytes="1MiB", **common, **options)  # type: ignore[arg-type]
    owner = vmmkv.KVCache(LAYOUT, 2, MAX_SEQ_LEN, guaranteed=8 * driver.page_size, **common)  # type: ignore[arg-type]
    return mine, owner


@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
@pytest.mark.parametrize("mapped", ["all", "some"])
def test_who_comes_back_to_pages_that_lie_there_still_asks_for_them(mapped: str, options: dict[str, bool]) -> None:
    """What lies behind its tokens goes where others are guaranteed it; who cannot have those themselves stays away."""
    mine, owner = beside_guarantees(options)
    sequence = mine.sequence(8 * TOKENS)
    sequence.k(0).fill_(7)
    sequence.truncate(3 * TOKENS)
    sequence.suspend()
    if mapped == "some":
        mine._rows.reclaimer.unmap_surplus({sequence.index: 2 * TOKENS})
    others = [mine.sequence(5 * TOKENS), mine.sequence(TOKENS)]
    with pytest.raises(OutOfPagesError, match=r"asked for 3 more pages .* 2 can be had"):
        sequence.resume()
    assert sequence.is_suspended
    mine.check()
    others.pop().free()
    sequence.resume()
    mine.check()
    assert (sequence.k(0) == 7).all()
    assert owner.sequence(8 * TOKENS).length == 8 * TOKENS
    owner.check()


@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
def test_who_comes_back_without_tokens_has_no_more_behind_it_than_it_may(options: dict[str, bool]) -> None:
    mine, owner = beside_guarantees(options)
    sequence = mine.sequence(8 * TOKENS)
    sequence.truncate(0)
    sequence.suspend()
    other = mine.sequence(6 * TOKENS)
    sequence.resume()
    mine.check()
    assert owner.sequence(8 * TOKENS).length == 8 * TOKENS
    sequence.extend(2 * TOKENS)
    owner.check()
    assert other.length == 6 * TOKENS
