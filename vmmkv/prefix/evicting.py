"""Evicting: frames that are held for the least needed nodes are dropped, or go to the host first."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.guests import reference
from ..core.tables import CACHE, DONE, EXTENT, FRAME, LISTS, POOL, ROW
from .committing import hold_path, list_path
from .finding import gather
from .holders import forget_rows, read_notes, set_end, tokens_of
from .hosted import lead_start, own_first
from .nodes import node_with, tidy
from .order import ORDER, arrange, arrange_up, expire, take_off
from .tables import HOLDER, MOVED, NODE, PART, TREE
from .telling import emit_cleared, untell


@inner
def users_of(tree: int, slot: int) -> int:
    """Live rows, and steps of the journal, that use the frame in a slot."""
    pool = view(view(tree, 1, TREE)[0].cache, 1, CACHE)[0].pool
    return int(view(view(pool, 1, POOL)[0].frames_at, slot, FRAME)[slot - 1].users)


@inner
def is_used(tree: int, slot: int, end: int) -> int:
    """Whether live rows, or the journal, use the frame in a slot, which is held for tokens up to `end`. Not, where the
    only row with the frame ends in front of that: if the frame is dropped, the row needs no copy of it to grow."""
    t = view(tree, 1, TREE)[0]
    c = view(t.cache, 1, CACHE)[0]
    f = view(view(c.pool, 1, POOL)[0].frames_at, slot, FRAME)[slot - 1]
    if f.users == 1 and f.refs == 1:
        r = view(c.rows_at, f.place + 1, ROW)[f.place]
        return 0 if r.owner and r.length < end else 1
    return 1 if f.users else 0


@inner
def is_in_use(tree: int, node: int) -> int:
    """Whether live rows, or the journal, use a frame of a node: to drop it would give nothing. Not, where no row uses
    another frame of the node or in front, which it keeps from being dropped: rows have released their fronts, say."""
    t, used = view(tree, 1, TREE)[0], 0
    nodes = view(t.nodes_at, t.nodes, NODE)
    slots, each = view(t.slots_at + 8 * node * t.width, t.width, np.int64), node
    for index in range(t.width):
        if slots[index]:
            used |= is_used(tree, slots[index], nodes[node].end)
    while used and nodes[each].parent:
        slots = view(t.slots_at + 8 * each * t.width, t.width, np.int64)
        for index in range(t.width):
            if slots[index] and users_of(tree, slots[index]) == 0:
                used = 0
        each = nodes[each].parent
    return used


@inner
def drop_slot(tree: int, node: int, index: int) -> int:
    """Ends the reference to a frame of a node. Returns the pages that are free then, can be reclaimed, or need no copy
    when their row grows."""
    t, n = view(tree, 1, TREE)[0], view(view(tree, 1, TREE)[0].nodes_at, node + 1, NODE)[node]
    slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
    frame, pool = slots[index] - 1, view(t.cache, 1, CACHE)[0].pool
    size = view(view(pool, 1, POOL)[0].frames_at, frame + 1, FRAME)[frame].pages
    pages = 0 if is_used(tree, slots[index], n.end) else size
    slots[index] = 0
    n.full -= 1
    t.held -= 1
    t.pages -= size
    reference(t.cache, frame, -1)
    return pages


@inner
def drop_frames(tree: int, node: int) -> int:
    """Ends the references to the frames of a node. Returns what `drop_slot` does, for all of them."""
    t, pages = view(tree, 1, TREE)[0], 0
    slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
    for index in range(t.width):
        if slots[index]:
            pages += drop_slot(tree, node, index)
    return pages


@inner
def key_of(tree: int, node: int) -> int:
    """The key of a node."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while nodes[node].parent:
        node = nodes[node].parent
    return int(nodes[node].first)


