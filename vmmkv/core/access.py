"""Accessors: records and tables by the address of a pool or of a cache, for compiled functions."""

from typing import Any

import numpy as np

from ..compiled import accessor
from ..compiled.native import view
from ..driver.table import DRIVER
from .tables import ACCOUNT, ASK, CACHE, EXTENT, FRAME, LISTS, POOL, RANGE, ROW, STEP


def record_of(kind: np.dtype[np.void]) -> Any:
    """An accessor of the record at an address."""

    @accessor
    def found(address: int) -> Any:
        return view(address, 1, kind)[0]

    return found


driver_of, ask_of, pool_of, cache_of = (record_of(kind) for kind in (DRIVER, ASK, POOL, CACHE))


@accessor
def words_at(address: int, count: Any) -> Any:
    """An array of so many integers."""
    return view(address, count, np.int64)


@accessor
def account_in(pool: int, number: int) -> Any:
    """An account of a pool."""
    return view(pool_of(pool).accounts_at, pool_of(pool).accounts, ACCOUNT)[number]


@accessor
def caches_of(pool: int) -> Any:
    """The addresses of a pool's caches; 0 where there is none."""
    return words_at(pool_of(pool).caches_at, pool_of(pool).caches)


@accessor
def frame_in(pool: int, frame: int) -> Any:
    """The record of a frame."""
    return view(pool_of(pool).frames_at, pool_of(pool).capacity, FRAME)[frame]


@accessor
def step_in(pool: int, index: int) -> Any:
    """A step of the journal."""
    return view(pool_of(pool).steps_at, pool_of(pool).max_steps, STEP)[index]


@accessor
def rows_of(cache: int) -> Any:
    """All rows, and behind them the heads of lists."""
    return view(cache_of(cache).rows_at, cache_of(cache).num_rows + LISTS, ROW)


@accessor
def row_at(cache: int, row: int) -> Any:
    """The record of a row."""
    return rows_of(cache)[row]


@accessor
def range_at(cache: int, part: int) -> Any:
    """The record of a range."""
    return view(cache_of(cache).ranges_at, cache_of(cache).ranges, RANGE)[part]


@accessor
def extent_at(cache: int, row: int, part: int) -> Any:
    """The extents of a row in a range."""
    c = cache_of(cache)
    return view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
