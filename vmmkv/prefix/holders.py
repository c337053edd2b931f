"""Rows: which known tokens they hold, live or parked. A row is listed at the node where these tokens end."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.access import cache_of, row_at
from ..core.codes import DONE, GONE
from ..core.pages import row_of
from ..core.starting import CUT, FREED, kept
from ..core.tables import NOTE, ROW_BITS
from .containers import arrange, ring_add, ring_drop
from .nodes import link, node_with, split, tidy, unlink
from .tables import HOLDER_BYTES, holders_of, ids_of, nodes_of, tree_of


@inner
def list_row(tree: int, row: int, node: int) -> None:
    """Puts a row on the list of a node: parked rows in front."""
    h, n, records = holders_of(tree)[row], nodes_of(tree)[node], tree_of(tree).holders_at - HOLDER_BYTES
    h.node = node
    n.holder = ring_add(records, HOLDER_BYTES, n.holder, row + 1, h.parked)
    n.live += h.parked == 0


@inner
def unlist_row(tree: int, row: int) -> None:
    """Takes a row off the list of its node."""
    h, records = holders_of(tree)[row], tree_of(tree).holders_at - HOLDER_BYTES
    n = nodes_of(tree)[h.node]
    n.holder = ring_drop(records, HOLDER_BYTES, n.holder, row + 1)
    n.live -= h.parked == 0
    h.node = 0


@inner
def count_rows(tree: int, node: int, sign: int) -> None:
    """Counts a row that ends at a node, or does so no more, on the path to the node."""
    nodes = nodes_of(tree)
    while node:
        n = nodes[node]
        if n.rows + sign and n.rows:
            n.rows += sign
        else:  # children with rows come first
            unlink(tree, node)
            n.rows += sign
            link(tree, node)
            arrange(tree, n.parent)
        node = n.parent


@inner
def set_end(tree: int, row: int, node: int) -> None:
    """Has a row's known tokens end at a node; 0 forgets the row."""
    h = holders_of(tree)[row]
    old = h.node
    if old == node:
        return
    if node:
        count_rows(tree, node, 1)  # first, so that what both paths have keeps its rows
    if old:
        unlist_row(tree, row)
        count_rows(tree, old, -1)
    if node:
        list_row(tree, row, node)
        h.held = min(h.held, nodes_of(tree)[node].end)
        arrange(tree, node)
    else:
        h.owner = h.held = h.parked = 0
    if old:
        tidy(tree, old)


@inner
def cut_row(tree: int, row: int, tokens: int) -> None:
    """Has a row hold no more than so many known tokens."""
    h = holders_of(tree)[row]
    if h.node and nodes_of(tree)[h.node].end > tokens:
        set_end(tree, row, split(tree, node_with(tree, h.node, tokens), tokens) if tokens > 0 else 0)


@inner
def tokens_of(tree: int, row: int) -> int:
    """The number of tokens, from the first on, that a row's sequence still has, or has left there; 0 if none can be
    copied."""
    h, r = holders_of(tree)[row], row_at(tree_of(tree).cache, row)
    if h.parked:
        return max(kept(tree_of(tree).cache, row, h.owner), 0)
    return r.length if r.owner == h.owner and r.start == 0 and r.broken == 0 else 0


@inner
def pass_on(tree: int, row: int, owner: int, parked: int) -> None:
    """Notes that a row belongs to another sequence now, or that its sequence has ended."""
    h = holders_of(tree)[row]
    node = h.node
    if node:
        unlist_row(tree, row)
        h.owner, h.parked = owner, parked
        list_row(tree, row, node)
        arrange(tree, node)


@inner
def read_notes(tree: int) -> None:
    """Follows the notes of the core about rows. Forgets all rows where notes were lost."""
    t, c = tree_of(tree), cache_of(tree_of(tree).cache)
    if c.ring_head - c.ring_tail > c.ring_size:
        c.ring_tail = c.ring_head
        for row in range(t.num_rows):
            set_end(tree, row, 0)
    while c.ring_tail < c.ring_head:
        n = view(c.ring_at, c.ring_size, NOTE)[c.ring_tail % c.ring_size]
        h = holders_of(tree)[n.row]
        c.ring_tail += 1
        if h.node and h.owner != n.owner:
            set_end(tree, n.row, 0)
        cut_row(tree, n.row, n.tokens)
        if n.kind != CUT:
            pass_on(tree, n.row, n.heir, 1 if n.kind == FREED else 0)


@inner
def hold_row(tree: int, row: int, owner: int, node: int) -> None:
    """Notes that a live sequence's first tokens are those up to the end of a node."""
    h = holders_of(tree)[row]
    if h.owner != owner:
        set_end(tree, row, 0)
    h.owner, h.parked = owner, 0
    set_end(tree, row, node)


@entry
def inherit(tree: int, ticket: int, source: int) -> int:
    """Notes that a sequence is a fork of another, and so begins with its known tokens."""
    cache = tree_of(tree).cache
    read_notes(tree)
    row, other = row_of(cache, ticket), row_of(cache, source)
    if row < 0 or other < 0:
        return GONE
    h, length = holders_of(tree)[other], row_at(tree_of(tree).cache, row).length
    if h.node and h.owner == source >> ROW_BITS:
        node = node_with(tree, h.node, min(length, nodes_of(tree)[h.node].end))
        if nodes_of(tree)[node].end <= length:
            hold_row(tree, row, ticket >> ROW_BITS, node)
    return DONE


@entry
def known_ids(tree: int, ticket: int, out: int, most: int) -> int:
    """Writes the ids of a live sequence's known tokens, if these are not more than `most`. Returns their number, or
    `GONE`."""
    read_notes(tree)
    row, nodes = row_of(tree_of(tree).cache, ticket), nodes_of(tree)
    if row < 0:
        return GONE
    h = holders_of(tree)[row]
    if h.node == 0 or h.owner != ticket >> ROW_BITS:
        return 0
    node, count, ids = h.node, nodes[h.node].end, view(out, most, np.int64)
    while nodes[node].parent and count <= most:
        n, own = nodes[node], ids_of(tree, node)
        for token in range(n.begin, n.end):
            ids[token] = own[token - n.base]
        node = n.parent
    return count
