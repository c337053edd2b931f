"""`KVCache.reorder`: sequences come to hold what others held, against tensors that are cloned and indexed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from conftest import ROUNDS, on_driver, small_driver, small_layout
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.driver.fence import Fence
from vmmkv.rows.reordering import Reordering

ROWS = 5


def tokens_of(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    """K and V of each layer, copied."""
    layers = range(sequence.cache.layout.num_layers)
    return [states.clone() for layer in layers for states in (sequence.k(layer), sequence.v(layer))]


def write(sequence: vmmkv.Sequence, begin: int) -> None:
    """Writes fresh random K and V from token `begin` on."""
    for layer in range(sequence.cache.layout.num_layers):
        for states in (sequence.k(layer), sequence.v(layer)):
            new = states[begin - sequence.start :]
            new.copy_(torch.randn_like(new))


def grow(sequence: vmmkv.Sequence, tokens: int) -> None:
    length = sequence.length
    sequence.extend(tokens)
    write(sequence, length)


def started(cache: vmmkv.KVCache, *lengths: int) -> list[vmmkv.Sequence]:
    """Sequences of random tokens."""
    sequences = [cache.sequence(length) for length in lengths]
    for sequence in sequences:
        write(sequence, 0)
    return sequences


def reordered(sequences: list[vmmkv.Sequence], indices: list[int], copy: bool = True) -> None:
    """Reorders, and compares with the model; rows and addresses stay."""
    cache = sequences[0].cache
    before = [(s.start, s.length, tokens_of(s)) for s in sequences]
    rows = [sequence.row for sequence in sequences]
    cache.reorder(sequences, indices, copy=copy)
    cache.check()
    assert [sequence.row for sequence in sequences] == rows
    for sequence, index in zip(sequences, indices):
        start, length, tokens = before[index]
        assert (sequence.start, sequence.length) == (start, length)
        assert all(map(torch.equal, tokens_of(sequence), tokens))


def mapped(cache: vmmkv.KVCache) -> int:
    """Calls that have mapped a frame so far."""
    return cache.stats().driver_calls["map"].count


KINDS = [
    {},
    {"layers_per_range": 1},
    {"layers_per_range": 2, "scrub": True},
    {"zero_tail": True},
    {"overread": 7},
    {"large_frames": True, "pages": 700, "head_dim": 5},
    {"large_frames": True, "pages": 700, "head_dim": 5, "layers_per_range": 2},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_reorderings_of_any_sequences(make_cache, device: str, kind: dict) -> None:
    options = dict(kind)
    if factor := options.pop("head_dim", 0):  # rows of several large frames
        layout = small_layout(small_driver(device), layers_per_range=options.pop("layers_per_range", None))
        options["layout"] = replace(layout, head_dim=factor * layout.head_dim)
    for _ in range((3 if device == "cuda" else 5) * ROUNDS):  # on a GPU each takes seconds
        seed = Random().randrange(1 << 32)
        try:
            reorder_at_random(make_cache(ROWS, 100, **{"pages": 200, **options}), Random(seed))
        except BaseException as error:
            error.add_note(f"Random({seed})")
            raise


def reorder_at_random(cache: vmmkv.KVCache, random: Random) -> None:
    """Sequences that were forked, and others, and change between reorderings."""
    live = started(cache, *(random.randint(0, 60) for _ in range(random.randint(1, 3))))
    live += cache.fork_many(random.choice(live), random.randint(0, ROWS - len(live)))
    for _ in range(12):
        for sequence in live:
            change = random.choice(["grow", "grow", "truncate", "window", "leave"])
            if change == "grow":
                grow(sequence, random.randint(0, min(12, 100 - sequence.length)))
            elif change == "truncate" and not random.randrange(4):
                sequence.truncate(random.randint(sequence.start, sequence.length))
            elif change == "window" and not random.randrange(4):
                sequence.release_before(random.randint(sequence.start, sequence.length))
        if not random.randrange(3):
            cache.trim()
        chosen = random.sample(live, random.randint(1, len(live)))
        indices = [random.randrange(len(chosen)) for _ in chosen]
        if not random.randrange(3):
            random.shuffle(indices := list(range(len(chosen))))
        try:
            reordered(chosen, indices, copy=random.random() < 0.7)
        except vmmkv.UnsupportedError:
            assert any(sequence.start for sequence in chosen)


def test_what_a_row_is_read_for_on_other_streams_is_not_written_over(make_cache) -> None:
    """As by `send`, on a stream that is no sequence's."""

    class Reading(Fence):
        """Work that goes on."""

        waiting: ClassVar[list[object]] = []
        is_pending = True

        def passed(self) -> bool:
            return False

        def wait(self) -> None:
            self.waiting.append("host")

        def order(self, stream: object) -> None:
            self.waiting.append(stream)

        def __or__(self, other: Fence) -> Fence:
            return self

    cache = make_cache(2, 100, pages=60)
    beams = started(cache, 10, 20)
    reading = Reading()
    cache._rows.table.fences[beams[0].row] = reading
    reordered(beams, [1, 1])
    assert reading.waiting


