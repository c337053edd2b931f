"""What a cache says of shared and cached tokens, against sets of what lies where."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS

import vmmkv
from vmmkv.snapshot import frames_on

PAGE = 4096
LAYOUTS = [
    vmmkv.KVLayout(2, 2, 16, torch.float32),  # 8 tokens in a page
    vmmkv.KVLayout(3, [2, 1, 2], 24, torch.float32, layers_per_range=1),  # records that do not divide pages
]
NAMES: list[dict[str, Any]] = [{}, {"salt": "a"}, {"adapter": 3}, {"tenant": b"b"}]


def places(sequence: vmmkv.Sequence) -> Counter[tuple[int, int]]:
    """Bytes of its tokens on each physical page: (frame, page within a large frame)."""
    cache, found = sequence.cache, Counter[tuple[int, int]]()
    for part, record in enumerate(cache.layout.record_bytes):
        begin, end = sequence.start * record, sequence.length * record
        pages = range(begin // PAGE, -(-end // PAGE))
        for page, frame in zip(pages, frames_on(cache, sequence.row, part, pages.start, pages.stop).tolist()):
            found[frame, page % 16] += min(end, page * PAGE + PAGE) - max(begin, page * PAGE)
    return found


def check(cache: vmmkv.KVCache, live: dict[vmmkv.Sequence, tuple[Any, list[int], int]]) -> None:
    """Statistics, and what is known of each sequence."""
    stats, pages = cache.stats(), Counter[tuple[int, int]]()
    for sequence in live:
        pages |= places(sequence)  # of a page that sequences share, those with most of their tokens there
    used = stats.pages["used"] * PAGE
    assert stats.waste == pytest.approx(1 - pages.total() / used if used else 0)
    assert stats.waste >= 0
    frames = cache.pool.frames[: cache.pool.word("fresh")]
    assert stats.prefix_pages == frames["pages"][frames["held"] > 0].sum()
    for sequence, (names, ids, committed) in live.items():
        named, known = cache.known(sequence)
        if sequence.start:
            assert named is None
            assert not len(known)
            continue
        assert sequence.is_reusable
        assert named == (names.get("salt"), names.get("adapter"))
        assert ids[: len(known)] == known.tolist()
        assert len(known) >= committed


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one range", "ranges"])
@pytest.mark.parametrize("large", [False, True], ids=["small frames", "large frames"])
def test_shared_and_cached_tokens_are_counted_once(layout: vmmkv.KVLayout, large: bool) -> None:
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random, shared, hits = Random(seed), 0, 0
    cache = vmmkv.KVCache(layout, 8, 400, max_bytes=600 * PAGE, device="cpu", page_size=PAGE, large_frames=large)
    live: dict[vmmkv.Sequence, tuple[Any, list[int], int]] = {}
    prompts: list[list[int]] = [[]]
    for _ in range(150 * ROUNDS):
        what, sequence = random.random(), random.choice([*live, None])
        with suppress(vmmkv.OutOfRowsError, vmmkv.OutOfPagesError):
            if what < 0.4 or sequence is None:
                known = random.choice(prompts)
                ids = known[: random.randint(0, len(known))] + random.choices([0, 1], k=random.randint(1, 60))
                names, before = random.choice([{}, {}, {}, *NAMES]), cache.stats().pages["used"]
                expected = cache.shared_pages(ids, **names)
                new = cache.sequence(token_ids=np.array(ids), **names)
                live[new] = names, ids, new.cached_tokens
                pages = sum(-(-len(ids) * record // PAGE) for record in layout.record_bytes)
                assert large or cache.stats().pages["used"] == before + pages - expected
                shared, hits = shared + expected, hits + new.cached_tokens
                new.commit(ids)
                live[new] = names, ids, len(ids)
                prompts.append(ids)
            elif what < 0.5:
                live[sequence.fork()] = live[sequence]
            elif what < 0.6:
                names, ids, committed = live[sequence]
                tokens = random.randint(sequence.start, sequence.length)
                sequence.truncate(tokens)
                live[sequence] = names, ids[:tokens], min(tokens, committed)
            elif what < 0.65:
                sequence.release_before(random.randint(sequence.start, sequence.length))
            elif what < 0.7:
                cache.trim()
            else:
                sequence.free()
                del live[sequence]
        check(cache, live)
    assert shared
    assert hits
    for sequence in [*live]:
        sequence.free()
    cache.trim()
    assert cache.stats().prefix_pages == 0
    cache.check()


def test_statistics_are_printed_as_a_small_table() -> None:
    with vmmkv.KVCache(LAYOUTS[0], 8, 400, max_bytes=600 * PAGE, device="cpu", page_size=PAGE) as cache:
        sequence = cache.sequence(20)
        for stats in (cache.stats(), cache.pool.stats()):
            lines = str(stats).splitlines()
            assert [line.split()[0] for line in lines] == [field.name for field in fields(stats)]
            assert max(map(len, lines)) <= 80
        assert "tokens               20" in str(cache.stats()).splitlines()
        sequence.free()
