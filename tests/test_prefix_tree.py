"""The compiled prefix tree: any operations in any order, against plain models, and what each of them promises."""

from __future__ import annotations

from array import array
from random import Random

import pytest
import torch
from conftest import ROUNDS, randoms, small_driver
from prefix_machine import Ids, PrefixMachine, Tables, common, some_ids

from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.errors import ArgumentError, UnsupportedError, UseAfterFreeError
from vmmkv.layout import KVLayout
from vmmkv.prefix import entries
from vmmkv.prefix.prefixes import TOKENS, WORDS, Prefixes
from vmmkv.prefix.retention import Retention

PAGE = 4
"""Tokens of a page, in `LAYOUT`."""
LAYOUT = KVLayout(2, 1, 64, torch.float32)


@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
def test_any_operations_in_any_order(faults: bool) -> None:
    for random in randoms(25):
        PrefixMachine(random, faults=faults).run(120)


def new(pages: int = 400, rows: int = 8, tokens: int = 200, layout: KVLayout = LAYOUT, **options: object) -> Prefixes:
    """A tree on a cache of its own."""
    pool = Pool(small_driver("cpu"), pages)
    return Prefixes(Cache(pool, layout.record_bytes, rows, tokens, **{"large": False, **options}), events=1 << 16)  # type: ignore[arg-type]


def found(tree: Prefixes, ids: Ids, key: int = 0) -> int:
    """How many of the first ids a look-up finds."""
    given, out = array("q", ids), array("q", bytes(8 * WORDS))
    entries.look_up(tree.address, key, given.buffer_info()[0], len(ids), out.buffer_info()[0])
    return out[TOKENS]


def test_all_that_was_committed_is_found_to_the_token(random: Random) -> None:
    """Nothing is evicted, and no row goes to another sequence: hits are those of a list of all that was committed."""
    for large in (False, True):
        tree, known, live = new(8000, 150, 150, large=large), [], []
        for _ in range(150):
            ids = some_ids(random, known, 150)
            sequence, cached = tree.start(ids)
            assert cached == max((common(ids[:-1], each) for each in known), default=0)
            tree.commit(sequence, ids)
            known.append(ids)
            live.append(sequence)
        random.shuffle(live)
        while live:
            live.pop().free()
            for _ in range(4):
                ids = some_ids(random, known, 150)
                assert found(tree, ids) == max(common(ids, each) for each in known)
        Tables(tree).check()


def test_the_least_needed_goes_first() -> None:
    """By priority, then by last use, each behind all that follow it; a priority falls back when its time is over."""
    now = 0
    pool = Pool(small_driver("cpu"), 100)
    tree = Prefixes(Cache(pool, LAYOUT.record_bytes, 8, 200, large=False), clock=lambda: now)
    prompts = {name: [number] * 3 * PAGE for number, name in enumerate(("high", "short", "old", "new", "low"))}
    kept = {"high": [Retention(priority=80)], "short": [Retention(priority=90, seconds=1)],
            "low": [Retention(priority=10)]}  # fmt: skip
    for name, ids in prompts.items():
        sequence, _ = tree.start(ids)
        tree.commit(sequence, ids, kept.get(name, ()))
        sequence.free()
    for row in range(8):
        tree.cache.start(row=row).free()
    found(tree, prompts["old"])

    def there() -> set[str]:
        return {name for name, ids in prompts.items() if child(tree, ids)}

    def child(tree: Prefixes, ids: Ids) -> bool:
        tables = Tables(tree)
        firsts = {int(n["first"]) for n in (tables.nodes[each] for each in tables.children(tables.children(0)[0]))}
        return ids[0] in firsts

    assert tree.evict(3) == 3
    assert there() == {"high", "short", "old", "new"}
    assert tree.evict(2) == 2
    assert there() == {"high", "short", "old", "new"}
    assert found(tree, prompts["new"]) == PAGE  # used again
    assert tree.evict(3) == 3
    assert there() == {"high", "short", "new"}
    now = 2_000_000_000
    assert tree.evict(3) == 3
    assert there() == {"high", "new"}
    assert tree.evict(1) == 1
    assert there() == {"high"}


@pytest.mark.parametrize("head_dim", [64, 36])
def test_only_frames_that_live_rows_use_are_left_by_an_eviction(random: Random, head_dim: int) -> None:
    """Also where several rows have computed the same tokens, on frames of different sizes, and some have ended."""
    for _ in range(20 * ROUNDS):
        layout = KVLayout(2, 1, head_dim, torch.float32, layers_per_range=random.choice([1, None]))
        tree = new(4000, 8, 400, layout, large=random.random() < 0.7)
        prompt, live, windows = [random.randrange(9) for _ in range(380)], [], []
        for _ in range(random.randint(2, 8)):
            ids = [*prompt[: random.randint(1, 380)], random.randrange(9, 18)]
            sequence, _ = tree.start(ids, whole=random.random() < 0.6)
            while sequence.length < len(ids):
                sequence.extend(random.randint(1, len(ids) - sequence.length))
            live.append((sequence, ids))
            if random.random() < 0.3:
                tree.commit(sequence, ids)
        for sequence, ids in live:
            tree.commit(sequence, ids)
        for _ in range(random.randint(1, len(live))):
            sequence, ids = live.pop(random.randrange(len(live)))
            if random.random() < 0.7:
                sequence.free()
            else:
                sequence.release_before(random.randint(1, len(ids)))
                windows.append(sequence)
        tree.evict(1 << 30)
        if not (windows and tree.cache.state[0]["large"]):  # frames of a window may need those in front of them
            assert (tree.pool.frames["users"][tree.frames()] > 0).all()
        assert all(found(tree, ids) == len(ids) for _, ids in live)
        Tables(tree).check()
        check(tree.pool, [tree.cache], Tables(tree).held())


def test_a_commit_of_other_tokens_is_refused() -> None:
    tree, ids = new(), [*range(20)]
    sequence, _ = tree.start(ids)
    tree.commit(sequence, ids)
    with pytest.raises(ValueError, match="other token ids"):
        tree.commit(sequence, [*range(10), 99])
    with pytest.raises(ArgumentError, match="fewer"):
        tree.commit(sequence, [*range(21)])
    sequence.truncate(10)
    sequence.extend(10)
    tree.commit(sequence, [*range(10), *range(50, 60)])
    assert found(tree, [*range(10), *range(50, 60)]) == 20
    sequence.release_before(8)
    with pytest.raises(UnsupportedError):
        tree.commit(sequence, ids)
    with pytest.raises(ArgumentError, match="not started for reuse"):
        tree.commit(tree.cache.start(5), [*range(5)])
    sequence.free()
    with pytest.raises(UseAfterFreeError):
        tree.commit(sequence, ids)
    Tables(tree).check()


def test_after_lost_notes_nothing_wrong_is_found(random: Random) -> None:
    tree, ids = new(rows=2), [*range(50)]
    sequence, _ = tree.start(ids)
    tree.commit(sequence, ids)
    for _ in range(200):  # more than the ring holds
        sequence.truncate(30)
        sequence.extend(20)
    assert found(tree, ids) == 48
    tree.commit(sequence, ids[:30] + [7] * 20)
    assert found(tree, ids[:30] + [7] * 20) == 50
    Tables(tree).check()
    check(tree.cache.pool, [tree.cache], Tables(tree).held())