def test_beams_that_were_forked_copy_and_map_nothing(make_cache) -> None:
    cache = make_cache(4, 100, pages=100)
    (first,) = started(cache, 50)
    beams = [first, *cache.fork_many(first, 3)]
    for beam in beams:
        grow(beam, 3)
    before, used = mapped(cache), cache.stats().pages["used"]
    for indices in ([1, 0, 2, 3], [2, 2, 2, 3], [1, 2, 3, 0], [3, 3, 3, 3]):
        reordered(beams, indices)
    assert mapped(cache) == before
    assert cache.stats().pages["used"] == used


def test_who_has_no_pages_shares_those_that_are_full(make_cache) -> None:
    cache = make_cache(4, 100, pages=16)
    (first,) = started(cache, 64)  # 12 pages
    beams = [first, *(cache.sequence() for _ in range(3))]
    reordered(beams, [0, 0, 0, 0])
    assert cache.stats().pages["used"] <= 12 + 3
    for beam in beams:
        grow(beam, 1)
    reordered(beams, [3, 2, 1, 0])


def test_what_is_copied_again_and_again_is_shared_at_last(make_cache) -> None:
    cache = make_cache(2, 100, pages=60)
    beams = started(cache, 64, 64)
    apart, before = cache.stats().pages["used"], mapped(cache)
    copied = 0
    while cache.stats().pages["used"] == apart and copied < 100:
        reordered(beams, [0, 0])
        copied += 1
    assert 10 < copied < 100, "shared before it had paid, or not when it would have"
    assert cache.stats().pages["used"] <= apart // 2 + 2
    before = mapped(cache)
    for beam in beams:
        grow(beam, 1)
    reordered(beams, [1, 0])
    reordered(beams, [0, 0])
    assert mapped(cache) <= before + 2  # a page of their own to grow into


def test_what_must_not_be_copied_is_shared_at_once(make_cache) -> None:
    cache = make_cache(3, 100, pages=60)
    sequences = started(cache, 64, 64, 64)
    apart = cache.stats().pages["used"]
    with pytest.raises(vmmkv.ArgumentError):
        cache.reorder(sequences, [0, 0, 0], share=False, copy=False)
    reordered(sequences, [0, 0, 0], copy=False)
    assert cache.stats().pages["used"] <= apart // 3 + 2


def test_what_turns_in_a_circle_is_never_shared(make_cache) -> None:
    cache = make_cache(3, 100, pages=60)
    sequences = started(cache, 64, 64, 64)
    before = mapped(cache)
    for _ in range(100):
        reordered(sequences, [1, 2, 0])
    assert mapped(cache) == before


@pytest.mark.parametrize("common", [0, 40])
def test_who_has_less_than_the_other_does_not_make_small_pieces_of_that(
    make_cache, monkeypatch: pytest.MonkeyPatch, common: int
) -> None:
    """Of two that change places one has no tokens, or none of its own, or one."""
    cache = make_cache(3, 100, pages=60)
    driver, copies = cache.pool.driver, []
    copy = driver.copy
    monkeypatch.setattr(driver, "copy", lambda *arguments: (copies.append(arguments), copy(*arguments)))
    for own in (0, 1):
        (short,) = started(cache, common)
        long = short.fork()
        grow(short, own)
        grow(long, 60)
        for sequences in ([short, long], [short, long], [long, short]):
            copies.clear()
            reordered(sequences, [1, 0])
            assert len(copies) < 10
        cache.free([short, long])


def test_without_memory_nothing_changes(make_cache) -> None:
    cache = make_cache(4, 100, pages=14)
    long, short, other = started(cache, 60, 5, 1)
    before = [(s.start, s.length, tokens_of(s)) for s in (long, short, other)]
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.reorder([long, short, other], [1, 0, 1])
    cache.check()
    for sequence, (start, length, tokens) in zip((long, short, other), before):
        assert (sequence.start, sequence.length) == (start, length)
        assert all(map(torch.equal, tokens_of(sequence), tokens))
    other.free()
    short.free()
    (other,) = started(cache, 5)
    reordered([long, other], [0, 0])  # shared: there is no memory for another