@inner
def drop_doubles(tree: int, row: int) -> int:
    """Drops frames that no live row uses, of tokens that a live row has committed, too, and holds the row's own frames
    instead, where these tokens fill them. Returns the pages that are free then, or can be reclaimed."""
    t = view(tree, 1, TREE)[0]
    c, nodes = view(t.cache, 1, CACHE)[0], view(t.nodes_at, t.nodes, NODE)
    h = view(t.holders_at, t.num_rows, HOLDER)[row]
    if h.node == 0 or h.parked or view(c.rows_at, c.num_rows + LISTS, ROW)[row].busy:
        return 0
    node = node_with(tree, h.node, h.held)
    node = nodes[node].parent if nodes[node].end > h.held else node
    tokens = nodes[node].end
    if tokens == 0 or tokens_of(tree, row) < tokens:
        return 0
    count, gained, is_bare = list_path(tree, node, 0, 1), 0, 0
    path = view(t.path_at, t.path, np.int64)
    for which in range(count):
        n, node = nodes[path[which]], path[which]
        others = n.known_below - is_bare  # nodes below that need what is in front of them
        slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
        for part in range(t.ranges if n.full else 0):
            g = view(t.parts_at, t.ranges, PART)[part]
            e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
            first, end = n.begin * g.record // t.page_size, n.end * g.record // t.page_size
            for page in range(first, end):
                index, group = g.single + page - first, page // t.large
                has_frame = page >= e.head_end or (group + 1) * t.large * t.page_size <= tokens * g.record
                if slots[index] and (has_frame or others == 0) and users_of(tree, slots[index]) == 0:
                    gained += drop_slot(tree, node, index)
                index = g.large + group - first // t.large
                if page % t.large == t.large - 1 and slots[index] and users_of(tree, slots[index]) == 0:
                    gained += drop_slot(tree, node, index)
        is_bare = 1 if n.known and n.full == 0 and others == 0 else 0
    if gained:
        node = path[0]
        hold_path(tree, row, list_path(tree, node, 0, 1), tokens, key_of(tree, node))
        for which in range(count):
            untell(tree, path[which])
    return gained


@inner
def leave(tree: int, node: int) -> None:
    """Forgets rows that end at a node without frames, and removes it if nothing needs it."""
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
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
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
    slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
    marks = view(t.marks_at + 8 * node * t.width, t.width, np.int64)
    if n.full == 0 or n.priority < lowest:
        return 0
    for index in range(t.width):
        if slots[index] and (n.host <= 0 or marks[index] == 0):
            return 1
    return 0


@inner
def list_page(tree: int, out: int, node: int, part: int, page: int, slot: int, offset: int, gain: int) -> None:
    """Lists a page of a frame in a slot, and references the frame."""
    t = view(tree, 1, TREE)[0]
    m, n = view(out, t.moved + 1, MOVED)[t.moved], view(t.nodes_at, t.nodes, NODE)[node]
    m.node, m.serial, m.part, m.page, m.frame, m.offset = node, n.host, part, page, slot - 1, offset
    m.priority, m.gain = n.priority, gain
    t.moved += 1
    reference(t.cache, slot - 1, 1)


