"""Copies of nodes in host memory: which pages they cover, and how many first tokens of given ids lie there."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.guests import reference
from ..core.tables import DONE, GONE
from .finding import lowest
from .nodes import tidy, walk
from .tables import MOVED, NODE, ON_HOST, PART, TOKEN_BITS, TREE


@inner
def own_first(tree: int, node: int, part: int) -> int:
    """The first page of a range that the copy of a node covers, without those in front of it."""
    t = view(tree, 1, TREE)[0]
    p, n = view(t.parts_at, t.ranges, PART)[part], view(t.nodes_at, t.nodes, NODE)[node]
    marks = view(t.marks_at + 8 * node * t.width, t.width, np.int64)
    first, end = n.begin * p.record // t.page_size, n.end * p.record // t.page_size
    is_large = first // t.large < end // t.large and marks[p.large] > 0
    return first // t.large * t.large if is_large else first


@inner
def lead_start(tree: int, node: int) -> int:
    """The number of tokens that the pages in front of a node's copy hold as a whole."""
    t, tokens = view(tree, 1, TREE)[0], 1 << TOKEN_BITS
    for part in range(t.ranges):
        record = view(t.parts_at, t.ranges, PART)[part].record
        tokens = min(tokens, own_first(tree, node, part) * t.page_size // record)
    return tokens


@inner
def put_handle(pages_at: int, first: int, end: int, low: int, high: int, handle: int) -> None:
    """Writes a handle down for pages from `first` to `end`, of which those from `low` to `high` matter."""
    pages = view(pages_at, high, np.int64)
    for page in range(max(first, low), min(end, high)):
        pages[page] = handle


@inner
def gather_handles(tree: int, node: int, start: int, end: int) -> None:
    """Writes down by page which handle has what lies on it, for tokens of a path from `start` to `end`."""
    t = view(tree, 1, TREE)[0]
    nodes, parts = view(t.nodes_at, t.nodes, NODE), view(t.parts_at, t.ranges, PART)
    for part in range(t.ranges):
        p = parts[part]
        p.low = start * p.record // t.page_size
        p.high = (end * p.record + t.page_size - 1) // t.page_size
        put_handle(p.pages_at, p.low, p.high, p.low, p.high, 0)
    while nodes[node].parent:
        n = nodes[node]
        marks = view(t.marks_at + 8 * node * t.width, t.width, np.int64)
        lead = lead_start(tree, node) if n.lead else 0
        for part in range(t.ranges if n.host > 0 else 0):
            p = parts[part]
            first, last = n.begin * p.record // t.page_size, n.end * p.record // t.page_size
            if n.lead:
                lead_first = lead * p.record // t.page_size
                put_handle(p.pages_at, lead_first, own_first(tree, node, part), p.low, p.high, n.host)
            for page in range(first, last):
                if marks[p.single + page - first]:
                    put_handle(p.pages_at, page, page + 1, p.low, p.high, n.host)
                group = page // t.large
                if page % t.large == t.large - 1 and marks[p.large + group - first // t.large]:
                    put_handle(p.pages_at, group * t.large, page + 1, p.low, p.high, n.host)
        node = n.parent


@entry
def look_up_host(tree: int, key: int, ids_at: int, count: int, wide: int, tokens: int, out: int, most: int) -> int:
    """Returns how many of the first ids can be had if the first `tokens` are there, and those behind come from the
    host. Lists the pages that these lie on at `out`, if there is room for `most`."""
    t, packed = view(tree, 1, TREE)[0], walk(tree, key, ids_at, wide, count)
    node, found, listed = packed >> TOKEN_BITS, packed & (1 << TOKEN_BITS) - 1, 0
    if found <= tokens:
        return tokens
    gather_handles(tree, lowest(tree, node, found), tokens, found)
    for part in range(t.ranges):
        p = view(t.parts_at, t.ranges, PART)[part]
        pages, page = view(p.pages_at, p.high, np.int64), p.low
        while page * t.page_size < found * p.record and pages[page]:
            page += 1
        found = min(found, page * t.page_size // p.record)
    for part in range(t.ranges if found > tokens else 0):
        p = view(t.parts_at, t.ranges, PART)[part]
        pages = view(p.pages_at, p.high, np.int64)
        for page in range(p.low, (found * p.record + t.page_size - 1) // t.page_size):
            if listed < most:
                each = view(out, most, ON_HOST)[listed]
                each.handle, each.part, each.page = pages[page], part, page
                listed += 1
    return max(found, tokens)


@entry
def settle(tree: int, node: int, serial: int, handle: int) -> int:
    """Notes the handle of a copy that was made of a node; 0 if there is none. `GONE`: the node is another one now."""
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
    if n.host != serial:
        return GONE
    n.host = handle
    if handle == 0:
        tidy(tree, node)
    return DONE


@entry
def settle_moved(tree: int, out: int, handles_at: int) -> int:
    """Notes the copies that were made of all pages that an eviction has listed, a handle for each page, 0 if there is
    none. Ends the list, and its references to frames."""
    t = view(tree, 1, TREE)[0]
    moved, handles = view(out, t.moved, MOVED), view(handles_at, t.moved, np.int64)
    for index in range(t.moved):
        settle(tree, moved[index].node, moved[index].serial, handles[index])
        reference(t.cache, moved[index].frame, -1)
    t.moved = 0
    return DONE
