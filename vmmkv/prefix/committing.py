"""Committing: nodes for the tokens of a live sequence, and references to the frames that these fill."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.guests import reference
from ..core.rows import frame_at, place, recount, row_of, track
from ..core.streams import pending_slots, record_slots
from ..core.tables import ASK, BROKEN, CACHE, DEAD, DONE, EXTENT, FAILED, FRAME, GONE, LISTS, POOL, ROW, ROW_BITS
from ..driver.running import enter, leave
from .holders import hold_row, read_notes, set_end
from .nodes import add_node, add_root, node_with, split, tidy, use_path, walk
from .order import arrange
from .tables import (
    HOLDER,
    NO_FRONT,
    NODE,
    OTHER_IDS,
    PART,
    RANGE_OF_TOKENS,
    TOKEN_BITS,
    TOO_FEW,
    TREE,
)
from .telling import know, tell


@inner
def add_path(tree: int, key: int, ids_at: int, wide: int, count: int) -> int:
    """Adds nodes for tokens that have none. Returns the node that ends with the last one, or with an earlier one where
    there is no room, or 0."""
    t = view(tree, 1, TREE)[0]
    nodes, packed = view(t.nodes_at, t.nodes, NODE), walk(tree, key, ids_at, wide, count)
    node, tokens = packed >> TOKEN_BITS, packed & (1 << TOKEN_BITS) - 1
    if node == 0:
        node = add_root(tree, key)
    elif tokens < nodes[node].end:
        above, node = nodes[node].parent, split(tree, node, tokens)
        if node == 0:
            return above
    while node and tokens < count:
        child = add_node(tree, node, ids_at, wide, tokens, count)
        if child == 0:
            break
        node, tokens = child, nodes[child].end
    return node


@inner
def fence_writes(tree: int, row: int, ask: int) -> int:
    """Adds the work so far on a row's streams to the fence of what is held. Returns `DONE`, `CAPTURED` or `FAILED`."""
    t = view(tree, 1, TREE)[0]
    c, a = view(t.cache, 1, CACHE)[0], view(ask, 1, ASK)[0]
    streams = view(c.rows_at, c.num_rows + LISTS, ROW)[row].streams
    if streams == 0:
        return DONE
    driver = view(c.pool, 1, POOL)[0].driver
    if enter(driver, ask):
        return FAILED
    code = record_slots(driver, streams, 0, ask)
    if code == DONE:
        pending = pending_slots(driver, t.slots, t.tick) if t.slots else 0
        t.slots, t.tick = pending | a.slots, max(t.tick, a.tick)
    leave(driver, ask)
    return code


