"""Evicting: frames that are held for the least needed nodes are dropped, or go to the host first."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.access import extent_at, row_at
from ..core.sharing import reference
from .committing import hold_path, list_path
from .containers import arrange, arrange_up, first_of, take_off
from .holders import read_notes, set_end, tokens_of
from .hosted import list_lead, list_page
from .nodes import bucket_of, node_with, page_of, tidy
from .tables import CLEARED, MOVED, held_frame, holders_of, marks_of, nodes_of, parts_of, shapes_of, slots_of, tree_of
from .telling import emit, untell


@inner
def is_used(tree: int, slot: int, end: int) -> int:
    """Whether live rows, or the journal, use the frame in a slot, which is held for tokens up to `end`. Not, where the
    only row with the frame ends in front of that: if the frame is dropped, the row needs no copy of it to grow."""
    f = held_frame(tree, slot)
    if f.users == 1 and f.refs == 1:
        r = row_at(tree_of(tree).cache, f.place)
        return 0 if r.owner and r.length < end else 1
    return 1 if f.users else 0


@inner
def is_in_use(tree: int, node: int) -> int:
    """Whether live rows, or the journal, use a frame of a node: to drop it would give nothing. Not, where no row uses
    another frame of the node or in front, which it keeps from being dropped: rows have released their fronts, say."""
    nodes, used = nodes_of(tree), 0
    for slot in slots_of(tree, node):
        used |= is_used(tree, slot, nodes[node].end) if slot else 0
    while used and nodes[node].parent:
        for slot in slots_of(tree, node):
            if slot and held_frame(tree, slot).users == 0:
                used = 0
        node = nodes[node].parent
    return used


@inner
def drop_slot(tree: int, node: int, index: int) -> int:
    """Ends the reference to a frame of a node. Returns the pages that are free then, can be reclaimed, or need no copy
    when their row grows."""
    t, n, slots = tree_of(tree), nodes_of(tree)[node], slots_of(tree, node)
    slot = slots[index]
    if slot == 0:
        return 0
    size = held_frame(tree, slot).pages
    pages = 0 if is_used(tree, slot, n.end) else size
    slots[index] = 0
    n.full -= 1
    t.held -= 1
    t.pages -= size
    reference(t.cache, slot - 1, -1)
    return pages


@inner
def drop_frames(tree: int, node: int) -> int:
    """Ends the references to the frames of a node. Returns what `drop_slot` does, for all of them."""
    pages = 0
    for index in range(tree_of(tree).width):
        pages += drop_slot(tree, node, index)
    return pages


@inner
def drop_doubles(tree: int, row: int) -> int:
    """Drops frames that no live row uses, of tokens that a live row has committed, too, and holds the row's own frames
    instead, where these tokens fill them. Returns the pages that are free then, or can be reclaimed."""
    t, h, nodes = tree_of(tree), holders_of(tree)[row], nodes_of(tree)
    if h.node == 0 or h.parked or row_at(t.cache, row).busy:
        return 0
    node = node_with(tree, h.node, h.held)
    node = nodes[node].parent if nodes[node].end > h.held else node
    tokens = nodes[node].end
    if tokens == 0 or tokens_of(tree, row) < tokens:
        return 0
    count, gained, is_bare, path = list_path(tree, node, 0, 1), 0, 0, view(t.path_at, t.path, np.int64)
    for which in range(count):
        n, node = nodes[path[which]], path[which]
        others = n.known_below - is_bare  # nodes below that need what is in front of them
        for index in range(t.width if n.full else 0):
            page, s, slot = page_of(tree, node, index), shapes_of(tree)[index], slots_of(tree, node)[index]
            if slot == 0 or held_frame(tree, slot).users:
                continue
            fits = (page // t.large + 1) * t.large * t.page_size <= tokens * parts_of(tree)[s.part].record
            if s.size > 1 or fits or others == 0 or page >= extent_at(t.cache, row, s.part).head_end:
                gained += drop_slot(tree, node, index)
        is_bare = 1 if n.known and n.full == 0 and others == 0 else 0
    if gained:
        key = nodes[nodes[path[count - 1]].parent].first
        hold_path(tree, row, list_path(tree, path[0], 0, 1), key)
        for which in range(count):
            untell(tree, path[which])
    return gained


@inner
def leave(tree: int, node: int) -> None:
    """Forgets rows that end at a node without frames, and removes it if nothing needs it."""
    n = nodes_of(tree)[node]
    n.pins += 1  # until its rows are forgotten
    while n.holder:
        set_end(tree, n.holder - 1, 0)
    n.pins -= 1
    untell(tree, node)
    arrange_up(tree, n.parent)
    tidy(tree, node)


@inner
def must_move(tree: int, node: int, lowest: int) -> int:
    """Whether a node is to go to the host: it holds frames that its copy there, if it has one, does not cover."""
    n, slots, marks = nodes_of(tree)[node], slots_of(tree, node), marks_of(tree, node)
    for index in range(tree_of(tree).width if n.priority >= lowest else 0):
        if slots[index] and (n.host <= 0 or marks[index] == 0):
            return 1
    return 0


@inner
def move(tree: int, node: int, out: int) -> int:
    """Lists the pages of a node, which go to the host, and drops its own references to them. Returns their number."""
    t, n, slots, marks = tree_of(tree), nodes_of(tree)[node], slots_of(tree, node), marks_of(tree, node)
    before, old = t.moved, max(n.host, 0)
    t.serial += 1
    n.host, n.lead = -t.serial, 0
    for index in range(t.width):
        marks[index] = 1 if slots[index] else 0
    for index in range(t.width):
        page, s = page_of(tree, node, index), shapes_of(tree)[index]
        if slots[index] and (s.size > 1 or not is_in_large(tree, node, s.part, page)):
            for offset in range(s.size):
                list_page(tree, out, node, s.part, page + offset, slots[index], offset, old)
    drop_frames(tree, node)
    leave(tree, node)
    return t.moved - before


@inner
def is_in_large(tree: int, node: int, part: int, page: int) -> int:
    """Whether a node holds a large frame around a page."""
    for index in range(tree_of(tree).width):
        s, first = shapes_of(tree)[index], page_of(tree, node, index)
        if s.size > 1 and s.part == part and slots_of(tree, node)[index] and first <= page < first + s.size:
            return 1
    return 0


@entry
def evict(tree: int, pages: int, now: int, lowest: int, out: int, most: int) -> int:
    """Drops frames that no live sequence uses, until so many pages are free or can be reclaimed: the lowest priority
    first, then the least recently used, each behind all that follow it; last, those of tokens that a live row has on
    frames of its own. Returns the number of pages. `now` is a time in nanoseconds. It needs no lock.

    With room for a list of `most` pages, nodes of a priority of at least `lowest` go to the host: their pages are
    listed at `out`, and count as well. `moved` of the tree is their number; the caller copies them, and then calls
    `settle_moved`.
    """
    t, gained, passed = tree_of(tree), 0, 0
    read_notes(tree)
    t.now, node = now, first_of(t.timers)
    while node and nodes_of(tree)[node].expires <= now:  # its priority has expired
        arrange(tree, node)
        node = first_of(t.timers)
    path, node = view(t.path_at, t.path, np.int64), first_of(t.order)
    while node and gained < pages and passed < t.path:
        if is_in_use(tree, node):
            take_off(t.order, node)
            path[passed] = node
            passed += 1
        elif most and must_move(tree, node, lowest):
            if t.moved + t.width * t.large > most:
                break
            gained += move(tree, node, out)
        else:
            gained += drop_frames(tree, node)
            leave(tree, node)
        node = first_of(t.order)
    for index in range(passed):
        arrange(tree, path[index])
    for row in range(t.num_rows if gained < pages else 0):  # a live row's nodes are in no order
        gained += drop_doubles(tree, row) if gained < pages else 0
    last, moved = 0, view(out, most, MOVED)
    for index in range(t.moved if most else 0):
        node = moved[index].node
        if node != last and nodes_of(tree)[nodes_of(tree)[node].parent].host >= 0:
            list_lead(tree, node, out, most)
        last = node
    return gained


@entry
def clear(tree: int) -> int:
    """Drops all frames, and forgets all rows and tokens. The caller holds the planning lock. Returns the pages that are
    free then, or can be reclaimed."""
    t, pages = tree_of(tree), 0
    read_notes(tree)
    buckets = view(t.buckets_at, t.mask + 1, np.int64)
    for node in range(1, t.fresh):
        n = nodes_of(tree)[node]
        pages += drop_frames(tree, node)
        n.host = buckets[bucket_of(tree, n.parent, n.first)] = 0
        take_off(t.order, node)
        take_off(t.timers, node)
    for row in range(t.num_rows):
        h = holders_of(tree)[row]
        h.node = h.owner = h.held = h.parked = 0
    nodes_of(tree)[0].child = nodes_of(tree)[0].children = nodes_of(tree)[0].known_below = 0
    t.fresh, t.free, t.used = 1, 0, 0
    emit(tree, CLEARED, 0, 0)
    return pages
