"""Counts of pages, rows and bytes, in one call each, so that no other thread's change falls in the middle."""

import numpy as np

from ..compiled import entry
from ..compiled.native import view
from .rows import frame_at
from .tables import CACHE, COUNTS, DONE, EXTENT, FRAME, LISTS, NEEDS, POOL, RANGE, RETIRED, ROW


@entry
def count(cache: int, seen_at: int, pages: int, counts_at: int) -> int:
    """Counts what `COUNTS` names. `seen_at` has numbers, all of them 0, for so many pages; frames with numbers below
    `fresh` may have `large` pages each. Returns `DONE`; or `NEEDS`: there are more frames. It needs no lock."""
    c, n = view(cache, 1, CACHE)[0], view(counts_at, 1, COUNTS)[0]
    p, rows = view(c.pool, 1, POOL)[0], view(c.rows_at, c.num_rows + LISTS, ROW)
    frames, seen = view(p.frames_at, p.capacity, FRAME), view(seen_at, pages, np.int64)
    if p.fresh * p.large > pages:
        return NEEDS
    extents = view(c.extents_at, c.num_rows * c.ranges, EXTENT)
    for row in range(c.num_rows):
        r, is_mapped = rows[row], 0
        for part in range(c.ranges):
            e, record = extents[row * c.ranges + part], view(c.ranges_at, c.ranges, RANGE)[part].record
            begin, end = r.start * record, r.length * record
            page, size = e.first, p.page_size
            is_mapped |= e.mapped > e.first
            while page < min(e.shared, e.mapped):  # a frame may be there twice, or in another row, too
                frame = frame_at(cache, part, row, page)
                if not seen[frame * p.large]:
                    n.mapped += frames[frame].pages
                for place in range(frame * p.large, frame * p.large + frames[frame].pages):
                    used = max(min(end, page * size + size) - max(begin, page * size), 0) if r.owner else 0
                    n.bytes += max(used + 1 - seen[place], 0) - (seen[place] == 0)
                    seen[place] = max(seen[place], used + 1)
                    page += 1
            n.mapped += max(e.mapped - page, 0)
            if r.owner:
                n.bytes += max(min(end, e.mapped * size) - max(begin, page * size), 0)
                n.uses += e.use_end - e.use_first
        n.live += r.owner > 0
        n.retired += r.owner == 0 and r.list == RETIRED
        n.parked += r.owner == 0 and r.list != RETIRED and is_mapped
    return DONE
