"""Fills of the compiled core. That no page goes while a fill of it is under way is for `test_core.py` to say."""

from __future__ import annotations

import ctypes

import numpy as np
from core_rows import new_cache, new_pool, token_at

from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.pool import Pool
from vmmkv.core.tables import NOTE


def bytes_of(cache: Cache, row: int, first: int, end: int) -> bytes:
    """What lies where tokens of a row are, or have been, in all ranges."""
    places = [(*token_at(cache, row, part, first),) for part in range(len(cache.ranges))]
    return b"".join(ctypes.string_at(place, record * (end - first)) for place, record in places)


def test_poison_leaves_alone_what_kernels_or_guests_may_read() -> None:
    pool = Pool(new_pool().driver, 200, poison=True)
    overread, known = new_cache(pool, overread=9), new_cache(pool)
    ring = np.zeros(8, NOTE)
    entries.join(known.address, ring.ctypes.data, len(ring))
    for cache in (overread, known):
        sequence = cache.start(50)
        row = sequence.row
        if cache is overread:
            assert 0xFF not in bytes_of(cache, row, 0, 59)
            sequence.truncate(3)
            assert 0xFF not in bytes_of(cache, row, 0, 59)
        for part in range(len(cache.ranges)):
            place, record = token_at(cache, row, part, 0)
            ctypes.memset(place, 7, record * sequence.length)
        length = sequence.length
        sequence.free()
        assert set(bytes_of(cache, row, 0, length)) == {7}
