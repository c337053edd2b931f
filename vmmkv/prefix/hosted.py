"""Copies of nodes in host memory: which pages they cover, and how many first tokens of given ids lie there."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.codes import DONE
from ..core.sharing import reference
from .finding import gather, lowest, slot_at
from .nodes import page_of, tidy, walk
from .tables import MOVED, ON_HOST, TOKEN_BITS, marks_of, nodes_of, parts_of, shapes_of, tree_of


@inner
def own_first(tree: int, node: int, part: int) -> int:
    """The first page of a range that the copy of a node covers, without those in front of it."""
    for index in range(tree_of(tree).width):
        s = shapes_of(tree)[index]
        if s.part == part and s.size > 1 and s.offset == 0 and marks_of(tree, node)[index]:
            return page_of(tree, node, index)
    return nodes_of(tree)[node].begin * parts_of(tree)[part].record // tree_of(tree).page_size


@inner
def lead_start(tree: int, node: int) -> int:
    """The number of tokens that the pages in front of a node's copy hold as a whole."""
    tokens = 1 << TOKEN_BITS
    for part in range(tree_of(tree).ranges):
        tokens = min(tokens, own_first(tree, node, part) * tree_of(tree).page_size // parts_of(tree)[part].record)
    return tokens


@inner
def list_page(tree: int, out: int, node: int, part: int, page: int, slot: int, offset: int, old: int) -> None:
    """Lists a page of a frame in a slot for the host, and references the frame. A page in front of its node's own pages
    has an `old` of -1, and stays on the device."""
    t, n = tree_of(tree), nodes_of(tree)[node]
    m = view(out, t.moved + 1, MOVED)[t.moved]
    m.node, m.serial, m.part, m.page, m.frame, m.offset = node, -n.host, part, page, slot - 1, offset
    m.priority, m.gain, m.old = n.priority, 1 if old >= 0 else 0, max(old, 0)
    t.moved += 1
    reference(t.cache, slot - 1, 1)


@inner
def list_lead(tree: int, node: int, out: int, most: int) -> None:
    """Lists also the pages in front of a node that went to the host on which tokens lie in part, if these are held."""
    t, n, start, count = tree_of(tree), nodes_of(tree)[node], lead_start(tree, node), 0
    gather(tree, n.parent)
    for turn in range(2):  # first see whether all are there, and there is room
        for part in range(t.ranges):
            first = start * parts_of(tree)[part].record // t.page_size
            for page in range(first, own_first(tree, node, part)):
                slot, offset = slot_at(tree, part, page, 1), 0
                if slot == 0:
                    slot, offset = slot_at(tree, part, page // t.large * t.large, t.large), page % t.large
                if slot == 0:
                    return
                count += 1
                if turn:
                    list_page(tree, out, node, part, page, slot, offset, -1)
        if count == 0 or (turn == 0 and t.moved + count > most):
            return
    n.lead = 1


@inner
def put_serial(tree: int, part: int, first: int, end: int, serial: int) -> None:
    """Writes a serial down for pages of a range, of which those from `low` to `high` matter."""
    p = parts_of(tree)[part]
    pages = view(p.pages_at, p.high, np.int64)
    for page in range(max(first, p.low), min(end, p.high)):
        pages[page] = serial


@inner
def gather_serials(tree: int, node: int, start: int, end: int) -> None:
    """Writes down by page which copy has what lies on it, for tokens of a path from `start` to `end`."""
    t, nodes, parts = tree_of(tree), nodes_of(tree), parts_of(tree)
    for part in range(t.ranges):
        p = parts[part]
        p.low, p.high = start * p.record // t.page_size, (end * p.record + t.page_size - 1) // t.page_size
        put_serial(tree, part, p.low, p.high, 0)
    while nodes[node].parent:
        n = nodes[node]
        for part in range(t.ranges if n.host > 0 and n.lead else 0):
            first = lead_start(tree, node) * parts[part].record // t.page_size
            put_serial(tree, part, first, own_first(tree, node, part), n.host)
        for index in range(t.width if n.host > 0 else 0):
            page, s = page_of(tree, node, index), shapes_of(tree)[index]
            if marks_of(tree, node)[index]:
                put_serial(tree, s.part, page, page + s.size, n.host)
        node = n.parent


@entry
def look_up_host(tree: int, key: int, ids_at: int, count: int, tokens: int, out: int, most: int) -> int:
    """Returns how many of the first ids can be had if the first `tokens` are there, and those behind come from the
    host. Lists the pages that these lie on at `out`, if there is room for `most`."""
    t, packed, listed = tree_of(tree), walk(tree, key, ids_at, count), 0
    found = packed & (1 << TOKEN_BITS) - 1
    if found <= tokens:
        return tokens
    gather_serials(tree, lowest(tree, packed >> TOKEN_BITS, found), tokens, found)
    for part in range(t.ranges):
        p = parts_of(tree)[part]
        pages, page = view(p.pages_at, p.high, np.int64), p.low
        while page * t.page_size < found * p.record and pages[page]:
            page += 1
        found = min(found, page * t.page_size // p.record)
    for part in range(t.ranges if found > tokens else 0):
        p = parts_of(tree)[part]
        pages = view(p.pages_at, p.high, np.int64)
        for page in range(p.low, (found * p.record + t.page_size - 1) // t.page_size):
            if listed < most:
                each = view(out, most, ON_HOST)[listed]
                each.serial, each.part, each.page = pages[page], part, page
                listed += 1
    return max(found, tokens)


@entry
def settle_copy(tree: int, node: int, before: int, after: int) -> int:
    """Notes that the copy of a node, `before`, is `after` now: the serial, times -1 while the copy is being made, or 0
    if there is none. Nothing changes where the node is another one meanwhile."""
    if nodes_of(tree)[node].host == before:
        nodes_of(tree)[node].host = after
        tidy(tree, node)
    return DONE


@entry
def settle_moved(tree: int, out: int, stored_at: int) -> int:
    """Notes the copies that were made of the pages that an eviction has listed: `stored_at` says of each whether it was
    stored. Ends the list, and its references to frames."""
    t = tree_of(tree)
    moved, stored = view(out, t.moved, MOVED), view(stored_at, t.moved, np.int64)
    for index in range(t.moved):
        m = moved[index]
        settle_copy(tree, m.node, -m.serial, m.serial if stored[index] else 0)
        reference(t.cache, m.frame, -1)
    t.moved = 0
    return DONE
