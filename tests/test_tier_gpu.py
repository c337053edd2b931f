"""The books and the host tier on a GPU: contents that kernels write and check, before and after a time on the host."""

from __future__ import annotations

from array import array
from contextlib import suppress
from random import Random

import numpy as np
import pytest
import torch
from conftest import ROUNDS

from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.core.sequence import Sequence
from vmmkv.driver.driver import open_driver
from vmmkv.errors import OutOfHostMemoryError, OutOfPagesError, OutOfRowsError, StreamCaptureError
from vmmkv.layout import KVLayout
from vmmkv.prefix.tables import MOVED
from vmmkv.tensors import export_range
from vmmkv.tier.host_tier import HostTier

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(8, 8, 256, torch.bfloat16)
"""32 tokens in a page of 2 MiB."""
WORDS = LAYOUT.record_bytes[0] // 4
MOST = 600
"""Tokens of a row."""
STEPS = 1500


class Tensors:
    """A cache, and its rows as a tensor of words: `[rows, tokens, words]`."""

    def __init__(self, pool: Pool, rows: int, **options: int) -> None:
        self.cache = Cache(pool, LAYOUT.record_bytes, rows, MOST, **options)  # type: ignore[arg-type]
        part, device = self.cache.ranges[0], pool.driver.device
        row_bytes = int(part["row_pages"]) * pool.driver.page_size
        whole = export_range(int(part["address"]), rows * row_bytes, device, owner=pool).view(torch.int32)
        self.words = whole.view(rows, row_bytes // 4)[:, : MOST * WORDS].view(rows, MOST, WORDS)


class Row:
    """A sequence, and on plain memory of torch what it should hold."""

    def __init__(self, tensors: Tensors, sequence: Sequence, shadow: torch.Tensor) -> None:
        self.tensors, self.sequence, self.shadow = tensors, sequence, shadow

    def fill(self, begin: int) -> None:
        """Writes random numbers to all tokens from one on."""
        length = self.sequence.length
        new = torch.randint(-(1 << 31), 1 << 31, (length - begin, 1), dtype=torch.int32, device=self.shadow.device)
        self.tensors.words[self.sequence.row, begin:length] = new
        self.shadow = torch.cat([self.shadow[:begin], new])

    def wrong(self) -> torch.Tensor:
        """How many words are not as they should be; on the device."""
        return (self.tensors.words[self.sequence.row, : self.sequence.length] != self.shadow).sum()


def new_row(tensors: Tensors, tokens: int) -> Row:
    """A sequence of so many tokens, with random contents."""
    row = Row(tensors, tensors.cache.start(tokens), torch.zeros((0, 1), dtype=torch.int32, device="cuda"))
    row.fill(0)
    return row


@pytest.mark.parametrize("large", [False, True])
def test_suspended_sequences_come_back_as_they_were(seed: int, random: Random, large: bool) -> None:
    torch.cuda.manual_seed(seed)
    pool = Pool(open_driver("cuda"), 120)
    tensors = Tensors(pool, 24, large=large)
    tier = HostTier(tensors.cache, 100 * pool.driver.page_size)
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    live: list[tuple[Row, torch.cuda.Stream]] = []
    away: list[tuple[Row, torch.cuda.Stream]] = []
    done = 0
    for _ in range(STEPS * ROUNDS):
        name = random.choice(["begin", "begin", "extend", "fork", "suspend", "suspend", "resume", "resume", "free"])
        with suppress(OutOfPagesError, OutOfRowsError, OutOfHostMemoryError):
            if name == "begin":
                stream = random.choice(streams)
                with torch.cuda.stream(stream):
                    live.append((new_row(tensors, random.choice([0, 3, 40, 300])), stream))
            elif name == "resume" and away:
                row, stream = random.choice(away)
                index, other = row.sequence.row, random.choice(streams)
                with torch.cuda.stream(other):
                    tier.resume(row.sequence)
                    assert row.sequence.row == index
                    row.sequence.record_stream(other)
                    found = row.wrong()  # no stream has to be told to wait
                stream.wait_stream(other)
                away.remove((row, stream))
                live.append((row, stream))
                done += 1
                with torch.cuda.stream(stream):
                    wrong += found
            elif live:
                row, stream = random.choice(live)
                with torch.cuda.stream(stream):
                    length = row.sequence.length
                    if name == "extend":
                        row.sequence.extend(min(random.choice([1, 7, 40]), MOST - length))
                        row.fill(length)
                    elif name == "fork":
                        live.append((Row(tensors, row.sequence.fork(), row.shadow), stream))
                    elif name == "suspend":
                        tier.suspend(row.sequence)
                        live.remove((row, stream))
                        away.append((row, stream))
                    elif name == "free":
                        wrong += row.wrong()
                        live.remove((row, stream))
                        row.sequence.free()
        for stream in streams:  # `wrong` is added to on all of them
            torch.cuda.current_stream().wait_stream(stream)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
    assert done > 50
    torch.cuda.synchronize()
    for row, _ in live:
        wrong += row.wrong()
    assert int(wrong) == 0
    check(pool, [tensors.cache])
    for row, _ in live + away:
        row.sequence.free()
    torch.cuda.synchronize()
    assert tier.used == tier.slots.made == 0


def test_stored_prefixes_come_back_also_from_frames_in_no_row() -> None:
    pool = Pool(open_driver("cuda"), 200)
    tensors = Tensors(pool, 6)
    cache = tensors.cache
    tier = HostTier(cache, 400 * pool.driver.page_size)
    torch.cuda.synchronize()
    for is_mapped in (True, False):
        row = new_row(tensors, 320)
        out = array("q", bytes(8 * 64))
        count = entries.hold(cache.address, row.sequence.ticket, 0, 0, 320, out.buffer_info()[0], 64)
        tokens = sum(int(pool.frames[frame]["pages"]) for frame in out[:count]) * pool.driver.page_size
        tokens //= LAYOUT.record_bytes[0]
        row.sequence.free()
        if not is_mapped:
            torch.cuda.synchronize()
            pool.trim_to()
            assert all(pool.frames[frame]["refs"] == 0 for frame in out[:count])
        places = [(frame, offset) for frame in out[:count] for offset in range(pool.frames[frame]["pages"])]
        words = [(0, 1, 0, page, frame, offset, 3, 0, 0) for page, (frame, offset) in enumerate(places)]
        with tier.alone():
            assert tier.prefixes.store(np.array(words, MOVED)).all()
        entries.refer(cache.address, out.buffer_info()[0], count, -1)
        assert tier.finish(1) > 0
        other = Row(tensors, cache.start(tokens), row.shadow[:tokens].clone())
        other.fill(0)
        first = 37
        other.shadow = torch.cat([other.shadow[:first], row.shadow[first:tokens]])
        tensors.words[other.sequence.row, first:tokens] = 0
        pages = [(1, 0, page) for page in range(len(places))]
        with tier.alone():
            assert tier.prefixes.load(pages, other.sequence.ticket, first, tokens - first)
        assert int(other.wrong()) == 0
        other.sequence.free()
        tier.prefixes.drop(1)
    torch.cuda.synchronize()
    assert tier.used == 0
    check(pool, [cache])


def test_a_capture_refuses_to_suspend_and_to_resume() -> None:
    pool = Pool(open_driver("cuda"), 64)
    tensors = Tensors(pool, 2)
    tier = HostTier(tensors.cache, 64 * pool.driver.page_size)
    here, away = new_row(tensors, 40), new_row(tensors, 40)
    tier.suspend(away.sequence)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        here.shadow.add_(0)
        with pytest.raises(StreamCaptureError):
            tier.suspend(here.sequence)
        with pytest.raises(StreamCaptureError):
            tier.resume(away.sequence)
    tier.resume(away.sequence)
    assert int(here.wrong()) == int(away.wrong()) == 0


def test_a_page_is_mapped_again_after_its_first_row_is_gone() -> None:
    """Driver 580 refuses that for memory that was made for GPUDirect RDMA."""
    pool = Pool(open_driver("cuda"), 64)
    cache = Tensors(pool, 4, large=False).cache
    first = cache.start(64)
    second = first.fork()
    first.free()
    torch.cuda.synchronize()
    pool.trim_to()
    cache.part(second.ticket, 0)
    third = second.fork()
    assert third.length == 64
