"""What sequences take: those that are forked, or put into another order, memory for what they share once; and large
frames, as the documentation says.

That each of them holds its own tokens, whatever fails, is for `test_core.py` and `test_core_reorder.py` to say.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.core.pool import LARGE

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
TOKENS = 8
"""Of a page."""
WIDE = vmmkv.KVLayout(3, [2, 6, 2], 16, torch.float32, layers_per_range=1)
"""Ranges of 16, 5 1/3 and 16 tokens in a page."""

pytestmark = pytest.mark.usefixtures("undebugged")


def make(pages: int = 100, layout: vmmkv.KVLayout = LAYOUT, **options: object) -> tuple[vmmkv.KVCache, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    options = {"max_bytes": pages * driver.page_size, "lookahead": 0, **options}
    return on_driver(driver, vmmkv.KVCache, layout, 40, 100 * TOKENS, **options), driver


def frames(driver: FaultyDriver) -> tuple[int, int]:
    """Large frames, and single ones, that there are."""
    sizes = [driver.sizes[handle] for handle in driver.handles]
    assert set(sizes) <= {1, LARGE}
    return sizes.count(LARGE), sizes.count(1)


def used(cache: vmmkv.KVCache) -> int:
    cache.check()
    return cache.stats().pages["used"]


def shared(cache: vmmkv.KVCache) -> int:
    return int((cache.page_map() == vmmkv.SHARED_PAGE).sum())


@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["one range", "three"])
def test_a_fork_takes_a_page_where_one_is_partly_full(layout: vmmkv.KVLayout) -> None:
    cache, _ = make(400, layout, large_frames=False)
    for tokens in random.sample(range(1, 30 * TOKENS), 10):
        parent = cache.sequence(tokens)
        before = used(cache)
        child = parent.fork()
        partly = sum(tokens * record % cache.page_size > 0 for record in layout.record_bytes)
        assert used(cache) == before + partly
        assert shared(cache) == sum(tokens * record // cache.page_size for record in layout.record_bytes)
        grandchild = child.fork()
        parent.free()
        assert used(cache) == before + partly
        cache.free([child, grandchild])
        assert used(cache) == shared(cache) == 0


def test_whole_large_frames_are_shared_and_others_copied() -> None:
    begun = random.randint(1, LARGE - 1)
    cache, _ = make(200)
    parent = cache.sequence(2 * LARGE * TOKENS)
    parent.truncate((LARGE + begun) * TOKENS)
    child = parent.fork()
    assert child.length == (LARGE + begun) * TOKENS
    assert shared(cache) == LARGE
    assert used(cache) == 2 * LARGE + begun


def test_beams_that_were_forked_copy_and_map_nothing() -> None:
    cache, _ = make(large_frames=False)
    first = cache.sequence(50)
    beams = [first, *cache.fork_many(first, 3)]
    cache.extend(beams, 3)
    before = used(cache), cache.stats().driver_calls["map"].count
    for indices in ([1, 0, 2, 3], [2, 2, 2, 3], [1, 2, 3, 0], [3, 3, 3, 3]):
        cache.reorder(beams, indices)
    assert (used(cache), cache.stats().driver_calls["map"].count) == before


def test_what_is_no_order_is_refused() -> None:
    (cache, _), (other, _) = make(), make()
    one, two, guest, stranger = cache.sequence(10), cache.sequence(20), cache.sequence(3, tenant="a"), other.sequence(5)
    one.k(0).fill_(1)
    for sequences, indices, error in [
        ([one, two], [0], ValueError),
        ([one, two], [0, 2], vmmkv.OutOfRangeError),
        ([one, two], [0, -1], vmmkv.OutOfRangeError),
        ([one, one], [0, 0], ValueError),
        ([one, stranger], [0, 0], ValueError),
        ([one, guest], [1, 1], vmmkv.UnsupportedError),
    ]:
        with pytest.raises(error):
            cache.reorder(sequences, indices)
    cache.reorder([], [])
    assert (one.k(0) == 1).all()
    two.release_before(15)
    with pytest.raises(vmmkv.UnsupportedError, match="release_before"):
        cache.reorder([two, one], [1, 0])
    two.free()
    with pytest.raises(vmmkv.UseAfterFreeError):
        cache.reorder([one, two], [1, 0])


# ---------------------------------------------------------------------- large frames


def test_a_prompt_takes_as_many_pages_as_without() -> None:
    pages = random.randint(1, 100)
    for options, large in (({}, pages // LARGE), ({"large_frames": False}, 0)):
        cache, driver = make(**options)
        sequence = cache.sequence(random.randint((pages - 1) * TOKENS + 1, pages * TOKENS))
        assert frames(driver) == (large, pages - large * LARGE)
        assert used(cache) == pages
        assert (cache.page_map() == sequence.number).sum() == pages


@pytest.mark.parametrize("options", [{"max_tokens": 800, "max_bytes": None}, {"large_frames": False}], ids=str)
def test_there_are_none_where_promises_are_to_the_page(options: dict[str, object]) -> None:
    cache, driver = make(200, **options)
    cache.sequence(400)
    assert frames(driver)[0] == 0


def test_who_grows_token_by_token_has_single_pages() -> None:
    cache, driver = make()
    sequence = cache.sequence(1)
    while sequence.length < 50 * TOKENS:
        sequence.extend(random.randint(1, 2 * TOKENS))
    assert frames(driver)[0] == 0


def test_who_is_truncated_into_one_keeps_it_until_it_grows_or_ends() -> None:
    cache, driver = make()
    sequence = cache.sequence(3 * LARGE * TOKENS)
    begun = random.randint(1, LARGE * TOKENS - 1)  # of the second one
    sequence.truncate(LARGE * TOKENS + begun)
    assert used(cache) == 2 * LARGE
    changes = driver.changes
    sequence.extend(LARGE * TOKENS - begun)
    assert driver.changes == changes
    assert used(cache) == 2 * LARGE
    sequence.release_before(LARGE * TOKENS + begun)
    assert used(cache) == LARGE
    sequence.free()
    assert used(cache) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kept", [1, LARGE * TOKENS - 1])
def test_truncated_tokens_are_not_filled_before_other_streams_have_read_them(kept: int, large: bool, seed: int) -> None:
    """Whether the truncation gives a page up or not."""
    device = SimulatedDevice(random.Random(seed))
    memory = {"max_bytes": 3 * LARGE * device.page_size, "scrub": True, "large_frames": large}
    cache = on_driver(device, vmmkv.KVCache, LAYOUT, 1, 999, **memory)
    sequence = cache.sequence(LARGE * TOKENS)
    device.finish()
    last = sequence.k(0)[-1]
    last.fill_(3)
    read: list[float] = []
    sequence.record_stream(device.streams[1])
    device.streams[1].submit(lambda: read.append(ctypes.c_float.from_address(last.data_ptr()).value))
    sequence.truncate(kept)
    sequence.extend(LARGE * TOKENS - kept)
    device.finish()
    assert read == [3]
    assert not last.any()
