"""Nodes: their ids, and how they are found, cut in two, joined and removed."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .order import ORDER, TIMERS, arrange, take_off
from .tables import DEFAULT_PRIORITY, NODE, TOKEN_BITS, TREE
from .telling import untell

MIXED = (1 << 46) - 1


@inner
def bucket_of(tree: int, parent: int, first: int) -> int:
    """The bucket of children of a node that begin with an id."""
    mixed = (int(parent) * 0x1B873593CC9E2D51 + int(first) * 0x2545F4914F6CDD1D) & MIXED
    return (mixed ^ mixed >> 21) & view(tree, 1, TREE)[0].mask


@inner
def child_of(tree: int, parent: int, first: int) -> int:
    """The child of a node that begins with an id, or 0."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    node = nodes[parent].child
    if node and nodes[node].first == first:
        return node
    node = view(t.buckets_at, t.mask + 1, np.int64)[bucket_of(tree, parent, first)]
    while node and (nodes[node].parent != parent or nodes[node].first != first):
        node = nodes[node].chain
    return node


@inner
def add_to_bucket(tree: int, node: int) -> None:
    """Has a node be found by its parent and its first id."""
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
    buckets, bucket = view(t.buckets_at, t.mask + 1, np.int64), bucket_of(tree, n.parent, n.first)
    n.chain = buckets[bucket]
    buckets[bucket] = node


@inner
def leave_bucket(tree: int, node: int) -> None:
    """Takes `add_to_bucket` back."""
    t = view(tree, 1, TREE)[0]
    nodes, buckets = view(t.nodes_at, t.nodes, NODE), view(t.buckets_at, t.mask + 1, np.int64)
    bucket = bucket_of(tree, nodes[node].parent, nodes[node].first)
    if buckets[bucket] == node:
        buckets[bucket] = nodes[node].chain
        return
    before = buckets[bucket]
    while nodes[before].chain != node:
        before = nodes[before].chain
    nodes[before].chain = nodes[node].chain


@inner
def link_child(tree: int, node: int, front: int) -> None:
    """Puts a node among the children of its parent: in front, or at the end."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    n, parent = nodes[node], nodes[nodes[node].parent]
    head = parent.child
    if head == 0:
        n.next = n.prev = parent.child = node
        return
    n.prev, n.next = nodes[head].prev, head
    nodes[n.prev].next = nodes[head].prev = node
    if front:
        parent.child = node


@inner
def unlink_child(tree: int, node: int) -> None:
    """Takes a node out of the children of its parent."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    n, parent = nodes[node], nodes[nodes[node].parent]
    nodes[n.prev].next, nodes[n.next].prev = n.next, n.prev
    if parent.child == node:
        parent.child = 0 if n.next == node else n.next


@inner
def take_node(tree: int) -> int:
    """Takes an unused node, or returns 0."""
    t = view(tree, 1, TREE)[0]
    nodes, node = view(t.nodes_at, t.nodes, NODE), t.free
    if node:
        t.free = nodes[node].next
    elif t.fresh < t.nodes:
        node = t.fresh
        t.fresh += 1
    else:
        return 0
    n = nodes[node]
    n.child = n.children = n.rows = n.live = n.holder = n.pins = n.full = n.known = n.told = n.known_below = n.place = 0
    n.timer = n.expires = n.used = n.host = n.lead = 0
    n.priority = DEFAULT_PRIORITY
    t.used += 1
    slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
    for index in range(t.width):
        slots[index] = 0
    return node


@inner
def let_node(tree: int, node: int) -> None:
    """Gives a node back."""
    t = view(tree, 1, TREE)[0]
    view(t.nodes_at, t.nodes, NODE)[node].next = t.free
    t.free = node
    t.used -= 1


@inner
def copy_ids(tree: int, source: int, target: int, begin: int, end: int) -> None:
    """Copies ids of tokens from a node to another one between the same boundaries."""
    t = view(tree, 1, TREE)[0]
    base = view(t.nodes_at, t.nodes, NODE)[source].base
    ids, copies = (
        view(t.ids_at + 8 * source * t.grain, t.grain, np.int64),
        view(t.ids_at + 8 * target * t.grain, t.grain, np.int64),
    )
    for index in range(begin - base, end - base):
        copies[index] = ids[index]


# ---------------------------------------------------------------------- boundaries