@inner
def move(tree: int, node: int, out: int) -> int:
    """Lists the pages of a node, which go to the host, and drops its own references to them. Returns their number."""
    t = view(tree, 1, TREE)[0]
    n, before = view(t.nodes_at, t.nodes, NODE)[node], t.moved
    slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
    marks = view(t.marks_at + 8 * node * t.width, t.width, np.int64)
    t.serial += 1
    n.host, n.lead = -t.serial, 0
    for index in range(t.width):
        marks[index] = 1 if slots[index] else 0
    for part in range(t.ranges):
        p = view(t.parts_at, t.ranges, PART)[part]
        first, end = n.begin * p.record // t.page_size, n.end * p.record // t.page_size
        for group in range(first // t.large, end // t.large):
            slot = slots[p.large + group - first // t.large]
            for offset in range(t.large if slot else 0):
                list_page(tree, out, node, part, group * t.large + offset, slot, offset, 1)
        for page in range(first, end):
            slot, group = slots[p.single + page - first], page // t.large
            is_listed = group < end // t.large and slots[p.large + group - first // t.large] > 0
            if slot and not is_listed:
                list_page(tree, out, node, part, page, slot, 0, 1)
    drop_frames(tree, node)
    leave(tree, node)
    return t.moved - before


@inner
def list_lead(tree: int, node: int, out: int, most: int) -> None:
    """Lists also the pages in front of a node that went to the host on which tokens lie in part, if these are held."""
    t = view(tree, 1, TREE)[0]
    n, start, missing = view(t.nodes_at, t.nodes, NODE)[node], lead_start(tree, node), 0
    for part in range(t.ranges):
        missing += own_first(tree, node, part) - start * view(t.parts_at, t.ranges, PART)[part].record // t.page_size
    if missing == 0 or t.moved + missing > most:
        return
    gather(tree, n.parent)
    for turn in range(2):  # first see whether all are there
        for part in range(t.ranges):
            p = view(t.parts_at, t.ranges, PART)[part]
            first, end = start * p.record // t.page_size, own_first(tree, node, part)
            pages = view(p.pages_at, p.covered, np.int64)
            groups = view(p.groups_at, p.covered // t.large, np.int64)
            for page in range(first, end):
                slot, offset, group = 0, 0, page // t.large
                if page < p.covered:
                    slot = pages[page]
                    if slot == 0 and group < p.covered // t.large:
                        slot, offset = groups[group], page % t.large
                if slot == 0:
                    return
                if turn:
                    list_page(tree, out, node, part, page, slot, offset, 0)
    n.lead = 1


@entry
def evict(tree: int, pages: int, now: int, lowest: int, out: int, most: int) -> int:
    """Drops frames that no live sequence uses, until so many pages are free or can be reclaimed: the lowest priority
    first, then the least recently used, each behind all that follow it; last, those of tokens that a live row has on
    frames of its own. Returns the number of pages. `now` is a time in nanoseconds. It needs no lock.

    With room for a list of `most` pages, nodes of a priority of at least `lowest` go to the host: their pages are
    listed at `out`, and count as well. `moved` of the tree is their number; the caller copies them, and then calls
    `settle_moved`.
    """
    t, gained, passed = view(tree, 1, TREE)[0], 0, 0
    read_notes(tree)
    expire(tree, now)
    path = view(t.path_at, t.path, np.int64)
    while t.order and gained < pages and passed < t.path:
        node = int(view(t.order_at, t.nodes, np.int64)[0])
        if is_in_use(tree, node):
            take_off(tree, ORDER, node)
            path[passed] = node
            passed += 1
        elif most and must_move(tree, node, lowest):
            if t.moved + t.width * t.large > most:
                break
            gained += move(tree, node, out)
        else:
            gained += drop_frames(tree, node)
            leave(tree, node)
    for index in range(passed):
        arrange(tree, path[index])
    for row in range(t.num_rows if gained < pages else 0):  # a live row's nodes are in no order
        gained += drop_doubles(tree, row) if gained < pages else 0
    last, moved = 0, view(out, most, MOVED)
    for index in range(t.moved if most else 0):
        node = moved[index].node
        if node != last and view(t.nodes_at, t.nodes, NODE)[view(t.nodes_at, t.nodes, NODE)[node].parent].host >= 0:
            list_lead(tree, node, out, most)
        last = node
    return gained


@entry
def pin(tree: int, node: int, sign: int) -> int:
    """Keeps a node, and so all above it, from being evicted (`sign` is 1), or ends that (-1)."""
    t = view(tree, 1, TREE)[0]
    view(t.nodes_at, t.nodes, NODE)[node].pins += sign
    if sign < 0:
        tidy(tree, node)
    else:
        arrange(tree, node)
    return DONE


@entry
def clear(tree: int) -> int:
    """Drops all frames, and forgets all rows and tokens. The caller holds the planning lock. Returns the pages that are
    free then, or can be reclaimed."""
    t, pages = view(tree, 1, TREE)[0], 0
    nodes = view(t.nodes_at, t.nodes, NODE)
    t.silent = 1
    read_notes(tree)
    forget_rows(tree)
    while nodes[0].child:
        node = nodes[0].child
        while nodes[node].child:
            node = nodes[node].child
        nodes[node].pins = nodes[node].host = 0
        pages += drop_frames(tree, node)
        leave(tree, node)
    t.silent = 0
    emit_cleared(tree)
    return pages
