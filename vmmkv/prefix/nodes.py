"""Nodes: their ids and pages, and how they are found, cut in two, joined and removed."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .containers import arrange, arrange_up, ring_add, ring_drop, take_off
from .tables import DEFAULT_PRIORITY, NODE_BYTES, NODE_WORDS, TOKEN_BITS, ids_of, nodes_of, parts_of, shapes_of, tree_of
from .telling import copy_words, untell

MIXED = (1 << 46) - 1


# ---------------------------------------------------------------------- finding a child


@inner
def bucket_of(tree: int, parent: int, first: int) -> int:
    """The bucket of children of a node that begin with an id."""
    mixed = (int(parent) * 0x1B873593CC9E2D51 + int(first) * 0x2545F4914F6CDD1D) & MIXED
    return (mixed ^ mixed >> 21) & tree_of(tree).mask


@inner
def child_of(tree: int, parent: int, first: int) -> int:
    """The child of a node that begins with an id, or 0."""
    t, nodes = tree_of(tree), nodes_of(tree)
    node = nodes[parent].child
    if node and nodes[node].first == first:
        return node
    node = view(t.buckets_at, t.mask + 1, np.int64)[bucket_of(tree, parent, first)]
    while node and (nodes[node].parent != parent or nodes[node].first != first):
        node = nodes[node].chain
    return node


@inner
def link(tree: int, node: int) -> None:
    """Makes a node a child of its parent: in front of children without rows, if it has any."""
    t, nodes = tree_of(tree), nodes_of(tree)
    n = nodes[node]
    buckets, bucket = view(t.buckets_at, t.mask + 1, np.int64), bucket_of(tree, n.parent, n.first)
    n.chain, buckets[bucket] = buckets[bucket], node
    nodes[n.parent].child = ring_add(t.nodes_at, NODE_BYTES, nodes[n.parent].child, node, 1 if n.rows else 0)


@inner
def unlink(tree: int, node: int) -> None:
    """Takes `link` back. Parent and first id of the node are those that it was linked with."""
    t, nodes = tree_of(tree), nodes_of(tree)
    n = nodes[node]
    buckets, bucket = view(t.buckets_at, t.mask + 1, np.int64), bucket_of(tree, n.parent, n.first)
    before = buckets[bucket]
    if before == node:
        buckets[bucket] = n.chain
    else:
        while nodes[before].chain != node:
            before = nodes[before].chain
        nodes[before].chain = n.chain
    nodes[n.parent].child = ring_drop(t.nodes_at, NODE_BYTES, nodes[n.parent].child, node)


@inner
def take_node(tree: int) -> int:
    """Takes an unused node, or returns 0."""
    t, node = tree_of(tree), tree_of(tree).free
    if node:
        t.free = nodes_of(tree)[node].next
    elif t.fresh < t.nodes:
        node = t.fresh
        t.fresh += 1
    else:
        return 0
    words = view(t.nodes_at + node * NODE_BYTES, NODE_WORDS, np.int64)
    for index in range(NODE_WORDS):
        words[index] = 0
    nodes_of(tree)[node].priority = DEFAULT_PRIORITY
    t.used += 1
    return node


@inner
def let_node(tree: int, node: int) -> None:
    """Gives a node back."""
    t = tree_of(tree)
    nodes_of(tree)[node].next, t.free = t.free, node
    t.used -= 1


@inner
def page_of(tree: int, node: int, index: int) -> int:
    """The first page of the frame that a slot of a node is for; -1 if no frame of that size ends at the node."""
    n, s, size = nodes_of(tree)[node], shapes_of(tree)[index], tree_of(tree).page_size
    record = parts_of(tree)[s.part].record
    page = (n.begin * record // size // s.size + s.offset) * s.size
    return page if page + s.size <= n.end * record // size else -1


# ---------------------------------------------------------------------- paths


@inner
def walk(tree: int, key: int, ids_at: int, count: int) -> int:
    """Follows ids from the root of a key. Returns the last node, of which a part may be equal, and in the lower 32 bits
    the number of equal ids."""
    t, nodes, tokens, node = tree_of(tree), nodes_of(tree), 0, child_of(tree, 0, key)
    while node and tokens < count:
        child = child_of(tree, node, view(ids_at, count, np.int64)[tokens])
        if child == 0:
            break
        node, n, equal, differing = child, nodes[child], 0, 0
        left = min(n.end, count) - tokens
        ids = view(ids_at + 8 * tokens, left, np.int64)
        own = view(t.ids_at + 8 * (node * t.grain + tokens - n.base), left, np.int64)
        for index in range(left):  # all of them: the processor compares several at a time
            differing |= ids[index] ^ own[index]
        while differing and ids[equal] == own[equal]:
            equal += 1
        tokens += equal if differing else left
        if tokens < n.end:
            break
    return node << TOKEN_BITS | tokens


@inner
def node_with(tree: int, node: int, tokens: int) -> int:
    """The node on the path to this one that has the last of the path's first tokens."""
    nodes = nodes_of(tree)
    while nodes[node].begin >= tokens and nodes[node].parent:
        node = nodes[node].parent
    return node


