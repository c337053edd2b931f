"""Committing: nodes for the tokens of a live sequence, and references to the frames that these fill."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.access import ask_of, cache_of, extent_at, pool_of, row_at
from ..core.codes import BROKEN, DEAD, DONE, GONE
from ..core.sharing import reference
from ..core.pages import frame_at, row_of
from ..core.rows import settle_row, track
from ..core.streams import order, unfinished
from ..core.tables import ROW_BITS
from .containers import arrange
from .holders import hold_row, read_notes, set_end
from .nodes import (
    add_node, attach, child_of, node_with, page_of, split, take_node, tidy, use_path, walk,
)  # fmt: skip
from .tables import (
    NO_FRONT, OTHER_IDS, RANGE_OF_TOKENS, TOKEN_BITS, TOO_FEW, held_frame, holders_of, nodes_of, parts_of, shapes_of,
    slots_of, tree_of,
)  # fmt: skip
from .telling import tell


@inner
def add_path(tree: int, key: int, ids_at: int, count: int) -> int:
    """Adds nodes for tokens that have none. Returns the node that ends with the last one, or with an earlier one where
    there is no room, or 0."""
    nodes, packed = nodes_of(tree), walk(tree, key, ids_at, count)
    node, tokens = packed >> TOKEN_BITS, packed & (1 << TOKEN_BITS) - 1
    if node == 0:
        node = child_of(tree, 0, key)
    if node == 0:
        node = take_node(tree)
        if node:
            nodes[node].first = key
            attach(tree, node)
    elif tokens < nodes[node].end:
        above, node = nodes[node].parent, split(tree, node, tokens)
        if node == 0:
            return above
    while node and tokens < count:
        child = add_node(tree, node, ids_at, tokens, count)
        if child == 0:
            break
        node, tokens = child, nodes[child].end
    return node


@inner
def is_known(tree: int, node: int, key: int, ids_at: int, count: int) -> int:
    """Whether ids begin like the path to a node, or are the beginning of it."""
    packed, both = walk(tree, key, ids_at, count), min(nodes_of(tree)[node].end, count)
    if packed & (1 << TOKEN_BITS) - 1 < both:
        return 0
    return 1 if both == 0 or node_with(tree, packed >> TOKEN_BITS, both) == node_with(tree, node, both) else 0


@inner
def list_path(tree: int, node: int, held: int, whole: int) -> int:
    """Lists the nodes of a path, the last one first: those behind `held` tokens, or not told, or all. Also writes down
    by range which groups of pages have a large frame. Returns the number of nodes."""
    t, nodes, parts, count = tree_of(tree), nodes_of(tree), parts_of(tree), 0
    path = view(t.path_at, t.path, np.int64)
    for part in range(t.ranges):
        last = nodes[node].end * parts[part].record // t.page_size // t.large
        groups = view(parts[part].groups_at, last + 1, np.int64)
        for group in range(last + 1):
            groups[group] = 0
    while nodes[node].parent and (whole or nodes[node].end > held or nodes[node].told == 0):
        path[count] = node
        count += 1
        for index in range(t.width if nodes[node].full else 0):
            page, s = page_of(tree, node, index), shapes_of(tree)[index]
            if page >= 0 and s.size > 1:
                group, slot = page // s.size, slots_of(tree, node)[index]
                view(parts[s.part].groups_at, group + 1, np.int64)[group] = slot
        node = nodes[node].parent
    return count


@inner
def hold_frames(tree: int, row: int, node: int) -> int:
    """References the frames that a row's first tokens fill at a node, where the node has none. Returns how many."""
    t, added, slots = tree_of(tree), 0, slots_of(tree, node)
    for index in range(t.width):
        page, s = page_of(tree, node, index), shapes_of(tree)[index]
        if page < 0 or slots[index] or (page < extent_at(t.cache, row, s.part).head_end) != (s.size > 1):
            continue
        p = parts_of(tree)[s.part]
        if s.size == 1 and view(p.groups_at, page // t.large + 1, np.int64)[page // t.large]:
            continue
        frame = frame_at(t.cache, s.part, row, page)
        slots[index] = frame + 1
        t.pages += held_frame(tree, frame + 1).pages
        p.covered = max(p.covered, page + s.size)
        reference(t.cache, frame, 1)
        added += 1
    nodes_of(tree)[node].full += added
    t.held += added
    return added


@inner
def hold_path(tree: int, row: int, count: int, key: int) -> None:
    """References the frames that a row's first tokens fill along a listed path, and tells what can be found then."""
    t, parts, deepest = tree_of(tree), parts_of(tree), count
    path = view(t.path_at, t.path, np.int64)
    for part in range(t.ranges):
        parts[part].covered = 0
    for index in range(count - 1, -1, -1):
        if hold_frames(tree, row, path[index]):
            deepest = index
    for part in range(t.ranges):
        if parts[part].covered > extent_at(t.cache, row, part).shared:
            track(t.cache, row, part, parts[part].covered)
    if deepest < count:
        settle_row(t.cache, row)
    for index in range(deepest, count):
        n = nodes_of(tree)[path[index]]  # it holds frames, or a node below it does
        nodes_of(tree)[n.parent].known_below += 1 - n.known
        n.known = 1
    for index in range(count - 1, deepest - 1, -1):  # parents come before children
        tell(tree, path[index], key)


@inner
def retain(tree: int, count: int, ranges_at: int, ranges: int) -> None:
    """Gives the nodes of a listed path the priorities of ranges of tokens: that of the first token of a page."""
    t, each = tree_of(tree), view(ranges_at, ranges, RANGE_OF_TOKENS)
    path, record = view(t.path_at, t.path, np.int64), parts_of(tree)[0].record
    for index in range(count if ranges else 0):
        n = nodes_of(tree)[path[index]]
        first = (n.begin * record // t.page_size * t.page_size + record - 1) // record
        for which in range(ranges):
            if each[which].start <= first < each[which].end:
                n.priority, n.expires = each[which].priority, each[which].expires
                arrange(tree, path[index])


@entry
def commit(tree: int, ticket: int, key: int, ids_at: int, count: int, ranges_at: int, ranges: int, ask: int) -> int:
    """Makes the first tokens of a live sequence known, with priorities of some ranges. Returns how many tokens are
    known of the sequence; or `GONE`, `BROKEN`, `TOO_FEW`, `NO_FRONT`, `OTHER_IDS`, or why no event could be recorded:
    nothing has changed then. It needs no lock."""
    t, nodes, owner, a = tree_of(tree), nodes_of(tree), ticket >> ROW_BITS, ask_of(ask)
    p = pool_of(cache_of(t.cache).pool)
    if p.dead:
        return DEAD
    read_notes(tree)
    row = row_of(t.cache, ticket)
    if row < 0:
        return GONE
    r, h = row_at(t.cache, row), holders_of(tree)[row]
    if r.broken:
        return BROKEN
    if r.start:
        return NO_FRONT
    if count > r.length:
        return TOO_FEW
    if h.owner != owner:
        set_end(tree, row, 0)
    if h.node and not is_known(tree, h.node, key, ids_at, count):
        return OTHER_IDS
    t.slots = unfinished(p.driver, t.slots, t.tick, ask)
    code = order(p.driver, r.streams, 0, t.slots, t.tick, 0, ask)  # what is held may be written to still
    if code != DONE:
        return code
    t.slots, t.tick = a.slots, a.tick
    if count == 0:
        return DONE
    known = nodes[h.node].end if h.node else 0
    if count > known:
        node = add_path(tree, key, ids_at, count)
        if node and nodes[node].end > known:
            hold_row(tree, row, owner, node)
        elif known == 0:
            tidy(tree, node)
    if h.node == 0:
        return 0
    listed = list_path(tree, h.node, h.held, ranges)
    retain(tree, listed, ranges_at, ranges)  # first, so that events have the new priorities
    hold_path(tree, row, listed, key)
    h.held = nodes[h.node].end
    use_path(tree, h.node)
    return h.held
