"""`KVCache.reorder`: sequences come to hold what others held, against tensors that are cloned and indexed."""

from __future__ import annotations

import pytest
import torch

import vmmkv


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
    two.release_before(15)
    with pytest.raises(vmmkv.UnsupportedError, match="release_before"):
        cache.reorder([two, one], [1, 0])
    two.free()
    with pytest.raises(vmmkv.UseAfterFreeError):
        cache.reorder([one, two], [1, 0])
