"""The compiled books on a GPU: contents that kernels write and check, on streams of several threads."""

from __future__ import annotations

import threading
from contextlib import suppress
from random import Random

import pytest
import torch
from conftest import ROUNDS, join

from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.core.sequence import Sequence
from vmmkv.driver.driver import open_driver
from vmmkv.errors import OutOfPagesError, OutOfRowsError
from vmmkv.layout import KVLayout
from vmmkv.tensors import export_range

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(8, 8, 256, torch.bfloat16)
"""32 tokens in a page of 2 MiB."""
WORDS = LAYOUT.record_bytes[0] // 4
MOST = 600
"""Tokens of a row."""
STEPS = 1500
"""Operations of a thread."""
NAMES = ["begin", "begin", "extend", "extend", "extend", "batch", "fork", "truncate", "free", "hand over", "trim"]


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


class Worker:
    """A thread with streams of its own, and its sequences in a cache that others use, too."""

    def __init__(self, tensors: Tensors, random: Random) -> None:
        self.tensors, self.random, self.rows = tensors, random, list[Row]()
        self.device = tensors.cache.pool.driver.device
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)]
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.cuda.stream(self.streams[0]):
                for _ in range(STEPS * ROUNDS):
                    with suppress(OutOfPagesError, OutOfRowsError):
                        self.step()
                    for row in self.random.sample(self.rows, min(len(self.rows), 2)):
                        self.wrong += row.wrong()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        random, cache = self.random, self.tensors.cache
        name = random.choice(NAMES)
        row = random.choice(self.rows) if self.rows else None
        if name == "begin" and len(self.rows) < 5:
            sequence = cache.start(random.choice([0, 3, 40, 300]))
            empty = torch.zeros((0, 1), dtype=torch.int32, device=self.device)
            self.rows.append(Row(self.tensors, sequence, empty))
            self.rows[-1].fill(0)
        elif name == "trim" and random.random() < 0.1:
            cache.pool.trim_to(random.choice([0, 50]))
        elif row is not None:
            self.use(name, row)

    def use(self, name: str, row: Row) -> None:
        random, sequence, length = self.random, row.sequence, row.sequence.length
        if name == "extend":
            sequence.extend(min(random.choice([0, 1, 7, 40, 200]), MOST - length))
            row.fill(length)
        elif name == "batch":
            rows = [each for each in self.rows if each.sequence.length < MOST]
            self.tensors.cache.batch(each.sequence for each in rows).extend()
            for each in rows:
                each.fill(each.sequence.length - 1)
        elif name == "fork" and len(self.rows) < 5:
            self.rows.append(Row(self.tensors, sequence.fork(), row.shadow))
        elif name == "truncate":
            sequence.truncate(random.randint(0, length))
            row.shadow = row.shadow[: sequence.length]
        elif name == "free":
            self.rows.remove(row)
            sequence.free()
        elif name == "hand over":
            here, there = self.streams
            there.wait_stream(here)
            sequence.record_stream(there)
            with torch.cuda.stream(there):
                found = row.wrong()
            if random.random() < 0.5:  # the books alone keep the pages until it is done
                self.rows.remove(row)
                sequence.free()
            here.wait_stream(there)
            self.wrong += found


def test_threads_whose_kernels_write_and_check() -> None:
    seed = Random().randrange(1 << 32)
    torch.cuda.manual_seed(seed)
    pool = Pool(open_driver("cuda"), 400)
    tensors = [
        Tensors(pool, 12, lookahead=40),
        Tensors(pool, 12, large=False, reserved=30),
        Tensors(pool, 12, scrub=True, limit=150),
        Tensors(pool, 12, overread=20),
    ]
    workers = [Worker(tensors[index % 4], Random(seed + index)) for index in range(8)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    join(*threads)
    torch.cuda.synchronize()
    for worker in workers:
        if worker.error:
            worker.error.add_note(f"seed {seed}")
            raise worker.error
    assert [int(worker.wrong) for worker in workers] == [0] * 8, f"seed {seed}"
    if pool.mapper:
        pool.mapper.stop()
    check(pool, [each.cache for each in tensors])
    for each in tensors:
        each.cache.close()
    pool.trim_to()
    assert (pool.word("used"), pool.word("created"), pool.word("committed")) == (0, 0, 0)


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
