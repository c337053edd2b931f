"""Counts of pages, rows and bytes, in one call each, so that no other thread's change falls in the middle."""

from ..compiled import entry
from ..compiled.native import view
from .access import cache_of, extent_at, frame_in, pool_of, range_at, row_at, words_at
from .codes import DONE, NEEDS
from .pages import frame_at
from .tables import COUNTS, RETIRED


@entry
def count(cache: int, seen_at: int, pages: int, counts_at: int) -> int:
    """Counts what `COUNTS` names. `seen_at` has numbers, all of them 0, for so many pages; frames with numbers below
    `fresh` may have `large` pages each. Returns `DONE`; or `NEEDS`: there are more frames. It needs no lock."""
    c, n, seen = cache_of(cache), view(counts_at, 1, COUNTS)[0], words_at(seen_at, pages)
    p = pool_of(c.pool)
    size = p.page_size
    if p.fresh * p.large > pages:
        return NEEDS
    for row in range(c.num_rows):
        r, is_mapped = row_at(cache, row), 0
        for part in range(c.ranges):
            e, record = extent_at(cache, row, part), range_at(cache, part).record
            begin, end, page = r.start * record, r.length * record, e.first
            is_mapped |= e.mapped > e.first
            while page < min(e.shared, e.mapped):  # a frame may be there twice, or in another row, too
                frame = frame_at(cache, part, row, page)
                first, behind = frame * p.large, frame * p.large + frame_in(c.pool, frame).pages
                n.mapped += behind - first if not seen[first] else 0
                for place in range(first, behind):
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
