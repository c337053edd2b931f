"""Scales of whole sequences: a row's scales are its sequence's, wherever that comes from and goes to."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from random import Random
from typing import Any

import pytest
import torch
from conftest import ROUNDS, on_driver, randoms, small_driver
from faulty import FaultyDriver
from loopback import looped
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.driver.driver import Driver

HEADS = [1, 3]


def layout(**options: Any) -> vmmkv.KVLayout:
    return vmmkv.KVLayout(2, HEADS, [64, 32], torch.int8, scales="sequence_head", **options)


def make(device: str = "cpu", driver: Driver | None = None, rows: int = 5, pages: int = 200, **options: Any):
    driver = driver or small_driver(device)
    budget = {"max_bytes": pages * driver.page_size}
    per_range = options.pop("layers_per_range", None)
    return on_driver(driver, vmmkv.KVCache, layout(layers_per_range=per_range), rows, 400, **budget, **options)


def scales_of(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    return [each[sequence.row] for layer in range(2) for each in sequence.cache.sequence_scales(layer)]


def held(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    """Scales, and 8-bit numbers."""
    row, cache = sequence.row, sequence.cache
    numbers = [each[row, : sequence.length] for layer in range(2) for each in cache.scaled_kv(layer)[:2]]
    return scales_of(sequence) + numbers


def written(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    """What it holds, once that is random."""
    for each in held(sequence):
        each.copy_(torch.randn(each.shape) * 20)
    return [each.clone() for each in held(sequence)]


def started(cache: vmmkv.KVCache, tokens: int = 0) -> vmmkv.Sequence:
    """A new one, which has scales of 1."""
    sequence = cache.sequence(tokens)
    assert all((each == 1).all() for each in scales_of(sequence))
    return sequence


def test_they_are_one_for_each_row_and_head(device: str) -> None:
    """No byte of a token record; `scaled_kv` shows them for each token, and others' are not touched."""
    cache = make(device)
    bare = vmmkv.KVLayout(2, HEADS, [64, 32], torch.int8)
    assert (cache.layout.record_bytes, cache.layout.layers) == (bare.record_bytes, bare.layers)
    one, other = started(cache, 7), started(cache, 3)
    expected = torch.ones(2, cache.max_sequences, max(HEADS), device=cache.device)
    for layer, heads in enumerate(HEADS):
        whole, by_token = cache.sequence_scales(layer), cache.scaled_kv(layer)[2:]
        for which, (row_scales, token_scales) in enumerate(zip(whole, by_token)):
            assert row_scales.dtype == torch.float32
            assert token_scales.shape == (cache.max_sequences, cache.max_seq_len, heads)
            assert token_scales.stride(1) == 0
            expected[which, one.row, :heads] = row_scales[one.row] = torch.rand(heads, device=cache.device)
            assert torch.equal(row_scales, expected[which, :, :heads])
            assert torch.equal(token_scales, row_scales[:, None].expand_as(token_scales))
        expected.fill_(1)
    assert all((each == 1).all() for each in scales_of(other))


@pytest.mark.parametrize("per_range", [None, 1])
def test_they_go_where_their_tokens_go(device: str, per_range: int | None) -> None:
    """Into forks, other orders, the host and back, another cache; and no new sequence has any of another."""
    for random in randoms(3):
        go_anywhere(make(device, layers_per_range=per_range, host_bytes="64MiB"), random)


def go_anywhere(cache: vmmkv.KVCache, random: Random) -> None:
    live: dict[vmmkv.Sequence, list[torch.Tensor]] = {}
    for _ in range(40):
        do = random.choice(["start", "fork", "reorder", "suspend", "send", "free", "grow"])
        left = cache.max_sequences - len(live)
        if do == "start" and left:
            new = started(cache, random.choice([0, 1, 60, random.randint(0, 150)]))
            live[new] = written(new)
        elif live:
            chosen = random.choice(list(live))
            if do == "fork":
                live |= dict.fromkeys(cache.fork_many(chosen, random.randint(0, left)), live[chosen])
            elif do == "reorder":
                some = random.sample(list(live), random.randint(1, len(live)))
                indices = [random.randrange(len(some)) for _ in some]
                if random.random() < 0.5:
                    random.shuffle(indices := list(range(len(some))))
                cache.reorder(some, indices)
                live |= dict(zip(some, [live[some[index]] for index in indices]))
            elif do == "suspend":
                chosen.suspend()
                if left:
                    started(cache, 20).free()
                chosen.resume()
            elif do == "send" and left:
                with looped():
                    chosen.send(1)
                    live[cache.receive(1)] = live[chosen]
            elif do == "free":
                del live[chosen]
                chosen.free()
            elif do == "grow" and chosen.length < 300:
                begin = chosen.length
                chosen.extend(random.randint(1, 50))
                for each in held(chosen)[4:]:
                    each[begin:] = torch.randn(each[begin:].shape) * 20
                live[chosen] = live[chosen][:4] + [each.clone() for each in held(chosen)[4:]]
        for sequence, expected in live.items():
            assert all(map(torch.equal, held(sequence), expected)), do
        cache.check()


