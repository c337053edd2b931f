"""Sequences that are forked: what they share takes memory once, and nobody can write to it but to a copy of its own.

That any of them hold their own tokens after any operations is for the state machine to say, and what becomes of calls
that fail, of interruptions and of streams that run late for `test_faults`, `test_interruption` and
`test_random_machines`.
"""

from __future__ import annotations

from collections.abc import Callable
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


def test_a_page_is_shared_while_several_sequences_hold_tokens_there() -> None:
    """Whatever they give up, and whoever ends."""
    cache = make()
    parent = cache.sequence(4 * TOKENS)
    write(parent)
    child = parent.fork()
    for change, expected in (
        (lambda: None, (4, 4)),
        (lambda: child.truncate(2 * TOKENS), (2, 4)),
        (lambda: parent.release_before(TOKENS), (1, 4)),
        (parent.free, (0, 2)),
    ):
        change()
        assert (shared(cache), used(cache)) == expected
    assert (cache.page_map() == child.number).sum() == 2


# ---------------------------------------------------------------------- who may write


def test_to_unshare_what_is_nobody_elses_takes_nothing() -> None:
    cache = make(pages=20)
    one, two = cache.sequence(5 * TOKENS), cache.sequence()
    calls = cache.stats().driver_calls
    cache.unshare([one, two])
    assert cache.stats().driver_calls == calls


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


def test_who_is_the_last_to_have_a_page_needs_no_copy() -> None:
    """Also where no page is left, and those of the others are still in their rows."""
    cache = make(pages=3, rows=3)
    parent = cache.sequence(3 * TOKENS)
    values = write(parent)
    cache.free(cache.fork_many(parent, 2))
    parent.truncate(2 * TOKENS + 3)
    parent.extend(5)
    check(parent, torch.cat([values[: 2 * TOKENS + 3], write(parent, 2 * TOKENS + 3)]))
    assert used(cache) == 3


# ---------------------------------------------------------------------- where it begins and ends


def test_a_sequence_without_tokens_has_children_without_memory() -> None:
    cache, other = make(), make()
    parent, gone = cache.sequence(), cache.sequence(10)
    gone.free()
    children = cache.fork_many(parent, 3)
    assert [child.length for child in children] == [0, 0, 0]
    assert used(cache) == shared(cache) == 0
    assert cache.fork_many(parent, 0) == []
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (vmmkv.UseAfterFreeError, gone.fork),
        (vmmkv.UseAfterFreeError, lambda: cache.fork_many(gone, 2)),
        (ValueError, lambda: other.fork_many(parent, 1)),
        (ValueError, lambda: cache.fork_many(parent, -1)),
        (TypeError, lambda: cache.fork_many(parent, 1.5)),  # type: ignore[arg-type]
        (TypeError, lambda: cache.fork_many("sequence", 1)),  # type: ignore[arg-type]
    ]
    for error, operation in refused:
        with pytest.raises(error):
            operation()
    assert cache.stats().rows["live"] == 4
    for child in [parent, *children]:
        child.extend(20)
        check(child, write(child))


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
