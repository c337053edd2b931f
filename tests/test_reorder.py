"""`KVCache.reorder`: sequences come to hold what others held, against tensors that are cloned and indexed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from conftest import ROUNDS, on_driver, small_driver, small_layout
from simulated_device import SimulatedDevice

import vmmkv

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


def reordered(sequences: list[vmmkv.Sequence], indices: list[int]) -> None:
    """Reorders, and compares with the model; rows and addresses stay."""
    cache = sequences[0].cache
    before = [(s.start, s.length, tokens_of(s)) for s in sequences]
    rows = [sequence.row for sequence in sequences]
    cache.reorder(sequences, indices)
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
            reordered(chosen, indices)
        except vmmkv.UnsupportedError:
            assert any(sequence.start for sequence in chosen)


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