@inner
def use_path(tree: int, node: int) -> None:
    """Notes that a path was used now. Only at its end may there be nodes in the order of eviction."""
    t, nodes, above = tree_of(tree), nodes_of(tree), node
    t.clock += 1
    while above:
        nodes[above].used, above = t.clock, nodes[above].parent
    arrange_up(tree, node)


# ---------------------------------------------------------------------- surgery


@inner
def add_node(tree: int, parent: int, ids_at: int, begin: int, count: int) -> int:
    """Adds a child for tokens up to a boundary, or to `count`. Returns it, or 0: there is no room."""
    t, nodes, node = tree_of(tree), nodes_of(tree), take_node(tree)
    if node == 0:
        return 0
    n, above = nodes[node], nodes[parent]
    n.parent, n.begin, n.base, n.limit = parent, begin, above.base, above.limit
    if begin == above.limit:
        n.base, n.limit = begin, (begin // t.step + 1) * t.step if t.step else 1 << 60
        for part in range(t.ranges):  # where the next page becomes full
            record = parts_of(tree)[part].record
            full = (begin * record // t.page_size + 1) * t.page_size
            n.limit = min(n.limit, (full + record - 1) // record)
    n.end = min(n.limit, count)
    copy_words(t.ids_at + 8 * node * t.grain, ids_at + 8 * n.base, n.end - n.base)
    n.first = ids_of(tree, node)[begin - n.base]
    attach(tree, node)
    return node


@inner
def attach(tree: int, node: int) -> None:
    """Makes a new node a child of its parent."""
    nodes = nodes_of(tree)
    parent = nodes[node].parent
    link(tree, node)
    nodes[parent].children += 1
    arrange(tree, parent)


@inner
def split(tree: int, node: int, at: int) -> int:
    """Has a node on the path of another end with so many tokens: returns that node, or 0 if there is no room. The lower
    part keeps the number and all slots."""
    t, nodes = tree_of(tree), nodes_of(tree)
    n = nodes[node]
    if at == n.end:
        return node
    upper = take_node(tree)
    if upper == 0:
        return 0
    u = nodes[upper]
    u.parent, u.first, u.begin, u.end, u.base, u.limit = n.parent, n.first, n.begin, at, n.base, n.limit
    u.rows, u.known, u.told, u.known_below, u.used = n.rows, n.known, n.known, n.known, n.used
    u.priority, u.expires, u.children = n.priority, n.expires, 1
    copy_words(t.ids_at + 8 * upper * t.grain, t.ids_at + 8 * node * t.grain, at - n.base)
    unlink(tree, node)
    link(tree, upper)
    n.parent, n.begin, n.first = upper, at, ids_of(tree, node)[at - n.base]
    link(tree, node)
    return upper


@inner
def join(tree: int, node: int) -> None:
    """Joins a node with its only child, which keeps its number."""
    nodes = nodes_of(tree)
    n, child = nodes[node], nodes[node].child
    unlink(tree, child)
    unlink(tree, node)
    c = nodes[child]
    c.parent, c.begin, c.first = n.parent, n.begin, n.first
    link(tree, child)
    let_node(tree, node)


@inner
def tidy(tree: int, node: int) -> None:
    """Removes a node that nothing needs, and those above it that nothing needs then; or joins it with its child."""
    t, nodes = tree_of(tree), nodes_of(tree)
    while node:
        n = nodes[node]
        is_needed = n.full > 0 or n.host != 0 or n.holder > 0 or n.pins > 0 or n.children > 1
        if is_needed or (n.children and (n.end == n.limit or n.parent == 0)):
            arrange(tree, node)
            return
        take_off(t.order, node)
        take_off(t.timers, node)
        if n.children:
            join(tree, node)
            return
        parent = n.parent
        untell(tree, node)
        unlink(tree, node)
        nodes[parent].children -= 1
        let_node(tree, node)
        node = parent
