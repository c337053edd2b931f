"""The mapper: what it maps ahead is right whatever happens meanwhile, and nobody is worse off for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from textwrap import dedent

import pytest
import torch
from conftest import ROUNDS, calls, join, on_driver, run_python, small_driver
from faulty import FaultyDriver, has_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import interrupted

import vmmkv
from vmmkv.errors import DriverError, OutOfPagesError, OutOfRowsError
from vmmkv.space.mapper import CHUNK, MADE, PAUSES, Mapper

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
PAGE_TOKENS = 8
LOOKAHEAD = 10


class BusyDriver(FaultyDriver):
    """Does something else before each of its calls: what another thread does while the mapper is at work."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _call(self, name: str, *args: object) -> object:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None  # which may make calls of its own
        meanwhile()
        self.meanwhile = meanwhile
        return super()._call(name, *args)


def make(pages: int = 60, **options: object) -> tuple[vmmkv.KVCache, BusyDriver, Mapper]:
    """A cache whose mapper works only when it is told to."""
    driver = BusyDriver(small_driver("cpu"))
    options = {"lookahead": LOOKAHEAD, **options}
    cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 6, 100, max_bytes=pages * driver.page_size, **options)
    mapper = cache.pool.mapper
    assert isinstance(mapper, Mapper)
    mapper.ring = lambda: None  # type: ignore[method-assign]
    return cache, driver, mapper


def work(mapper: Mapper) -> None:
    while mapper.work():
        pass


