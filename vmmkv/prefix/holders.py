"""Rows: which known tokens they hold, live or parked. A row is listed at the node where these tokens end."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.guests import notes
from ..core.rows import row_of
from ..core.starting import CUT, kept
from ..core.tables import CACHE, DONE, GONE, LISTS, NOTE, ROW, ROW_BITS, ROW_MASK
from .nodes import link_child, node_with, split, tidy, unlink_child
from .order import arrange
from .tables import HOLDER, NODE, NOTES, TREE


@inner
def list_row(tree: int, row: int, node: int) -> None:
    """Puts a row on the list of a node: parked rows in front."""
    t = view(tree, 1, TREE)[0]
    holders, n = view(t.holders_at, t.num_rows, HOLDER), view(t.nodes_at, t.nodes, NODE)[node]
    h, head = holders[row], n.holder
    h.node = node
    if head == 0 or h.parked:
        h.prev, h.next, n.holder = 0, head, row + 1
        if head:
            holders[head - 1].prev = row + 1
    else:
        first = holders[head - 1]
        h.prev, h.next = head, first.next
        if first.next:
            holders[first.next - 1].prev = row + 1
        first.next = row + 1
    n.live += h.parked == 0


@inner
def unlist_row(tree: int, row: int) -> None:
    """Takes a row off the list of its node."""
    t = view(tree, 1, TREE)[0]
    holders = view(t.holders_at, t.num_rows, HOLDER)
    h = holders[row]
    n = view(t.nodes_at, t.nodes, NODE)[h.node]
    if h.prev:
        holders[h.prev - 1].next = h.next
    else:
        n.holder = h.next
    if h.next:
        holders[h.next - 1].prev = h.prev
    n.live -= h.parked == 0
    h.node = 0


@inner
def count_rows(tree: int, node: int, above: int, sign: int) -> None:
    """Counts a row that ends at a node, or does so no more, on the path up to the node `above`, which is left out."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while node != above and node:
        n = nodes[node]
        before = n.rows
        n.rows += sign
        if (before > 0) != (n.rows > 0):
            if n.next != node:
                unlink_child(tree, node)
                link_child(tree, node, 1 if sign > 0 else 0)
            arrange(tree, n.parent)
        node = n.parent


@inner
def set_end(tree: int, row: int, node: int) -> None:
    """Has a row's known tokens end at a node; 0 forgets the row. The old node is on the same path, or is left."""
    t = view(tree, 1, TREE)[0]
    h, nodes = view(t.holders_at, t.num_rows, HOLDER)[row], view(t.nodes_at, t.nodes, NODE)
    old = h.node
    if old == node:
        return
    above = old if node and old and node_with(tree, node, nodes[old].end) == old else 0
    if node:
        count_rows(tree, node, above, 1)
        list_at = node
    else:
        list_at = 0
    if old:
        unlist_row(tree, row)
        if above == 0:
            count_rows(tree, old, 0, -1)
    if list_at:
        list_row(tree, row, list_at)
        h.held = min(h.held, nodes[list_at].end)
        arrange(tree, list_at)
    else:
        h.owner = h.held = h.parked = 0
    if old:
        tidy(tree, old)


@inner
def cut_row(tree: int, row: int, tokens: int) -> None:
    """Has a row hold no more than so many known tokens."""
    t = view(tree, 1, TREE)[0]
    h, nodes = view(t.holders_at, t.num_rows, HOLDER)[row], view(t.nodes_at, t.nodes, NODE)
    if h.node == 0 or nodes[h.node].end <= tokens:
        return
    if tokens <= 0:
        set_end(tree, row, 0)
        return
    node = node_with(tree, h.node, tokens)
    set_end(tree, row, split(tree, node, tokens))


