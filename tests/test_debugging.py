"""`VMMKV_DEBUG=1`: what is wrong shows where it happens, and what is right stays right."""

from __future__ import annotations

import gc
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

import vmmkv

PAGE_TOKENS = 8


def layout(dtype: torch.dtype = torch.float32) -> vmmkv.KVLayout:
    """8 tokens in a page of 4 KiB."""
    return vmmkv.KVLayout(2, 2, 64 // dtype.itemsize, dtype)


def make(dtype: torch.dtype = torch.float32, rows: int = 3, **options: object) -> vmmkv.KVCache:
    options = {"max_bytes": "160KiB", "device": "cpu", "page_size": 4096, **options}
    return vmmkv.KVCache(layout(dtype), rows, 80, **options)


@pytest.fixture(autouse=True)
def _debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMKV_DEBUG", "1")


def nan_tokens(tensor: torch.Tensor) -> int:
    """How many tokens hold nothing but NaN."""
    return int(tensor.float().isnan().flatten(1).all(1).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_nobody_has_written_is_nan(dtype: torch.dtype) -> None:
    """On fresh pages, on adopted ones, and on pages that come back after a truncation."""
    with make(dtype) as cache:
        sequence = cache.sequence(3 * PAGE_TOKENS)
        for _ in range(2):
            assert nan_tokens(sequence.k(1)) == nan_tokens(sequence.v(0)) == 3 * PAGE_TOKENS
            sequence.k(1).zero_()
            sequence.v(0).zero_()
            sequence.free()
            sequence = cache.sequence(3 * PAGE_TOKENS)
        sequence.k(1).zero_()
        sequence.truncate(PAGE_TOKENS)
        sequence.extend(2 * PAGE_TOKENS)
        assert nan_tokens(sequence.k(1)) == 2 * PAGE_TOKENS
        assert not sequence.k(1)[:PAGE_TOKENS].isnan().any()
        sequence.free()


def test_what_a_sequence_has_left_is_nan() -> None:
    """Whoever still reads it gets no number: after `free`, `truncate` and `release_before`."""
    with make() as cache:
        sequence = cache.sequence(5 * PAGE_TOKENS)
        whole = sequence.k(0)
        whole.zero_()
        sequence.truncate(4 * PAGE_TOKENS - 1)
        assert nan_tokens(whole) == PAGE_TOKENS + 1
        sequence.release_before(PAGE_TOKENS + 1)
        assert nan_tokens(whole) == 2 * (PAGE_TOKENS + 1)
        assert not whole[PAGE_TOKENS + 1 : 4 * PAGE_TOKENS - 1].isnan().any()
        sequence.free()
        assert nan_tokens(whole) == 5 * PAGE_TOKENS


def test_a_cache_that_is_closed_says_what_lives_and_where_it_was_started() -> None:
    cache = make(rows=4, host_bytes="1MiB")
    away, collected = cache.sequence(5), cache.sequence(3)
    away.suspend()
    with cache.sequence(1):
        pass
    del collected
    gc.collect()
    traced = tracemalloc.is_tracing()
    tracemalloc.start(20)
    kept = cache.sequence(9)
    with pytest.warns(vmmkv.LeakWarning) as caught:
        cache.close()
    where = tracemalloc.get_object_traceback(next(each.source for each in caught if each.source is kept)).format()
    if not traced:
        tracemalloc.stop()
    assert Path(__file__).name in "".join(where)
    assert {str(each.message) for each in caught} == {
        f"a KVCache was closed with <vmmkv.Sequence {kept.number}: row {kept.index}, 9 tokens>",
        f"a KVCache was closed with <vmmkv.Sequence {away.number}: suspended, 5 tokens on the host>",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().close()


@pytest.mark.gpu
def test_pages_are_filled_in_the_order_of_streams_and_never_into_a_graph() -> None:
    cache = vmmkv.KVCache(vmmkv.KVLayout(2, 2, 64, torch.float16), 2, 40_000, max_bytes="64MiB", device="cuda")
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        sequence = cache.sequence(10_000)
        sequence.k(0).zero_()
    current.wait_stream(side)
    sequence.record_stream(current)
    torch.cuda._sleep(10**8)
    read = sequence.k(0).clone()
    with torch.cuda.stream(side):
        sequence.free()
    fresh = cache.sequence(10_000)
    assert not read.isnan().any()
    assert fresh.k(0).isnan().all()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh.extend(10_000)
    assert fresh.length == 20_000
    fresh.free()
    cache.close()