@pytest.mark.parametrize("do", ["start", "fork", "reorder"])
def test_a_failed_call_leaves_what_was_or_nothing(do: str) -> None:
    """Each call of the driver fails once: who is still there has its scales, and the next one has those of 1."""
    for skip in range(100):
        driver = FaultyDriver(small_driver("cpu"))
        cache = make(driver=driver)
        started(cache, 100).free()
        sequences = [started(cache, tokens) for tokens in (100, 30, 0)]
        expected = [written(sequence) for sequence in sequences]
        fault = driver.fail("any", skip)
        try:
            if do == "start":
                started(cache, 200)
            elif do == "fork":
                assert all(all(map(torch.equal, held(fork), expected[0])) for fork in cache.fork_many(sequences[0], 2))
            else:
                cache.reorder(sequences, [1, 0, 1])
                expected = [expected[index] for index in (1, 0, 1)]
        except vmmkv.DriverError:
            assert fault.was_met
        driver.heal()
        for sequence, before in zip(sequences, expected):
            with suppress(vmmkv.UseAfterFreeError) if do == "reorder" and fault.was_met else nullcontext():
                assert all(map(torch.equal, held(sequence), before))
        started(cache, 5)
        cache.check()
        if not fault.was_met:
            break
    assert skip


@pytest.mark.parametrize("tokens", [0, 10])
def test_who_still_reads_a_rows_scales_has_its_own(tokens: int) -> None:
    """On another stream than the next sequence of that row."""
    for _ in range(10 * ROUNDS):
        device, seen = SimulatedDevice(Random()), list[bool]()
        cache = make(driver=device, rows=1, pages=3)
        scales = cache.scales._all
        device.host = {scales.data_ptr(): scales.nbytes}
        for value in range(2, 6):
            device.current = device.random.choice(device.streams)
            sequence = cache.sequence(tokens)
            own = scales_of(sequence)
            device.current.submit(lambda own=own, value=value: [each.fill_(value) for each in own] and None)
            device.current.submit(lambda: None)
            device.current.submit(
                lambda own=own, value=value, seen=seen: seen.append(all((each == value).all() for each in own))
            )
            sequence.free()
            device.run(device.random.randint(0, 6))
        device.finish()
        assert seen == [True] * 4


def test_what_another_has_computed_is_refused_to_who_has_other_scales(device: str) -> None:
    """Prefixes are; what has no such scales has none to give."""
    cache = make(device)
    sequence = cache.sequence(5)
    before = written(sequence)
    for refused in (
        lambda: cache.sequence(token_ids=[1, 2, 3]),
        lambda: sequence.commit([1, 2, 3]),
        lambda: cache.kv(0),
        lambda: sequence.k(0),
        lambda: sequence.write(0, *(torch.zeros(1, 1, 64, dtype=torch.int8) for _ in "kv")),
    ):
        with pytest.raises(vmmkv.UnsupportedError, match="scales"):
            refused()
    with pytest.raises(vmmkv.OutOfRangeError, match="layers are 0 to 1"):
        cache.sequence_scales(2)
    assert all(map(torch.equal, held(sequence), before))
    for scales in (None, "token_head"):
        other = vmmkv.KVCache(vmmkv.KVLayout(1, 1, 16, torch.int8, scales=scales), 1, 1, device=device)
        with pytest.raises(vmmkv.UnsupportedError, match="sequence_head"):
            other.sequence_scales(0)
    cache.close()
    with pytest.raises(vmmkv.UseAfterFreeError):
        cache.sequence_scales(0)


def test_without_memory_for_them_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(vmmkv.DriverOutOfMemoryError, match="scales"):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_no_sequence_starts_in_a_graph(device: str) -> None:
    """At each replay its scales would become 1 again."""
    cache = make(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(vmmkv.StreamCaptureError):
        cache.sequence()
    cache.check()
    assert cache.stats().rows["live"] == 0
    started(cache)
