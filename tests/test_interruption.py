"""Ctrl-C, finalizers and signal handlers in the middle of an operation: right books, or a cache that says it is not."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections import deque
from random import Random

import pytest
import torch
from conftest import on_driver, small_driver, some
from faulty import FaultyDriver, has_memory
from interruption import MONITOR, SOURCES, Interruption, disturbed, interrupt, interrupted, interrupted_after

import vmmkv
from vmmkv.rows import sharing
from vmmkv.torch import GrowableTensor


def books(cache: vmmkv.KVCache, driver: FaultyDriver) -> None:
    """What the cache says of itself is what the driver was asked for."""
    cache.check()
    stats = cache.stats()
    assert sum(stats.pages.values()) == driver.num_pages
    zero = (cache.page_map() == vmmkv.ZERO_PAGE).sum()
    assert stats.pages["used"] + stats.pages["surplus"] == len({*driver.mapped.values()}) - zero


def all_can_end(cache: vmmkv.KVCache, driver: FaultyDriver, zero_tail: bool) -> None:
    """When all sequences have ended nobody has anything, and all but a page of zeros goes back."""
    books(cache, driver)
    assert cache.stats().rows["live"] == 0
    cache.trim()
    assert driver.num_pages == zero_tail
    cache.close()


def nothing_is_left(driver: FaultyDriver) -> None:
    assert not driver.mapped
    assert driver.num_pages <= 1, "of a page in the making, or on its way back, nobody knows"


OPERATIONS = {
    "start": lambda cache, kept: cache.sequence(60),
    "start empty": lambda cache, kept: cache.sequence(),
    "extend": lambda cache, kept: kept[0].extend(60),
    "extend within": lambda cache, kept: kept[1].extend(1),
    "extend many": lambda cache, kept: cache.extend(kept[:2], [30, 5]),
    "extend from": lambda cache, kept: cache.extend([kept[2]], 60, starts=[50]),
    "truncate": lambda cache, kept: kept[0].truncate(3),
    "release": lambda cache, kept: kept[0].release_before(12),
    "fork": lambda cache, kept: kept[0].fork(),
    "fork many": lambda cache, kept: cache.fork_many(kept[3], 2),
    "extend a parent that was cut": lambda cache, kept: kept[4].extend(9),
    "extend a forked one that was cut": lambda cache, kept: kept[3].extend(9),
    "free a parent": lambda cache, kept: kept[4].free(),
    "free": lambda cache, kept: kept[0].free(),
    "free all": lambda cache, kept: cache.free(kept),
    "prewarm": lambda cache, kept: cache.prewarm(tokens=8),
    "trim": lambda cache, kept: cache.trim(),
    "stats": lambda cache, kept: cache.stats(),
    "close": lambda cache, kept: cache.close(),
}


EVERYTHING = 10**9


def some_lines(lines: int | None, few: int = 5) -> list[int]:
    """Of an operation's lines any few."""
    assert lines, "nothing that could be interrupted"
    return [line + 1 for line in some(lines, few)]


