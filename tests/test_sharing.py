"""Sequences that are forked: what they share takes memory once, and nobody can write to it but to a copy of its own.

That any of them hold their own tokens after any operations is for the state machine to say, and what becomes of calls
that fail, of interruptions and of streams that run late for `test_faults`, `test_interruption` and
`test_random_machines`.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.core.pool import LARGE

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
TOKENS = 8
"""Of a page."""
WIDE = vmmkv.KVLayout(3, [2, 6, 2], 16, torch.float32, layers_per_range=1)
"""Ranges of 16, 5 1/3 and 16 tokens in a page."""

pytestmark = pytest.mark.usefixtures("undebugged")


def make(pages: int = 100, rows: int = 8, layout: vmmkv.KVLayout = LAYOUT, **options: object) -> vmmkv.KVCache:
    driver = options.pop("driver", None) or FaultyDriver(small_driver("cpu"))
    options = {"large_frames": False, "lookahead": 0, **options}
    return on_driver(driver, vmmkv.KVCache, layout, rows, 100 * TOKENS, max_bytes=pages * driver.page_size, **options)


def write(sequence: vmmkv.Sequence, begin: int = 0) -> torch.Tensor:
    """Writes random numbers, token by token, from a token on; returns them."""
    values = torch.rand(sequence.length - begin)
    for layer in range(sequence.cache.layout.num_layers):
        for states in (sequence.k(layer), sequence.v(layer)):
            states[begin - sequence.start :] = values[:, None, None]
    return values


def check(sequence: vmmkv.Sequence, values: torch.Tensor) -> None:
    """A sequence holds these from its start on."""
    assert sequence.length - sequence.start == len(values)
    for layer in range(sequence.cache.layout.num_layers):
        for states in (sequence.k(layer), sequence.v(layer)):
            assert (states == values[:, None, None]).all()


def used(cache: vmmkv.KVCache) -> int:
    cache.check()
    return cache.stats().pages["used"]


def shared(cache: vmmkv.KVCache) -> int:
    return int((cache.page_map() == vmmkv.SHARED_PAGE).sum())


# ---------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["one range", "three"])
def test_a_fork_takes_a_page_where_one_is_partly_full(layout: vmmkv.KVLayout) -> None:
    cache = make(400, layout=layout)
    for tokens in Random().sample(range(1, 30 * TOKENS), 10):
        parent = cache.sequence(tokens)
        values, before = write(parent), used(cache)
        child = parent.fork()
        partly = sum(tokens * record % cache.page_size > 0 for record in layout.record_bytes)
        assert used(cache) == before + partly
        assert shared(cache) == sum(tokens * record // cache.page_size for record in layout.record_bytes)
        grandchild = child.fork()
        parent.free()
        assert used(cache) == before + partly
        check(child, values)
        check(grandchild, values)
        cache.free([child, grandchild])
        assert used(cache) == shared(cache) == 0


# ---------------------------------------------------------------------- who may write


def test_what_cannot_be_unshared_is_as_before() -> None:
    cache = make(pages=6)
    parent = cache.sequence(4 * TOKENS)
    values = write(parent)
    child = parent.fork()
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.unshare([child])
    for sequences, start, error in [
        ([child], 4 * TOKENS + 1, ValueError),
        ([child], -1, ValueError),
        ([child], 0.5, TypeError),
        ([child, child], 0, ValueError),
        ([None], 0, TypeError),
    ]:
        with pytest.raises(error):
            cache.unshare(sequences, start)
    check(child, values)
    cache.unshare([child], 2 * TOKENS)  # for two pages there is memory
    check(child, torch.cat([values[: 2 * TOKENS], write(child, 2 * TOKENS)]))
    check(parent, values)
    assert used(cache) == 6


# ---------------------------------------------------------------------- where it begins and ends


# ---------------------------------------------------------------------- what is refused


def test_a_fork_for_which_there_is_no_row_or_no_page_changes_nothing() -> None:
    """Also while somebody holds the error, and with it the frames of the calls."""
    cache = make(pages=10, rows=4)
    kept = [cache.sequence(4 * TOKENS + 1), cache.sequence(3 * TOKENS)]
    values = write(kept[0])

    def state() -> object:
        return cache.stats().rows["live"], used(cache), shared(cache), [sequence.capacity for sequence in kept]

    before = state()
    with pytest.raises(vmmkv.OutOfRowsError) as no_row:
        cache.fork_many(kept[0], 3)
    assert state() == before
    kept.append(cache.sequence(2 * TOKENS))
    before = state()
    with pytest.raises(vmmkv.OutOfPagesError) as no_page:
        kept[0].fork()
    assert state() == before
    child = kept[1].fork()  # at the end of a page it needs none
    assert child.length == 3 * TOKENS
    check(kept[0], values)
    del no_row, no_page


# ---------------------------------------------------------------------- frames


def test_whole_large_frames_are_shared_and_others_copied() -> None:
    begun = Random().randint(1, LARGE - 1)
    cache = make(200, large_frames=True)
    parent = cache.sequence(2 * LARGE * TOKENS)
    values = write(parent)
    parent.truncate((LARGE + begun) * TOKENS)
    child = parent.fork()
    assert shared(cache) == LARGE
    assert used(cache) == 2 * LARGE + begun
    check(child, values[: (LARGE + begun) * TOKENS])
    check(parent, values[: (LARGE + begun) * TOKENS])