@inner
def boundary_behind(tree: int, token: int) -> int:
    """The first boundary behind a token."""
    t = view(tree, 1, TREE)[0]
    kinds, found = view(t.kinds_at, t.kinds, np.int64), 1 << 60
    if t.step:
        found = (token // t.step + 1) * t.step
    for index in range(t.kinds):
        record = kinds[index]
        found = min(found, ((token * record // t.page_size + 1) * t.page_size + record - 1) // record)
    return found


# ---------------------------------------------------------------------- paths


@inner
def id_at(ids_at: int, wide: int, index: int) -> int:
    """A given id: of 64 bits, or of 32."""
    if wide:
        return int(view(ids_at, index + 1, np.int64)[index])
    return int(view(ids_at, index + 1, np.int32)[index])


@inner
def common(tree: int, node: int, ids_at: int, wide: int, count: int) -> int:
    """The number of ids of a node that are the given ones, from the node's begin on."""
    t = view(tree, 1, TREE)[0]
    n, index = view(t.nodes_at, t.nodes, NODE)[node], 0
    own = view(t.ids_at + 8 * (node * t.grain + n.begin - n.base), t.grain, np.int64)
    most = min(n.end, count) - n.begin
    if wide:
        ids = view(ids_at + 8 * n.begin, most, np.int64)
        while index < most and own[index] == ids[index]:
            index += 1
    else:
        narrow = view(ids_at + 4 * n.begin, most, np.int32)
        while index < most and own[index] == narrow[index]:
            index += 1
    return index


@inner
def walk(tree: int, key: int, ids_at: int, wide: int, count: int) -> int:
    """Follows ids from the root of a key. Returns the last node, of which a part may be equal, and in the lower 32 bits
    the number of equal ids."""
    t = view(tree, 1, TREE)[0]
    nodes, tokens, node = view(t.nodes_at, t.nodes, NODE), 0, child_of(tree, 0, key)
    while node and tokens < count:
        child = child_of(tree, node, id_at(ids_at, wide, tokens))
        if child == 0:
            break
        node = child
        tokens += common(tree, node, ids_at, wide, count)
        if tokens < nodes[node].end:
            break
    return node << TOKEN_BITS | tokens


@inner
def node_with(tree: int, node: int, tokens: int) -> int:
    """The node on the path to this one that has the last of the path's first tokens."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while nodes[node].begin >= tokens and nodes[node].parent:
        node = nodes[node].parent
    return node


@inner
def use_path(tree: int, node: int) -> None:
    """Notes that a path was used now."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    t.clock += 1
    while node:
        nodes[node].used = t.clock
        if nodes[node].place:
            arrange(tree, node)
        node = nodes[node].parent


# ---------------------------------------------------------------------- surgery


@inner
def add_node(tree: int, parent: int, ids_at: int, wide: int, begin: int, count: int) -> int:
    """Adds a child for tokens up to a boundary, or to `count`. Returns it, or 0: there is no room."""
    t = view(tree, 1, TREE)[0]
    nodes, node = view(t.nodes_at, t.nodes, NODE), take_node(tree)
    if node == 0:
        return 0
    n, above = nodes[node], nodes[parent]
    n.parent, n.begin, n.base, n.limit = parent, begin, begin, above.limit
    if begin == above.limit:
        n.limit = boundary_behind(tree, begin)
    else:
        n.base = above.base
    n.end = min(n.limit, count)
    ids = view(t.ids_at + 8 * (node * t.grain + begin - n.base), n.end - begin, np.int64)
    for index in range(n.end - begin):
        ids[index] = id_at(ids_at, wide, begin + index)
    n.first = int(ids[0])
    attach(tree, node)
    return node


@inner
def add_root(tree: int, key: int) -> int:
    """The root of a key, a new one if there is none; 0 if there is no room."""
    t = view(tree, 1, TREE)[0]
    node = child_of(tree, 0, key)
    if node == 0:
        node = take_node(tree)
        if node:
            n = view(t.nodes_at, t.nodes, NODE)[node]
            n.parent = n.begin = n.end = n.base = n.limit = 0
            n.first = key
            attach(tree, node)
    return node


@inner
def attach(tree: int, node: int) -> None:
    """Makes a new node a child of its parent."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    parent = nodes[node].parent
    add_to_bucket(tree, node)
    link_child(tree, node, 0)
    nodes[parent].children += 1
    if nodes[parent].place:
        arrange(tree, parent)


@inner
def split(tree: int, node: int, at: int) -> int:
    """Has a node on the path of another end with so many tokens: returns that node, or 0 if there is no room. The lower
    part keeps the number and all slots."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
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
    copy_ids(tree, node, upper, n.begin, at)
    leave_bucket(tree, node)
    link_child(tree, upper, 1 if u.rows > 0 else 0)
    unlink_child(tree, node)
    add_to_bucket(tree, upper)
    n.parent, n.begin = upper, at
    n.first = view(t.ids_at + 8 * node * t.grain, t.grain, np.int64)[at - n.base]
    add_to_bucket(tree, node)
    link_child(tree, node, 0)
    return upper


@inner
def join(tree: int, node: int) -> None:
    """Joins a node with its only child, which keeps its number."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    n, child = nodes[node], nodes[node].child
    c = nodes[child]
    copy_ids(tree, node, child, n.begin, n.end)
    leave_bucket(tree, child)
    leave_bucket(tree, node)
    c.parent, c.begin, c.first = n.parent, n.begin, n.first
    add_to_bucket(tree, child)
    link_child(tree, child, 1 if c.rows > 0 else 0)
    unlink_child(tree, node)
    let_node(tree, node)


@inner
def tidy(tree: int, node: int) -> None:
    """Removes a node that nothing needs, and those above it that nothing needs then; or joins it with its child."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while node:
        n = nodes[node]
        is_needed = n.full > 0 or n.host != 0 or n.holder > 0 or n.pins > 0 or n.children > 1
        if is_needed or (n.children and (n.end == n.limit or n.parent == 0)):
            arrange(tree, node)
            return
        take_off(tree, ORDER, node)
        take_off(tree, TIMERS, node)
        if n.children:
            join(tree, node)
            return
        parent = n.parent
        untell(tree, node)
        leave_bucket(tree, node)
        unlink_child(tree, node)
        nodes[parent].children -= 1
        let_node(tree, node)
        node = parent
