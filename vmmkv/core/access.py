"""Accessors: records and tables by the address of a pool or of a cache, for compiled functions."""

from typing import Any

import numpy as np

from ..compiled import accessor
from ..compiled.native import view
from ..driver.table import DRIVER
from .tables import ACCOUNT, ASK, CACHE, EXTENT, FRAME, LISTS, POOL, RANGE, ROW, STEP


@accessor
def driver_of(driver: int) -> Any:
    """The record of a driver."""
    return view(driver, 1, DRIVER)[0]


@accessor
def ask_of(ask: int) -> Any:
    """The caller's record."""
    return view(ask, 1, ASK)[0]


@accessor
def words_at(address: int, count: Any) -> Any:
    """An array of so many integers."""
    return view(address, count, np.int64)


@accessor
def pool_of(pool: int) -> Any:
    """The record of a pool."""
    return view(pool, 1, POOL)[0]


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
def cache_of(cache: int) -> Any:
    """The record of a cache."""
    return view(cache, 1, CACHE)[0]


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
