"""What a new cache is made of: its pool and budget, host memory, lookahead, and its event log."""

from __future__ import annotations

import os

from .arguments import not_negative
from .budget import budget_pages, parse_bytes
from .driver.driver import Driver
from .errors import ArgumentError
from .events import EventLog
from .layout import KVLayout
from .pool import FramePool

LOOKAHEAD_PAGES = 4
"""Pages of tokens mapped ahead by default, on a GPU."""


def check_log(log: object) -> None:
    """Raises `ArgumentError` for what is no log that can be a new cache's."""
    if not isinstance(log, EventLog):
        raise ArgumentError(f"got event_log={log!r}; it must be a vmmkv.events.EventLog")
    log.check_new()


def check_reserved(pool: FramePool | None, reserved: float | str) -> None:
    """Raises `ArgumentError` for a reservation without a pool."""
    if pool is None and reserved:
        raise ArgumentError(
            f"got reserved={reserved!r} without a pool; a cache by itself has all of max_bytes. Give it the pool that "
            "it shares with others"
        )


def pool_on(
    memory: Driver | FramePool,
    layout: KVLayout,
    max_sequences: int,
    max_bytes: float | str | None,
    max_tokens: int | None,
    overread: int,
) -> tuple[FramePool, int | None]:
    """Returns the pool that a cache lies on, its own on a driver or the given one, and the most pages that it may have
    of a given one. Raises what `budget_pages` raises."""
    if max_bytes is None and max_tokens is None:
        if isinstance(memory, FramePool):
            return memory, None
        max_bytes = "80%"
    pages = budget_pages(memory, layout, max_sequences, max_bytes, max_tokens, overread)
    if isinstance(memory, FramePool):
        return memory, pages
    pool = FramePool.on(memory, pages * memory.page_size)
    pool.is_shared = False
    return pool, None


def host_bytes_of(size: float | str) -> int:
    """Bytes of host memory; a share is of all that the host has."""
    return parse_bytes(size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def lookahead_of(asked: int | None, layout: KVLayout, pool: FramePool) -> int:
    """The tokens to map ahead: what was asked for, or else four pages of tokens on a GPU."""
    if asked is None:
        pages = 0 if pool.device.type == "cpu" else LOOKAHEAD_PAGES
        return -(-pages * pool.page_size // min(layout.record_bytes))
    return not_negative("lookahead", asked)
