"""The door for guests. A guest, such as a tree of prefixes, remembers the tokens of frames and shares the frames later.

A guest holds frames: these outlive the rows in which they are mapped. The core knows no token ids. `join` starts the
notes of a cache, which tell of sequences that have ended (`FREED`) or were cut (`CUT`); a guest reads
them before each lookup, and forgets all that it knows of rows if the ring was full. `vmmkv.core.sharing.plan_share`
puts held frames in front of a new sequence, and `vmmkv.core.starting.adopt_kept` gives it a parked row as it is.

The entries here need no lock, and make no driver call. A plan that lacks pages returns `SHORT` and their number; the
shell asks guests to drop as many, without a lock, and plans again.

A list of frames is, for each range of the cache, the number of frames and then their numbers. The frames of a range lie
on its pages from 0 on, one behind the other.
"""

from ..compiled import entry, inner
from .access import cache_of, extent_at, frame_in, row_at, words_at
from .codes import DONE, NO_TOKEN
from .frames import add_gain, push_free
from .pages import active_row, frame_at, page_of
from .rows import settle_row, track


@entry
def join(cache: int, ring: int, size: int) -> int:
    """Starts the notes of a cache, in a ring of `size` notes."""
    c = cache_of(cache)
    c.ring_at, c.ring_size, c.guest, c.ring_head, c.ring_tail = ring, size, 1, 0, 0
    return DONE


@entry
def hold(cache: int, ticket: int, part: int, first: int, tokens: int, out: int, most: int) -> int:
    """References the frames of a range, from page `first` on, that a sequence's first tokens fill, and writes their
    numbers to `out`. Returns the number of frames, `GONE`, `SUSPENDED`, or `NO_TOKEN`: it has fewer tokens, or has
    released its front."""
    row = active_row(cache, ticket)
    if row < 0:
        return row
    r, numbers = row_at(cache, row), words_at(out, most)
    if tokens > r.length or r.start or r.broken:
        return NO_TOKEN
    page, count, end = first, 0, page_of(cache, part, tokens)
    while page < end and count < most:
        frame = frame_at(cache, part, row, page)
        pages = frame_in(cache_of(cache).pool, frame).pages
        if page + pages > end:
            break
        numbers[count] = frame
        page += pages
        count += 1
    if page > extent_at(cache, row, part).shared:
        track(cache, row, part, page)
    for index in range(count):
        reference(cache, numbers[index], 1)
    settle_row(cache, row)
    return count


@entry
def refer(cache: int, frames_at: int, count: int, sign: int) -> int:
    """Adds a reference to frames that are held (`sign` is 1), or ends one (-1)."""
    for index in range(count):
        reference(cache, words_at(frames_at, count)[index], sign)
    return DONE


@inner
def reference(cache: int, frame: int, sign: int) -> None:
    """Adds a reference to a frame, or ends one."""
    f = frame_in(cache_of(cache).pool, frame)
    add_gain(cache, frame, -1)
    f.held += sign
    add_gain(cache, frame, 1)
    if f.refs == 0 and f.held == 0:
        push_free(cache_of(cache).pool, frame)