def test_what_was_mapped_ahead_needs_no_driver_call() -> None:
    cache, driver, mapper = make()
    sequences = [cache.sequence(count) for count in (1, 7, 30)]
    work(mapper)
    cache.check()
    changes = driver.changes
    for _ in range(LOOKAHEAD // 2):  # when so much is left, more is mapped
        cache.extend(sequences, 1)
    assert driver.changes == changes
    assert cache.stats().pages_mapped["ahead"] > 0
    work(mapper)
    assert driver.changes > changes
    assert all(has_memory(sequence, driver) for sequence in sequences)


@pytest.mark.usefixtures("undebugged")
def test_it_is_woken_for_several_at_once() -> None:
    """Once in a quarter of a lookahead, however many grow; and nobody who grows makes a call."""
    cache, driver, mapper = make(pages=200, lookahead=4 * PAGE_TOKENS)
    sequences = [cache.sequence(tokens) for tokens in random.sample(range(1, 30), 6)]
    work(mapper)
    rings: list[int] = []
    mapper.ring_later = lambda: rings.append(step)  # type: ignore[method-assign]
    for step in range(60):
        changes = driver.changes
        cache.extend(sequences, 1)
        assert driver.changes == changes
        if step in rings:
            work(mapper)
    assert all(later - earlier >= PAGE_TOKENS for earlier, later in pairwise(rings))
    assert rings


@pytest.mark.parametrize(
    ("tokens", "lookahead", "pages", "step"),
    [(8, 2, 90, 1), (8, 3, 90, 1), (2, 2, 200, 1), (2, 8, 104, 1), (2, 8, 200, 1), (8, 32, 90, 12), (2, 16, 200, 6)],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_it_is_woken_before_the_next_step(in_place: bool, tokens: int, lookahead: int, pages: int, step: int) -> None:
    """Also with a short lookahead, or few tokens in a page and memory for no more than the next one, or long steps."""
    driver = FaultyDriver(small_driver("cpu"))
    layout = vmmkv.KVLayout(2, 2, 16 * PAGE_TOKENS // tokens, torch.float32)
    cache = on_driver(driver, vmmkv.KVCache, layout, 3, 100, max_bytes=pages * driver.page_size, lookahead=lookahead)
    mapper = cache.pool.mapper
    assert mapper
    mapper.ring = lambda: None  # type: ignore[method-assign]
    sequences = [cache.sequence(length) for length in (1, 3, 6)]
    work(mapper)
    rings: list[int] = []
    mapper.ring_later = lambda: rings.append(number)  # type: ignore[method-assign]
    for number in range(60 // step):
        changes = driver.changes
        if in_place:
            assert all(sequence.extend_in_place(step) for sequence in sequences)
        else:
            cache.extend(sequences, step)
        assert driver.changes == changes
        if number in rings:
            work(mapper)
    assert rings


@pytest.mark.usefixtures("undebugged")
def test_what_was_taken_back_is_not_mapped_ahead_again() -> None:
    """As long as no memory can be made: who took it needs as much soon."""
    cache, _, mapper = make(pages=15, lookahead=4 * PAGE_TOKENS, large_frames=False)
    growing, prompt = cache.sequence(1), cache.sequence()
    work(mapper)
    assert growing.capacity == 5 * PAGE_TOKENS
    prompt.extend(12 * PAGE_TOKENS)
    prompt.free()
    growing.extend(3 * PAGE_TOKENS - 1)
    work(mapper)
    assert growing.capacity == 3 * PAGE_TOKENS + PAGE_TOKENS  # a page's first token is a quarter of one away
    cache.trim()
    work(mapper)
    assert growing.capacity == 7 * PAGE_TOKENS


def test_what_is_expected_is_mapped_ahead() -> None:
    cache, driver, mapper = make()
    sequence = cache.sequence(expected_tokens=80)
    work(mapper)
    changes = driver.changes
    sequence.extend(80)
    assert driver.changes == changes


def test_prompts_that_are_announced_together_take_few_changes() -> None:
    """Of an empty pool, in which frames of both sizes have to be made first: who serves shares the interpreter."""
    driver = FaultyDriver(small_driver("cpu"))
    expected = [random.randint(1, 60 * PAGE_TOKENS) for _ in range(20)]
    cache = on_driver(
        driver, vmmkv.KVCache, LAYOUT, 20, 64 * PAGE_TOKENS, max_bytes=2000 * driver.page_size, lookahead=LOOKAHEAD
    )
    mapper = cache.pool.mapper
    assert isinstance(mapper, Mapper)
    mapper.ring = lambda: None  # type: ignore[method-assign]
    sequences = [cache.sequence(expected_tokens=tokens) for tokens in expected]
    changes = 1
    while mapper.work():
        changes += 1
    assert all(sequence.capacity >= tokens for sequence, tokens in zip(sequences, expected))
    frames = mapper.meter.count("map")
    assert frames < cache.stats().pages["surplus"]  # some are large
    assert changes <= frames / CHUNK + 2 * frames / MADE + 5


def test_a_lookahead_is_no_reason_to_run_out_of_pages() -> None:
    cache, _, mapper = make(pages=10)
    sequence = cache.sequence(1)
    work(mapper)
    sequence.extend(10 * PAGE_TOKENS - 1)
    work(mapper)
    cache.check()
    assert cache.stats().pages["surplus"] == 0


@pytest.mark.usefixtures("undebugged")
def test_a_lookahead_gives_way_before_parked_rows_do() -> None:
    cache, _, mapper = make(pages=23)
    cache.sequence(10 * PAGE_TOKENS).free()
    growing, other = cache.sequence(), cache.sequence()
    parked = cache.stats().rows["parked"]
    assert parked == 0  # the first has adopted it
    growing.extend(1)
    growing.free()
    other.extend(4 * PAGE_TOKENS)
    work(mapper)
    late = cache.sequence()
    assert late.capacity == 10 * PAGE_TOKENS
    late.free()
    other.extend(12 * PAGE_TOKENS - other.length)
    assert cache.sequence().capacity == 10 * PAGE_TOKENS


@pytest.mark.usefixtures("undebugged")
def test_what_lies_far_behind_a_sequence_makes_way_ahead_of_pressure() -> None:
    """A short sequence has adopted a long row: what it does not expect to need is mapped where somebody does."""
    cache, driver, mapper = make(pages=16)
    others = cache.sequence(2 * PAGE_TOKENS)
    cache.sequence(12 * PAGE_TOKENS).free()
    short = cache.sequence(1)
    assert short.capacity == 12 * PAGE_TOKENS
    late = cache.sequence(expected_tokens=9 * PAGE_TOKENS)
    work(mapper)
    cache.check()
    assert short.capacity >= 1 + LOOKAHEAD
    changes = driver.changes
    late.extend(9 * PAGE_TOKENS)
    short.extend(LOOKAHEAD)
    assert driver.changes == changes
    assert all(has_memory(sequence, driver) for sequence in (others, short, late))


def test_parked_pages_make_way_ahead_of_pressure() -> None:
    cache, driver, mapper = make(pages=20)
    parked, growing = cache.sequence(12 * PAGE_TOKENS), cache.sequence(8 * PAGE_TOKENS)
    parked.free()
    work(mapper)
    cache.check()
    changes = driver.changes
    growing.extend(LOOKAHEAD)
    assert driver.changes == changes


def test_what_is_kept_makes_way_ahead_of_pressure() -> None:
    cache, driver, mapper = make(pages=20)
    kept, growing = cache.sequence(token_ids=[1] * 12 * PAGE_TOKENS), cache.sequence(8 * PAGE_TOKENS)
    kept.commit([1] * 12 * PAGE_TOKENS)
    kept.free()
    work(mapper)
    cache.check()
    changes = driver.changes
    growing.extend(LOOKAHEAD)
    assert driver.changes == changes
    assert cache.sequence(token_ids=[1] * 9 * PAGE_TOKENS).cached_tokens >= 8 * PAGE_TOKENS  # no more than is needed


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_whatever_happens_while_it_is_at_work(seed: int, faults: bool) -> None:
    """Sequences grow within their pages, shrink and end between any two calls of the driver, some of which fail."""
    chance = random.Random(seed)
    cache, driver, mapper = make(pages=chance.choice([12, 30, 60]), scrub=chance.random() < 0.3)
    live: list[vmmkv.Sequence] = []
    values: dict[int, float] = {}

    def write(sequence: vmmkv.Sequence) -> None:
        value = values[sequence.number] = chance.random()
        for layer in range(2):
            for states in (sequence.k(layer), sequence.v(layer)):
                states.fill_(value)

    def meanwhile() -> None:
        if not live or driver_is_users:
            return
        sequence = chance.choice(live)
        what = chance.randrange(4)
        if what == 0:
            live.remove(sequence)
            sequence.free()
        elif what == 1:
            sequence.truncate(chance.randint(sequence.start, sequence.length))
        elif what == 2:
            sequence.release_before(chance.randint(sequence.start, sequence.length))
        elif sequence.length < sequence.capacity:
            sequence.extend(chance.randint(1, sequence.capacity - sequence.length))
            write(sequence)

    driver.meanwhile = meanwhile
    for _ in range(15):
        driver_is_users = True
        with suppress(OutOfPagesError, OutOfRowsError, DriverError):
            if chance.random() < 0.5:
                live.append(cache.sequence(chance.randint(0, 40), expected_tokens=chance.choice([0, 50])))
            elif live:
                cache.extend(live, chance.randint(0, 5))
        for sequence in live:
            write(sequence)
        driver_is_users = False
        if faults:
            driver.fail("any", chance.randrange(8), out_of_memory=chance.random() < 0.5)
        with suppress(DriverError):
            work(mapper)
        driver.heal()
        cache.check()
        for sequence in live:
            assert has_memory(sequence, driver)
            for layer in range(2):
                for states in (sequence.k(layer), sequence.v(layer)):
                    assert (states == values[sequence.number]).all()
    driver_is_users = True
    work(mapper)
    cache.close()
    assert not driver.mapped
    assert not driver.handles


def test_what_fails_in_it_fails_for_those_who_need_it() -> None:
    """In its thread: those who grow inside their pages never hear of it, others are told by their own call."""
    driver = FaultyDriver(small_driver("cpu"))
    cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 6, 100, max_bytes=60 * driver.page_size, lookahead=LOOKAHEAD)
    mapper = cache.pool.mapper
    assert isinstance(mapper, Mapper)

    def wait_for(condition: Callable[[], bool]) -> None:
        with calls(Mapper, "wait") as until:
            until(condition)

    for call in ("create", "map", "set_access"):
        sequence = cache.sequence(PAGE_TOKENS)
        wait_for(lambda sequence=sequence: sequence.capacity >= sequence.length + LOOKAHEAD)
        mapper.error = None
        driver.fail(call, lasting=True)
        for _ in range(sequence.capacity - sequence.length):
            sequence.extend(1)
        with pytest.raises(DriverError, match=f"{call} failed"):
            sequence.extend(100 - sequence.length)  # more than there are free frames for
        wait_for(lambda: mapper.error is not None)
        assert cache.pool.stats().mapper_error == f"{call} failed with INJECTED"
        driver.heal()
        cache.check()
        sequence.extend(1)
        assert has_memory(sequence, driver)
        wait_for(lambda sequence=sequence: sequence.capacity >= sequence.length + LOOKAHEAD // 2)  # with half it rests
        sequence.free()
        cache.trim()


def test_a_device_without_memory_has_what_it_has_mapped_ahead() -> None:
    """Frames that are free, and pages of parked rows."""
    cache, driver, mapper = make()
    parked, growing = cache.sequence(6 * PAGE_TOKENS), cache.sequence(PAGE_TOKENS)
    parked.free()
    driver.fail("create", out_of_memory=True, lasting=True)
    with suppress(DriverError):
        work(mapper)
    cache.check()
    assert growing.capacity >= growing.length + LOOKAHEAD


@pytest.mark.parametrize("name", ["free", "truncate", "release_before"])
def test_who_is_interrupted_while_it_is_at_work(name: str) -> None:
    """The books are made right by the next operation, and the mapper goes on."""
    ended, line = None, 0
    while ended is None:
        line += random.randint(1, 4)  # not at all of them, and at others in each run
        cache, driver, mapper = make()
        driver.unmaps_anything = True
        sequences = [cache.sequence(count) for count in (5, 9, 20)]
        operation = partial(getattr(sequences[1], name), *(() if name == "free" else (3,)))

        operations = [operation]

        def meanwhile() -> None:
            nonlocal ended
            if operations:  # noqa: B023
                ended = interrupted(operations.pop(), line)  # noqa: B023

        driver.meanwhile = meanwhile
        work(mapper)
        assert not operations
        cache.check()
        for sequence in sequences:
            with suppress(vmmkv.UseAfterFreeError):
                assert has_memory(sequence, driver)
        pages = mapper.pages
        sequences[2].extend(2 * LOOKAHEAD)
        work(mapper)
        assert mapper.pages > pages
        cache.close()
        assert not driver.mapped


def test_threads_beside_the_mapper() -> None:
    """Bytes stay whose they are while threads grow and end sequences, and the mapper is always at work."""
    cache = vmmkv.KVCache(LAYOUT, 32, 400, max_bytes="1600KiB", device="cpu", page_size=4096, lookahead=16)
    failures: list[BaseException] = []

    def serve(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(60 * ROUNDS):
                with suppress(OutOfPagesError), cache.sequence(chance.randint(1, 30)) as sequence:
                    value = float(chance.random())
                    for _ in range(chance.randint(1, 40)):
                        sequence.extend(chance.randint(1, 3))
                        sequence.k(1).fill_(value)
                        assert (sequence.k(1) == value).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert not failures, failures
    cache.check()
    cache.trim()  # or it begins on pages enough
    with calls(Mapper, "wait") as until, cache.sequence(1):
        until(lambda: cache.stats().pages_mapped["ahead"] > 0)
    cache.close()


def test_it_ends_with_its_pool_and_with_the_interpreter() -> None:
    child = run_python(
        """
        import gc, threading, os
        import vmmkv
        layout = vmmkv.KVLayout(1, 1, 8)
        def mappers():
            return [thread for thread in threading.enumerate() if thread.name == "vmmkv-mapper"]
        cache = vmmkv.KVCache(layout, 4, 4096, max_bytes="4MiB", device="cpu", page_size=4096, lookahead=500)
        sequence = cache.sequence(3)
        (thread,) = mappers()
        if os.fork() == 0:
            assert not mappers()
            try:
                sequence.extend(1)
            except vmmkv.ForkError:
                os._exit(0)
            os._exit(1)
        assert os.wait()[1] == 0
        del sequence, cache
        gc.collect()
        thread.join(20)
        assert not mappers()
        cache = vmmkv.KVCache(layout, 4, 4096, max_bytes="4MiB", device="cpu", page_size=4096, lookahead=500)
        kept = [cache.sequence(1) for _ in range(4)]
        print(len(mappers()))
        """
    )
    assert (child.stdout, child.returncode) == ("1\n", 0), child.stderr


BUSY = """
    import gc, os, signal, sys, threading, time
    import vmmkv
    from conftest import on_driver, small_driver
    from faulty import FaultyDriver
    signal.alarm(60)

    class SlowDriver(FaultyDriver):
        def _call(self, name, *args):
            if threading.current_thread().name == "vmmkv-mapper":
                busy.set()
                time.sleep(0.005)
            return super()._call(name, *args)

    busy = threading.Event()
    def make():
        driver = SlowDriver(small_driver("cpu"))
        layout = vmmkv.KVLayout(1, 1, 64)
        cache = on_driver(driver, vmmkv.KVCache, layout, 4, 4096, max_bytes="4MiB", lookahead=1000)
        cache.kept = cache.sequence(3)
        busy.wait()
        return cache, driver

    cache, driver = make()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "vmmkv-mapper")
"""
ENDS = {
    "exit": "sys.kept = cache",
    "exit with an error": "raise SystemExit('on purpose')",
    "close": """
        cache.close()
        assert not driver.mapped
        assert not driver.handles
    """,
    "collect": """
        del cache
        gc.collect()
        thread.join(30)
        assert not thread.is_alive()
        assert not driver.mapped
        assert not driver.handles
    """,
    "fork": """
        for _ in range(2):
            busy.clear()
            cache.kept.extend(600)
            busy.wait()
            if os.fork() == 0:
                try:
                    cache.kept.extend(2000)
                except vmmkv.ForkError:
                    busy.clear()
                    cache, driver = make()
                    cache.close()
                    assert not driver.handles
                    sys.exit()
            assert os.wait()[1] == 0
        cache.check()
    """,
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_while_it_is_at_work(end: str) -> None:
    child = run_python(dedent(BUSY) + dedent(ENDS[end]))
    if end == "exit with an error":
        assert (child.stdout, child.stderr, child.returncode) == ("", "on purpose\n", 1)
    else:
        assert (child.stdout, child.stderr, child.returncode) == ("", "", 0)


def test_no_lookahead_no_thread() -> None:
    for options in ({}, {"lookahead": 0}, {"zero_tail": True}):
        cache = vmmkv.KVCache(LAYOUT, 2, 100, max_bytes="64KiB", device="cpu", page_size=4096, **options)
        cache.sequence(30)
        assert cache.pool.mapper is None
    with pytest.raises(vmmkv.ArgumentError, match="zero_tail"):
        vmmkv.KVCache(LAYOUT, 2, 100, device="cpu", zero_tail=True, lookahead=5)


@given(st.integers(0, 30), st.lists(st.integers(0, 9), max_size=20))
def test_overread(overread: int, growths: list[int]) -> None:
    """So many tokens behind a length are mapped, also at a row's end and after a truncation."""
    driver = FaultyDriver(small_driver("cpu"))
    cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 2, 60, max_bytes=40 * driver.page_size, overread=overread)
    sequence, record = cache.sequence(), LAYOUT.record_bytes[0]
    base = cache.kv(0)[0][sequence.row].data_ptr()
    for growth in growths:
        if growth == 0:
            sequence.truncate(sequence.length // 2)
            cache.trim()
        else:
            sequence.extend(min(growth, 60 - sequence.length))
        cache.check()
        if sequence.length:
            end = base + (sequence.length + overread) * record
            assert driver.accessible.issuperset(range(base, end, driver.page_size))


def test_a_finalizer_in_its_thread_changes_nothing_in_between() -> None:
    cache, driver, mapper = make()
    sequence = cache.sequence(30)
    seen: list[type] = []

    def meanwhile() -> None:
        if mapper_is_at_work:
            for change in (lambda: cache.sequence(40), cache.trim, cache.close):
                with pytest.raises(vmmkv.BusyError):
                    change()
                seen.append(vmmkv.BusyError)

    driver.meanwhile = meanwhile
    mapper_is_at_work = True
    work(mapper)
    mapper_is_at_work = False
    assert seen
    cache.check()
    sequence.extend(LOOKAHEAD)


@pytest.mark.parametrize("growths", [0, 3, 100])
def test_it_rests_while_others_map_in_need(growths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another: it maps nothing before they are done, or have gone on for too long."""
    cache = vmmkv.KVCache(LAYOUT, 2, 1000, max_bytes="4MiB", device="cpu", page_size=4096, lookahead=LOOKAHEAD)
    mapper = cache.pool.mapper
    assert isinstance(mapper, Mapper)
    ring, mapper.ring = mapper.ring, lambda: None  # type: ignore[method-assign]
    sequence, mapped = cache.sequence(PAGE_TOKENS), list[int]()

    def grow(_: float) -> None:
        mapped.append(mapper.pages)
        if len(mapped) <= growths:
            sequence.extend(PAGE_TOKENS)

    monkeypatch.setattr("vmmkv.space.mapper.sleep", grow)
    with calls(Mapper, "wait") as until:
        ring()
        until(lambda: mapper.pages)
    rests = min(growths + 1, PAUSES)
    assert mapped[:rests] == [0] * rests
    mapper.stop()
    assert len(mapped) == rests or growths > PAUSES
