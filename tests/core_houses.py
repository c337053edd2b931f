"""The second house, and the compiled core, behind the same methods: for a machine that compares them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.core.reordering import reorder

SIZE = 4096
MAX_SEQ_LEN, MAX_SEQUENCES = 100, 5
KEYS = [None, "tenant"]
"""Tenants; the core's key is the place. Bytes of tokens of the second are above 128."""
LAYOUTS = [
    vmmkv.KVLayout(3, 2, 16, torch.float32),
    vmmkv.KVLayout(3, [2, 1, 2], 16, torch.float32, layers_per_range=1),
    vmmkv.KVLayout(3, 2, 16, torch.float32, layers_per_range=2),
]
LONG = [
    vmmkv.KVLayout(3, 2, 80, torch.float32),
    vmmkv.KVLayout(3, [2, 1, 2], 96, torch.float32, layers_per_range=1),
]
"""Rows of several large frames."""


class House:
    """What both houses have in common: caches on one pool, on a driver that fails on demand."""

    name = ""

    def __init__(self, layouts: list[vmmkv.KVLayout]) -> None:
        self.driver = FaultyDriver(small_driver("cpu"))
        self.driver.changes_access = True
        self.layouts = layouts
        self.caches: list[Any] = []

    def memory(self, index: int, row: int, part: int, first: int, end: int) -> Any:
        """Bytes of tokens of a row: an array `[tokens, bytes of a record]`."""
        record = self.record(index, part)
        nbytes = (end - first) * record
        address = self.address(index, row, part) + first * record
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8).reshape(end - first, record)

    def record(self, index: int, part: int) -> int:
        return int(self.layouts[index].record_bytes[part])

    def address(self, index: int, row: int, part: int) -> int:
        raise NotImplementedError


class Old(House):
    """The second house."""

    name = "second house"

    def __init__(self, pages: int, layouts: list[vmmkv.KVLayout], options: list[dict[str, Any]]) -> None:
        super().__init__(layouts)
        self.pool = on_driver(self.driver, vmmkv.FramePool, max_bytes=pages * SIZE)
        for layout, each in zip(layouts, options):
            limit = each["limit"] * SIZE if each["limit"] else None
            self.caches.append(
                vmmkv.KVCache(
                    layout, MAX_SEQUENCES, MAX_SEQ_LEN, pool=self.pool, max_bytes=limit, lookahead=0,
                    guaranteed=each["reserved"] * SIZE, overread=each["overread"], large_frames=each["large"],
                    scrub=each["scrub"],
                )
            )  # fmt: skip

    def address(self, index: int, row: int, part: int) -> int:
        states = self.caches[index].range(part)
        return int(states.data_ptr() + row * self.stride(index, part))

    def stride(self, index: int, part: int) -> int:
        states = self.caches[index].range(part)
        return int(states.numel() * states.element_size() // MAX_SEQUENCES)

    def begin(self, index: int, tokens: int, expected: int, key: int, row: int | None) -> Any:
        return self.caches[index].sequence(tokens, expected_tokens=expected, tenant=KEYS[key], row=row)

    def step(self, index: int, sequences: list[Any]) -> None:
        self.caches[index].extend(sequences, 1)

    def unshare(self, index: int, sequence: Any, token: int) -> None:
        self.caches[index].unshare([sequence], token)

    def reorder(self, index: int, sequences: list[Any], indices: list[int]) -> None:
        self.caches[index].reorder(sequences, indices, share=False)

    def set_limit(self, pages: int) -> None:
        self.pool.set_limit(pages * SIZE)

    def collect(self) -> None:
        for cache in self.caches:
            assert cache.available_pages >= 0

    def used(self, index: int) -> int:
        return int(self.caches[index].stats().pages["used"])

    def physical(self) -> int:
        return int(self.pool.stats().physical_bytes) // SIZE

    def check(self) -> None:
        for cache in self.caches:
            cache.check()


class New(House):
    """The compiled core."""

    name = "core"

    def __init__(self, pages: int, layouts: list[vmmkv.KVLayout], options: list[dict[str, Any]]) -> None:
        super().__init__(layouts)
        self.driver.inner.memory_info = lambda: (1 << 22, 1 << 22)  # type: ignore[method-assign]
        self.pool = Pool(self.driver.inner, pages)
        for layout, each in zip(layouts, options):
            self.caches.append(Cache(self.pool, layout.record_bytes, MAX_SEQUENCES, MAX_SEQ_LEN, **each))

    def address(self, index: int, row: int, part: int) -> int:
        return int(self.caches[index].ranges[part]["address"]) + row * self.stride(index, part)

    def stride(self, index: int, part: int) -> int:
        return int(self.caches[index].ranges[part]["row_pages"]) * SIZE

    def begin(self, index: int, tokens: int, expected: int, key: int, row: int | None) -> Any:
        return self.caches[index].sequence(tokens, expected=expected, key=key, row=row)

    def step(self, index: int, sequences: list[Any]) -> None:
        self.caches[index].batch(sequences).extend()

    def unshare(self, index: int, sequence: Any, token: int) -> None:
        self.caches[index].part(sequence.ticket, token)

    def reorder(self, index: int, sequences: list[Any], indices: list[int]) -> None:
        reorder(self.caches[index], sequences, indices)

    def set_limit(self, pages: int) -> None:
        self.pool.set_limit(pages)

    def collect(self) -> None:
        for cache in self.caches:
            cache.sweep()

    def used(self, index: int) -> int:
        return int(self.pool.accounts[self.caches[index].account]["used"])

    def physical(self) -> int:
        return self.pool.word("created")

    def check(self) -> None:
        check(self.pool, self.caches)