@pytest.mark.few(36)
@pytest.mark.parametrize("policy", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("device", ["cpu"])
def test_an_interruption_at_any_line(make_cache, device: str, name: str, policy: dict) -> None:
    """Afterwards every sequence is as before or as after; what is refused is refused by name; close gives all back."""

    def prepare() -> tuple[FaultyDriver, vmmkv.KVCache, list[vmmkv.Sequence]]:
        driver = FaultyDriver(small_driver(device))
        driver.unmaps_anything = True
        cache = make_cache(max_sequences=8, pages=30, driver=driver, layers_per_range=2, **policy)
        cache.free([cache.sequence(30), cache.sequence(5)])
        kept = [cache.sequence(20), cache.sequence(2), cache.sequence()]
        for sequence in kept:
            sequence.k(0).fill_(sequence.length)
        kept += [kept[0].fork(), parent := kept[0].fork(), parent.fork()]
        for cut in kept[3:5]:
            cut.truncate(7)
        return driver, cache, kept

    def check(line: int) -> int | None:
        driver, cache, kept = prepare()
        lengths, values = [sequence.length for sequence in kept], [20, 2, 0, 20, 20, 20]
        lines = interrupted(lambda: OPERATIONS[name](cache, kept), line)
        try:
            books(cache, driver)
        except (vmmkv.InterruptedChangeError, vmmkv.UseAfterFreeError):
            cache.close()
        else:
            for value, sequence, length in zip(values, kept, lengths):
                assert "gone" not in repr(sequence) or name.startswith("free")
                if "gone" not in repr(sequence):
                    length = min(length, sequence.length)
                    assert (sequence.k(0)[: max(length - sequence.start, 0)] == value).all()
                    sequence.extend(sequence.capacity - sequence.length)
                    assert has_memory(sequence, driver)
            cache.free(kept)
            cache.sequence(60).free()
            all_can_end(cache, driver, "zero_tail" in policy)
        nothing_is_left(driver)
        return lines

    for line in some_lines(check(EVERYTHING)):
        assert check(line) is None


@pytest.mark.parametrize("sources", [MONITOR, SOURCES], ids=["around", "within"])
@pytest.mark.parametrize(
    "name", ["start", "extend", "extend many", "extend a forked one that was cut", "trim", "stats"]
)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_signal_handler_that_uses_the_cache_at_any_line(make_cache, device: str, name: str, sources: str) -> None:
    """And that does not catch what refuses it: that interrupts the operation, as Ctrl-C does."""

    def check(line: int) -> int | None:
        driver = FaultyDriver(small_driver(device))
        driver.unmaps_anything = True
        cache = make_cache(max_sequences=8, pages=30, driver=driver, layers_per_range=2)
        cache.free([cache.sequence(30), cache.sequence(5)])
        kept = [cache.sequence(20), cache.sequence(2), cache.sequence()]
        for sequence in kept:
            sequence.k(0).fill_(sequence.length)
        kept += [kept[0].fork(), kept[0].fork()]
        kept[3].truncate(7)
        try:
            lines = disturbed(lambda: OPERATIONS[name](cache, kept), line, cache.trim, sources)
        except (vmmkv.BusyError, vmmkv.DriverError):
            lines = None
        try:
            books(cache, driver)
            for value, sequence in zip([20, 2, 0, 20, 20], kept):
                assert "gone" not in repr(sequence)
                assert (sequence.k(0)[: min(value, sequence.length, 7)] == value).all()
                sequence.extend(1)
                assert has_memory(sequence, driver)
            books(cache, driver)
        except vmmkv.InterruptedChangeError:
            assert sources == SOURCES  # nothing is half done between a call and the next
        cache.close()
        assert not driver.mapped
        return lines

    lines = check(EVERYTHING)
    assert lines
    for line in range(lines) if sources == MONITOR else some(lines, 5):
        assert check(line + 1) is None


@pytest.mark.few(9)
@pytest.mark.parametrize("policy", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("indices", [[1, 0, 2, 3, 4], [0, 0, 0, 4, 3], [3, 2, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("device", ["cpu"])
def test_an_interruption_of_a_reordering(
    make_cache, device: str, indices: list[int], share: bool, policy: dict
) -> None:
    """Sequences that were to change hold what they did, or what they were to hold, or are at their end."""

    def check(line: int) -> int | None:
        driver = FaultyDriver(small_driver(device))
        driver.unmaps_anything = True
        cache = make_cache(max_sequences=6, pages=60, driver=driver, layers_per_range=2, **policy)
        kept = [cache.sequence(20), cache.sequence(27), cache.sequence()]
        for sequence in kept:
            sequence.k(0).normal_()
        kept += [kept[0].fork(), kept[1].fork()]
        kept[3].extend(9)
        kept[3].k(0)[20:].normal_()
        before = [sequence.k(0).clone() for sequence in kept]
        lines = interrupted(lambda: cache.reorder(kept, indices, share=share), line)
        try:
            books(cache, driver)
        except vmmkv.InterruptedChangeError:
            cache.close()
        else:
            for number, (sequence, index) in enumerate(zip(kept, indices)):
                if "gone" in repr(sequence):
                    assert number != index, "it was not to change"
                    continue
                assert any(torch.equal(sequence.k(0), before[each]) for each in (number, index))
                sequence.extend(5)
                assert has_memory(sequence, driver)
            cache.free(kept)
            all_can_end(cache, driver, "zero_tail" in policy)
        nothing_is_left(driver)
        return lines

    for line in some_lines(check(EVERYTHING)):
        assert check(line) is None


@pytest.mark.parametrize("policy", [{}, {"zero_tail": True}, {"large_frames": True}], ids=str)
@pytest.mark.parametrize("device", ["cpu"])
def test_an_interruption_of_the_first_fork(make_cache, device: str, policy: dict) -> None:
    """Nothing was ever shared before, so that nothing is looked for that may be; the row is marked all the same."""

    def check(line: int) -> int | None:
        cache = make_cache(pages=60, layers_per_range=2, **policy)
        sequence = cache.sequence(20)
        lines = interrupted(sequence.fork, line, str(sharing.__file__))
        with contextlib.suppress(vmmkv.InterruptedChangeError):
            cache.check()
            sequence.truncate(3)
            cache.check()
            sequence.extend(9)
            cache.check()
        cache.close()
        return lines

    lines = check(EVERYTHING)
    assert lines
    for line in range(1, lines + 1):
        assert check(line) is None


@pytest.mark.parametrize("start", [50, 64])
@pytest.mark.parametrize("sources", ["/rows/growing", "/space/arena", "/space/change"])
@pytest.mark.parametrize("device", ["cpu"])
def test_an_interruption_of_who_begins_behind_zeros(
    make_cache, device: str, sources: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the row next may read it to its end: zeros are there again that had made way, also for no token."""
    monkeypatch.setattr("vmmkv.space.arena._waiting", deque())  # what other tests have left is tried once a growth

    def check(line: int) -> int | None:
        driver = FaultyDriver(small_driver(device))
        driver.unmaps_anything = True
        cache = make_cache(driver=driver, layers_per_range=2, zero_tail=True)
        sequence = cache.sequence(20)
        sequence.truncate(0)
        lines = interrupted(lambda: cache.extend([sequence], 64, starts=[start]), line, SOURCES + sources)
        books(cache, driver)
        assert has_memory(sequence, driver)
        row = sequence.row
        sequence.free()
        cache.sequence(5, row=row)
        for arena in cache._rows.arenas:
            address = arena.table.address_of(row, 0)
            assert driver.accessible.issuperset(range(address, address + arena.row_bytes, driver.page_size))
        return lines

    for line in some_lines(check(EVERYTHING), 30):
        assert check(line) is None


@pytest.mark.parametrize("device", ["cpu"])
def test_an_interruption_while_a_failure_is_made_good(make_cache, device: str) -> None:
    """Pages that were mapped, and that failed to be made accessible and to be unmapped, are no reason to give up."""
    ended, line = None, 0
    while ended is None:
        line += Random().randint(1, 5)
        driver = FaultyDriver(small_driver(device))
        driver.unmaps_anything = True
        cache = make_cache(driver=driver)
        sequence = cache.sequence(20)
        driver.fail("set_access")
        driver.fail("unmap")
        with pytest.raises(vmmkv.DriverError, match="set_access"):
            sequence.extend(9)
        ended = interrupted(lambda sequence=sequence: sequence.extend(9), line)
        cache.check()
        assert sequence.length in (20, 29)
        assert has_memory(sequence, driver)
        sequence.extend(9)
        assert has_memory(sequence, driver)
        books(cache, driver)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one in a finalizer ends there
@pytest.mark.parametrize("device", ["cpu"])
def test_interruptions_at_any_moment(make_cache, device: str) -> None:
    """By a real signal, which comes when it likes."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    unusable = rang = 0
    cache, kept = None, []

    def operate() -> None:
        operation = random.choice(["start", "extend", "extend", "truncate", "free", "trim"])
        try:
            if operation == "start" or not kept:
                kept.append(cache.sequence(random.randrange(60)))
            elif operation == "extend":
                random.choice(kept).extend(random.randrange(30))
            elif operation == "truncate":
                random.choice(kept).truncate(0)
            elif operation == "free":
                kept[-1].free()
                kept.pop()
            else:
                cache.trim()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError, vmmkv.SequenceTooLongError):
            cache.free(kept)
            kept.clear()

    for _ in range(1000):
        if cache is None:
            cache, kept = make_cache(pages=30, scrub=bool(random.getrandbits(1))), []
        rang += interrupted_after(operate, random.uniform(1e-6, 4e-4))
        kept = [sequence for sequence in kept if "gone" not in repr(sequence)]
        try:
            cache.check()
            assert cache.stats().physical_bytes == os.fstat(cache._driver.fd).st_blocks * 512
            assert cache.stats().rows["live"] == len(kept)
        except vmmkv.InterruptedChangeError:
            unusable += 1
            cache.close()
            cache = None
    assert rang > 100
    assert unusable < rang / 2


class Inside(FaultyDriver):
    """Calls something in the middle of an operation, as garbage collection and signal handlers do."""

    def __init__(self, device: str, call: str, action) -> None:
        super().__init__(small_driver(device))
        self.call, self.action, self.called = call, action, 0

    def _call(self, name: str, *args):
        result = super()._call(name, *args)
        if name == self.call and self.action:
            self.called += 1
            self.action()
        return result


@pytest.mark.parametrize("call", ["create", "unmap", "fill", "release"])
@pytest.mark.parametrize("device", ["cpu"])
def test_what_runs_in_the_middle_of_an_operation(make_cache, device: str, call: str) -> None:
    """Frees happen later; all else is refused and has changed nothing. (While the driver maps it need not be:
    `tests/test_threads.py::test_a_signal_handler_while_the_driver_maps`.)"""
    driver = Inside(device, call, None)
    cache = make_cache(driver=driver, pages=20, scrub=True)
    gone, other, grown = cache.sequence(10), cache.sequence(1), cache.sequence(1)
    refused = []

    def disturb() -> None:
        gone.free()
        cache.free([gone])
        for operation in (
            lambda: cache.sequence(1),
            lambda: other.extend(1),
            lambda: cache.extend([other], 1),
            lambda: other.truncate(0),
            lambda: other.record_stream(None),
            cache.trim,
            cache.stats,
            cache.check,
            cache.close,
        ):
            with pytest.raises(vmmkv.BusyError, match="middle of another operation"):
                operation()
            refused.append(operation)
        assert "busy" in repr(cache)

    driver.action = disturb
    cache.extend([grown], 60)
    cache.free([grown])
    cache.trim()
    driver.action = None
    assert driver.called > 0
    assert len(refused) == 9 * driver.called
    assert other.length == 1
    books(cache, driver)
    with pytest.raises(vmmkv.UseAfterFreeError):
        print(gone.length)


@pytest.mark.parametrize("device", ["cpu"])
def test_a_signal_handler_while_a_batch_grows_inside_its_pages(make_cache, device: str) -> None:
    """It frees a sequence, and starts another on the same row, where that is not refused."""

    def check(line: int) -> int | None:
        cache = make_cache(max_sequences=2)
        gone, other = cache.sequence(7), cache.sequence(7)
        started = []

        def handle() -> None:
            gone.free()
            with contextlib.suppress(vmmkv.BusyError):
                started.append(cache.sequence(5))

        with contextlib.suppress(vmmkv.UseAfterFreeError):
            lines = disturbed(lambda: cache.extend([gone, other], 1), line, handle)
            assert lines or other.length == 8
            if lines:
                return lines
        cache.check()
        assert [sequence.length for sequence in started] == [5] * len(started)
        assert other.length in (7, 8)
        assert "gone" in repr(gone)
        return None

    for line in range(1, check(EVERYTHING) + 1):
        assert check(line) is None


@pytest.mark.parametrize("device", ["cpu"])
def test_a_sequence_freed_twice_by_the_end_of_a_generator(make_cache, device: str) -> None:
    """Its finalizer, and that of the generator that holds it in a `with`, run in one garbage cycle, in any order."""
    cache = make_cache()

    def generate():
        with cache.sequence(10) as sequence:
            yield sequence

    for _ in range(5):
        generator = generate()
        cycle = [generator, next(generator)]
        cycle.append(cycle)
        del generator, cycle
        gc.collect()
        first, second = cache.sequence(10), cache.sequence(10)
        assert first.row != second.row
        cache.check()
        cache.free([first, second])


def test_a_row_with_two_sequences_breaks_an_invariant(make_cache) -> None:
    cache = make_cache()
    first, second = cache.sequence(10), cache.sequence(10)
    cache._rows.table.owner[second.row] = first.number
    with pytest.raises(vmmkv.InvariantError, match="two rows"):
        cache.check()


TENSOR_OPERATIONS = {
    "resize": lambda tensor: tensor.resize(40),
    "append": lambda tensor: tensor.append(torch.full((37, *tensor.shape[1:]), 7, dtype=torch.uint8)),
    "trim": lambda tensor: tensor.trim(),
    "close": lambda tensor: tensor.close(),
}


OPENINGS = {
    "cache": lambda pool, opened: opened.append(vmmkv.KVCache(SMALL, 2, 60, pool=pool, guaranteed="25%")),
    "zero tail": lambda pool, opened: opened.append(vmmkv.KVCache(SMALL, 2, 60, pool=pool, zero_tail=True)),
    "tensor": lambda pool, opened: opened.append(GrowableTensor((64, 4096), torch.uint8, pool=pool)),
}
SMALL = vmmkv.KVLayout(2, 2, 16, torch.float32, layers_per_range=1)


@pytest.mark.parametrize("name", OPENINGS)
def test_an_opening_that_was_interrupted_leaves_no_account(name: str) -> None:
    """At any line of it; and what else lies on the pool can be used, also while somebody still holds the traceback."""
    ended, line = None, 0
    opened: list[object] = []  # whose end is none of its lines
    while ended is None:
        line += Random().randint(1, 12)  # not at all of them, and at others in each run
        driver = FaultyDriver(small_driver("cpu"))
        driver.unmaps_anything = True
        pool = on_driver(driver, vmmkv.FramePool, 20 * driver.page_size)
        other = vmmkv.KVCache(SMALL, 2, 60, pool=pool)
        tables = len(pool.tables)
        other.sequence(20).free()
        try:
            ended = disturbed(functools.partial(OPENINGS[name], pool, opened), line, interrupt)
        except Interruption as error:
            held = error
            with contextlib.suppress(vmmkv.InterruptedChangeError):
                other.sequence(30)
                other.check()
            del held
        opened.clear()
        with contextlib.suppress(vmmkv.InterruptedChangeError):
            other.sequence(60)
            other.check()
            assert pool.stats().holders == 1
            assert pool.stats().guaranteed_bytes == 0
            assert len(pool.tables) == tables
        other.close()
        pool.close()
        assert not driver.mapped
        assert driver.num_pages <= 1, "of a page in the making nobody knows"


def small_tensor(device: str) -> tuple[FaultyDriver, GrowableTensor]:
    """A tensor of 3 rows, each half a page, with room for 7."""
    driver = FaultyDriver(small_driver(device))
    driver.unmaps_anything = True
    width = driver.page_size // 2
    tensor = on_driver(driver, GrowableTensor, (64, width), torch.uint8, max_bytes=40 * driver.page_size)
    tensor.resize(7)
    tensor.resize(3)
    tensor.tensor.fill_(7)
    return driver, tensor


@pytest.mark.parametrize("name", TENSOR_OPERATIONS)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_growable_tensor_that_was_interrupted(device: str, name: str) -> None:
    """It is as before or as after, or says that it is unusable; close gives all back."""

    def check(line: int) -> int | None:
        driver, tensor = small_tensor(device)
        lines = interrupted(lambda: TENSOR_OPERATIONS[name](tensor), line)
        try:
            assert len(tensor) in (0 if name == "close" else 3, 3 if name == "trim" else 40, 3)
            assert name == "resize" or not len(tensor) or (tensor.tensor == 7).all()
            assert tensor.stats().physical_bytes == driver.num_pages * driver.page_size
        except (vmmkv.InterruptedChangeError, vmmkv.UseAfterFreeError):
            pass
        else:
            assert tensor.stats().used_bytes == len(tensor) * driver.page_size // 2
            tensor.resize(50)
            assert (tensor.tensor[:3] == 7).all()
            tensor.resize(0)
            tensor.trim()
            assert not driver.handles
        tensor.close()
        assert not driver.mapped
        assert driver.num_pages <= 1, "of a page in the making, or on its way back, nobody knows"
        return lines

    for line in some_lines(check(EVERYTHING)):
        assert check(line) is None


@pytest.mark.parametrize("name", TENSOR_OPERATIONS)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_signal_handler_in_the_middle_of_a_growable_tensor(device: str, name: str) -> None:
    """It may look; what changes the tensor is refused, and has changed nothing, where it is not before or after."""

    def check(line: int) -> int | None:
        driver, tensor = small_tensor(device)
        refused = []

        def handle() -> None:
            with contextlib.suppress(vmmkv.UseAfterFreeError):
                assert name == "resize" or (tensor.tensor == 7).all()
                for operation in (tensor.trim, tensor.stats, lambda: tensor.resize(5), tensor.close):
                    try:
                        operation()
                    except vmmkv.BusyError:
                        refused.append(operation)

        with contextlib.suppress(vmmkv.UseAfterFreeError):
            lines = disturbed(lambda: TENSOR_OPERATIONS[name](tensor), line, handle)
            if lines:
                return lines
            if refused and name != "close":
                assert len(tensor) == (3 if name == "trim" else 40)
                assert tensor.stats().physical_bytes == driver.num_pages * driver.page_size
                assert len(set(driver.mapped.values())) == len(driver.mapped) <= driver.num_pages
        tensor.close()
        assert not driver.mapped
        assert not driver.handles
        return None

    for line in some_lines(check(EVERYTHING)):
        assert check(line) is None
