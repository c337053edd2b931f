"""The door for guests: what remembers the tokens of frames, such as a tree of prefixes, and shares them later.

A guest holds frames: these outlive the rows in which they are mapped. The core knows no token ids.

    join      once for a cache. From then on notes are written of sequences that end (`FREED`) or are cut (`CUT`).
    notes     takes notes, the oldest first; a guest does so before it looks anything up. A full ring drops the oldest
              and counts them: the guest then forgets what it knows of rows.
    hold      references to the full frames in front of a live sequence's tokens, whose numbers are written down.
    drop      ends references. A frame that is in no row is free then; one that is in a parked row can be reclaimed.
    pin       counts frames as used while they are copied, or until a plan has shared them; `unpin` ends that.
    share     see `vmmkv.core.sharing.plan_share`: frames that are held, in front of a new sequence, in the same journal
              as its other pages.
    adopt     see `vmmkv.core.starting.adopt_kept`: a parked row as it is.

`join`, `notes`, `hold`, `drop`, `pin` and `unpin` are one compiled call each, need no lock, and make no driver call but
queries. `share` is a plan. A plan that is short returns `SHORT` and a number of pages; its caller has guests drop as
many, without a lock, and plans again. A guest never drops frames that it has pinned.

Lists of frames are, for each range of the cache, the number of frames and then these; a range's frames lie on its pages
from 0 on, one behind the other.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from .frames import add_gain, push_free
from .rows import add_user, frame_at, page_of, place, recount, row_of, track
from .tables import CACHE, DONE, EXTENT, FRAME, GONE, LISTS, NO_TOKEN, NOTE, POOL, ROW


@entry
def join(cache: int, ring: int, size: int) -> int:
    """Has notes written to a ring of so many."""
    c = view(cache, 1, CACHE)[0]
    c.ring_at, c.ring_size, c.guest, c.ring_head, c.ring_tail = ring, size, 1, 0, 0
    return DONE


@entry
def notes(cache: int, out: int, most: int) -> int:
    """Takes up to so many notes. Returns how many there were; or -1, once, where notes were lost."""
    c = view(cache, 1, CACHE)[0]
    if c.ring_head - c.ring_tail > c.ring_size:
        c.ring_tail = c.ring_head
        return -1
    taken = min(most, c.ring_head - c.ring_tail)
    ring, found = view(c.ring_at, c.ring_size, NOTE), view(out, most, NOTE)
    for index in range(taken):
        source, target = ring[(c.ring_tail + index) % c.ring_size], found[index]
        target.kind, target.row, target.owner, target.tokens = source.kind, source.row, source.owner, source.tokens
    c.ring_tail += taken
    return taken


@entry
def hold(cache: int, ticket: int, part: int, first: int, tokens: int, out: int, most: int) -> int:
    """References frames of a range that are full of a sequence's first tokens, from page `first` on, and writes their
    numbers to `out`. Returns how many frames there are, or `GONE` or `NO_TOKEN`: it has fewer tokens, or its front was
    given back."""
    c, row = view(cache, 1, CACHE)[0], row_of(cache, ticket)
    if row < 0:
        return GONE
    p, r = view(c.pool, 1, POOL)[0], view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    if tokens > r.length or r.start or r.broken:
        return NO_TOKEN
    numbers, page, count, end = view(out, most, np.int64), first, 0, page_of(cache, part, tokens)
    while page < end and count < most:
        frame = frame_at(cache, part, row, page)
        pages = view(p.frames_at, p.capacity, FRAME)[frame].pages
        if page + pages > end:
            break
        numbers[count] = frame
        page += pages
        count += 1
    if page > e.shared:
        track(cache, row, part, page)
    for index in range(count):
        reference(cache, numbers[index], 1)
    recount(cache, row)
    place(cache, row)
    return count


@entry
def drop(cache: int, frames_at: int, count: int) -> int:
    """Ends references to frames."""
    frames = view(frames_at, count, np.int64)
    for index in range(count):
        reference(cache, frames[index], -1)
    return DONE


@inner
def reference(cache: int, frame: int, sign: int) -> None:
    """Adds to the references of a frame, or ends one."""
    pool = view(cache, 1, CACHE)[0].pool
    f = view(view(pool, 1, POOL)[0].frames_at, frame + 1, FRAME)[frame]
    add_gain(cache, frame, -1)
    f.held += sign
    add_gain(cache, frame, 1)
    if f.refs == 0 and f.held == 0:
        push_free(pool, frame)


@entry
def pin(cache: int, frames_at: int, count: int, sign: int) -> int:
    """Counts frames as used (`sign` is 1), or ends that (-1)."""
    frames = view(frames_at, count, np.int64)
    for index in range(count):
        add_user(cache, frames[index], sign)
    return DONE