@inner
def list_path(tree: int, node: int, held: int, whole: int) -> int:
    """Lists the nodes of a path, the last one first: those behind `held` tokens, or not told, or all. Also writes down
    by range which groups of pages have a large frame. Returns the number of nodes."""
    t = view(tree, 1, TREE)[0]
    nodes, path = view(t.nodes_at, t.nodes, NODE), view(t.path_at, t.path, np.int64)
    parts, count = view(t.parts_at, t.ranges, PART), 0
    for part in range(t.ranges):
        last = nodes[node].end * parts[part].record // t.page_size // t.large
        groups = view(parts[part].groups_at, last + 1, np.int64)
        for group in range(last + 1):
            groups[group] = 0
    while nodes[node].parent and (whole or nodes[node].end > held or nodes[node].told == 0):
        n = nodes[node]
        path[count] = node
        count += 1
        slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
        for part in range(t.ranges if n.full else 0):
            p = parts[part]
            first = n.begin * p.record // t.page_size // t.large
            for group in range(first, n.end * p.record // t.page_size // t.large):
                view(p.groups_at, group + 1, np.int64)[group] = slots[p.large + group - first]
        node = n.parent
    return count


@inner
def hold_frames(tree: int, row: int, node: int, tokens: int) -> int:
    """References the frames that a row's first tokens fill at a node, where the node has none. Returns how many."""
    t = view(tree, 1, TREE)[0]
    c, n, added = view(t.cache, 1, CACHE)[0], view(t.nodes_at, t.nodes, NODE)[node], 0
    slots, parts = view(t.slots_at + 8 * node * t.width, t.width, np.int64), view(t.parts_at, t.ranges, PART)
    pool = view(c.pool, 1, POOL)[0]
    for part in range(t.ranges):
        p = parts[part]
        first, end = n.begin * p.record // t.page_size, n.end * p.record // t.page_size
        if first == end:
            continue
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        groups = view(p.groups_at, tokens * p.record // t.page_size // t.large + 1, np.int64)
        for page in range(first, end):
            slot, group = p.single + page - first, page // t.large
            if page < e.head_end:
                if page % t.large < t.large - 1:
                    continue
                slot = p.large + group - first // t.large
            elif groups[group]:
                continue
            if slots[slot] == 0:
                frame = frame_at(t.cache, part, row, page)
                slots[slot] = frame + 1
                t.pages += view(pool.frames_at, pool.capacity, FRAME)[frame].pages
                p.covered = max(p.covered, page + 1)
                reference(t.cache, frame, 1)
                added += 1
    n.full += added
    t.held += added
    return added


@inner
def hold_path(tree: int, row: int, count: int, tokens: int, key: int) -> None:
    """References the frames that a row's first tokens fill along a listed path, and tells what can be found then."""
    t = view(tree, 1, TREE)[0]
    c = view(t.cache, 1, CACHE)[0]
    path, parts = view(t.path_at, t.path, np.int64), view(t.parts_at, t.ranges, PART)
    deepest, added = -1, 0
    for part in range(t.ranges):
        parts[part].covered = 0
    for index in range(count - 1, -1, -1):
        found = hold_frames(tree, row, path[index], tokens)
        added += found
        if found:
            deepest = index
    for part in range(t.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        if parts[part].covered > e.shared:
            track(t.cache, row, part, parts[part].covered)
    if added:
        recount(t.cache, row)
        place(t.cache, row)
    for index in range(deepest, count if deepest >= 0 else deepest):
        know(tree, path[index])
    for index in range(count - 1, deepest - 1 if deepest >= 0 else count - 1, -1):  # parents come before children
        tell(tree, path[index], key)


@inner
def retain(tree: int, count: int, ranges_at: int, ranges: int) -> None:
    """Gives the nodes of a listed path the priorities of ranges of tokens: that of the first token of a page."""
    t = view(tree, 1, TREE)[0]
    nodes, path = view(t.nodes_at, t.nodes, NODE), view(t.path_at, t.path, np.int64)
    record, each = view(t.parts_at, t.ranges, PART)[0].record, view(ranges_at, ranges, RANGE_OF_TOKENS)
    for index in range(count if ranges else 0):
        n = nodes[path[index]]
        first = (n.begin * record // t.page_size * t.page_size + record - 1) // record
        for which in range(ranges):
            if each[which].start <= first < each[which].end:
                n.priority, n.expires = each[which].priority, each[which].expires
                arrange(tree, path[index])


@entry
def commit(
    tree: int, ticket: int, key: int, ids_at: int, count: int, wide: int, ranges_at: int, ranges: int, ask: int
) -> int:
    """Makes the first tokens of a live sequence known, with priorities of some ranges. Returns how many tokens are
    known of the sequence; or `GONE`, `BROKEN`, `TOO_FEW`, `NO_FRONT`, `OTHER_IDS`, or why no event could be recorded:
    nothing has changed then. It needs no lock."""
    t = view(tree, 1, TREE)[0]
    c, nodes = view(t.cache, 1, CACHE)[0], view(t.nodes_at, t.nodes, NODE)
    if view(c.pool, 1, POOL)[0].dead:
        return DEAD
    read_notes(tree)
    row = row_of(t.cache, ticket)
    if row < 0:
        return GONE
    r, h = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(t.holders_at, t.num_rows, HOLDER)[row]
    if r.broken:
        return BROKEN
    if r.start:
        return NO_FRONT
    if count > r.length:
        return TOO_FEW
    if h.node and h.owner != ticket >> ROW_BITS:
        set_end(tree, row, 0)
    if h.node and not is_known(tree, h.node, key, ids_at, count, wide):
        return OTHER_IDS
    code = fence_writes(tree, row, ask)
    if code != DONE or count == 0:
        return code
    known = nodes[h.node].end if h.node else 0
    node = h.node
    if count > known:
        node = add_path(tree, key, ids_at, wide, count)
        if node and nodes[node].end > known:
            hold_row(tree, row, ticket >> ROW_BITS, node)
        elif known == 0:
            tidy(tree, node)
        node = h.node
    if node == 0:
        return 0
    listed = list_path(tree, node, h.held, ranges)
    retain(tree, listed, ranges_at, ranges)  # first, so that events have the new priorities
    hold_path(tree, row, listed, nodes[node].end, key)
    h.held = nodes[node].end
    use_path(tree, node)
    return nodes[node].end


@inner
def is_known(tree: int, node: int, key: int, ids_at: int, count: int, wide: int) -> int:
    """Whether ids begin like the path to a node, or are the beginning of it."""
    t = view(tree, 1, TREE)[0]
    nodes, packed = view(t.nodes_at, t.nodes, NODE), walk(tree, key, ids_at, wide, count)
    both = min(nodes[node].end, count)
    if packed & (1 << TOKEN_BITS) - 1 < both:
        return 0
    if both == 0:
        return 1
    return 1 if node_with(tree, packed >> TOKEN_BITS, both) == node_with(tree, node, both) else 0