@inner
def tokens_of(tree: int, row: int) -> int:
    """The number of tokens, from the first on, that a row's sequence still has, or has left there; 0 if none can be
    copied."""
    t = view(tree, 1, TREE)[0]
    h, c = view(t.holders_at, t.num_rows, HOLDER)[row], view(t.cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if h.parked:
        return max(kept(t.cache, row, h.owner), 0)
    return r.length if r.owner == h.owner and r.start == 0 and r.broken == 0 else 0


@inner
def park(tree: int, row: int, tokens: int) -> None:
    """Notes that the sequence of a row has ended."""
    t = view(tree, 1, TREE)[0]
    h = view(t.holders_at, t.num_rows, HOLDER)[row]
    cut_row(tree, row, tokens)
    node = h.node
    if node:
        unlist_row(tree, row)
        h.parked = 1
        list_row(tree, row, node)
        arrange(tree, node)


@inner
def forget_rows(tree: int) -> None:
    """Forgets all rows."""
    t = view(tree, 1, TREE)[0]
    for row in range(t.num_rows):
        if view(t.holders_at, t.num_rows, HOLDER)[row].node:
            set_end(tree, row, 0)


@inner
def read_notes(tree: int) -> None:
    """Follows what the core tells of rows."""
    t = view(tree, 1, TREE)[0]
    count = NOTES
    while count == NOTES:
        count = notes(t.cache, t.notes_at, NOTES)
        if count < 0:
            forget_rows(tree)
        for index in range(count):
            n = view(t.notes_at, NOTES, NOTE)[index]
            h = view(t.holders_at, t.num_rows, HOLDER)[n.row]
            if h.node == 0:
                continue
            if h.owner != n.owner:
                set_end(tree, n.row, 0)
            elif n.kind == CUT:
                cut_row(tree, n.row, n.tokens)
            else:
                park(tree, n.row, n.tokens)


@inner
def hold_row(tree: int, row: int, owner: int, node: int) -> None:
    """Notes that a live sequence's first tokens are those up to the end of a node."""
    t = view(tree, 1, TREE)[0]
    h = view(t.holders_at, t.num_rows, HOLDER)[row]
    if h.owner != owner and h.node:
        set_end(tree, row, 0)
    if h.node == 0:
        h.held = 0
    h.owner, h.parked = owner, 0
    set_end(tree, row, node)


@inner
def holder_below(tree: int, node: int) -> int:
    """A row that ends at a node, or below it. There is one."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while nodes[node].holder == 0:
        node = nodes[node].child
    return nodes[node].holder - 1


# ---------------------------------------------------------------------- entries


@entry
def adopted(tree: int, ticket: int, last: int, tokens: int) -> int:
    """Notes that a sequence has adopted the parked row of another, `last`, with so many of its tokens."""
    t, row, owner = view(tree, 1, TREE)[0], ticket & ROW_MASK, ticket >> ROW_BITS
    read_notes(tree)
    h = view(t.holders_at, t.num_rows, HOLDER)[row]
    if row_of(t.cache, ticket) < 0 or h.owner != last or h.node == 0:
        return GONE
    cut_row(tree, row, tokens)
    node, held = h.node, h.held
    if node:
        unlist_row(tree, row)
        h.owner, h.parked, h.held = owner, 0, held
        list_row(tree, row, node)
        arrange(tree, node)
    return DONE


@entry
def inherit(tree: int, ticket: int, source: int) -> int:
    """Notes that a sequence is a fork of another, and so begins with its known tokens."""
    t = view(tree, 1, TREE)[0]
    read_notes(tree)
    row, other = row_of(t.cache, ticket), row_of(t.cache, source)
    if row < 0 or other < 0:
        return GONE
    h, c = view(t.holders_at, t.num_rows, HOLDER)[other], view(t.cache, 1, CACHE)[0]
    if h.node and h.owner == source >> ROW_BITS:
        length = view(c.rows_at, c.num_rows + LISTS, ROW)[row].length
        node = node_with(tree, h.node, min(length, view(t.nodes_at, t.nodes, NODE)[h.node].end))
        if view(t.nodes_at, t.nodes, NODE)[node].end <= length:
            hold_row(tree, row, ticket >> ROW_BITS, node)
    return DONE


@entry
def known_ids(tree: int, ticket: int, out: int, most: int) -> int:
    """Writes the ids of a live sequence's known tokens, if these are not more than `most`. Returns their number, or
    `GONE`."""
    t = view(tree, 1, TREE)[0]
    read_notes(tree)
    row = row_of(t.cache, ticket)
    if row < 0:
        return GONE
    h, nodes = view(t.holders_at, t.num_rows, HOLDER)[row], view(t.nodes_at, t.nodes, NODE)
    if h.node == 0 or h.owner != ticket >> ROW_BITS:
        return 0
    node, count = h.node, nodes[h.node].end
    if count > most:
        return int(count)
    ids = view(out, most, np.int64)
    while nodes[node].parent:
        n, own = nodes[node], view(t.ids_at + 8 * node * t.grain, t.grain, np.int64)
        for token in range(n.begin, n.end):
            ids[token] = own[token - n.base]
        node = n.parent
    return int(count)