@pytest.mark.parametrize("call", ["copy", "map", "unmap", "set_access", "any"])
def test_a_failed_call_leaves_what_was_or_nothing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """`any`: also one of a stream or an event."""
    kept, scratch = [], Reordering._scratch

    def known_scratch(*args: Any) -> torch.Tensor:  # torch keeps what it frees for work on the same stream
        kept.append(scratch(*args))
        monkeypatch.setitem(SimulatedDevice.host, kept[-1].data_ptr(), kept[-1].nbytes)
        return kept[-1]

    monkeypatch.setattr(Reordering, "_scratch", known_scratch)
    is_met, skip, outcomes = True, 0, set()
    while is_met:
        device = SimulatedDevice(Random())
        cache = on_driver(
            device, vmmkv.KVCache, small_layout(device), 4, 100, max_bytes=100 * device.page_size, large_frames=False
        )
        (first,) = started(cache, 50)
        beams = [first, *cache.fork_many(first, 2)]
        device.finish()
        for beam in beams:
            grow(beam, 30)
        beams.append(cache.sequence())
        before = [tokens_of(beam) for beam in beams]
        indices = [1, 0, 0, 2]
        device.current = device.streams[1]
        device.fail(call, skip)
        try:
            cache.reorder(beams, indices)
        except vmmkv.DriverError:
            device.heal()
            device.finish()
            cache.check()
            ended = [not _is_live(beam) for beam in beams]
            assert all(ended) or not any(ended)
            outcomes.add(any(ended))
            for beam, tokens in zip(beams, before) if not any(ended) else ():
                assert all(map(torch.equal, tokens_of(beam), tokens))
            if not any(ended):  # and can be reordered as ever
                cache.reorder(beams, indices)
        else:
            is_met, ended = not device.heal(), []
        device.finish()
        for beam, index in zip(beams, indices) if not any(ended) else ():
            assert all(map(torch.equal, tokens_of(beam), before[index]))
        cache.close()
        assert not device.handles
        skip += 1
    assert skip > 1
    assert call != "any" or outcomes == {True, False}


def test_what_is_being_filled_when_it_fails_is_not_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(Random())
    cache = on_driver(device, vmmkv.KVCache, small_layout(device), 4, 100, max_bytes=100 * device.page_size, scrub=True)
    sequences = [cache.sequence(5), cache.sequence(90)]
    device.finish()

    def empty(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as context:
        context.setattr(torch, "empty", empty)
        with pytest.raises(vmmkv.DriverOutOfMemoryError):
            cache.reorder(sequences, [1, 0])
    device.current = device.streams[1]
    cache.trim()
    device.finish()
    cache.check()


def test_what_is_being_copied_when_somebody_is_interrupted_is_not_unmapped() -> None:
    device = SimulatedDevice(Random())
    cache = on_driver(device, vmmkv.KVCache, small_layout(device), 4, 100, max_bytes=100 * device.page_size)
    target, source = cache.sequence(50), cache.sequence(50)
    device.current = device.streams[1]
    with device.interrupted_behind_a_copy():
        cache.reorder([target, source], [1, 1], share=False)
    device.current = device.streams[0]
    source.free()
    assert cache._rows.reclaim(100)
    device.finish()
    cache.check()


def _is_live(sequence: vmmkv.Sequence) -> bool:
    try:
        sequence.check_usable()
    except vmmkv.UseAfterFreeError:
        return False
    return True


def test_what_is_no_order_is_refused(make_cache) -> None:
    cache, other = make_cache(), make_cache()
    one, two = started(cache, 10, 20)
    stranger, guest = other.sequence(5), cache.sequence(3, tenant="another")
    before = tokens_of(one)
    for sequences, indices, error in [
        ([one, two], [0], ValueError),
        ([one, two], [0, 2], vmmkv.OutOfRangeError),
        ([one, two], [0, -1], vmmkv.OutOfRangeError),
        ([one, two], [0, 0.5], TypeError),
        ([one, one], [0, 0], ValueError),
        ([one, stranger], [0, 0], ValueError),
        ([one, guest], [1, 1], vmmkv.UnsupportedError),
    ]:
        with pytest.raises(error):
            cache.reorder(sequences, indices)
    cache.reorder([], [])
    assert all(map(torch.equal, tokens_of(one), before))
    two.free()
    with pytest.raises(vmmkv.UseAfterFreeError):
        cache.reorder([one, two], [1, 0])
