"""Containers in flat memory: rings of linked records, and heaps with a key for each item. Two heaps are the order of
eviction, nodes by priority and last use, and the end of priorities."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .tables import DEFAULT_PRIORITY, HEAP, nodes_of, tree_of

CLOCK_BITS = 48


@inner
def ring_add(records: int, size: int, head: int, item: int, front: int) -> int:
    """Puts an item into the ring that begins with `head`: in front, or at the end. Returns the first item then. The
    first two words of a record, of `size` bytes, are the next and the previous item."""
    own = view(records + size * item, 2, np.int64)
    if head == 0:
        own[0] = own[1] = item
        return item
    first = view(records + size * head, 2, np.int64)
    last = view(records + size * first[1], 2, np.int64)
    own[0], own[1] = head, first[1]
    last[0] = first[1] = item
    return item if front else head


@inner
def ring_drop(records: int, size: int, head: int, item: int) -> int:
    """Takes an item out of a ring. Returns the first item then, or 0."""
    own = view(records + size * item, 2, np.int64)
    behind, before = own[0], own[1]
    view(records + size * before, 2, np.int64)[0] = behind
    view(records + size * behind, 2, np.int64)[1] = before
    if behind == item:
        return 0
    return behind if head == item else head


@inner
def put_at(heap: int, item: int, place: int) -> None:
    """Puts an item on a place of a heap."""
    h = view(heap, 1, HEAP)[0]
    view(h.items_at, h.room, np.int64)[place] = item
    view(h.places_at, h.room, np.int64)[item] = place + 1


@inner
def offer(heap: int, item: int, key: int) -> None:
    """Puts an item with a key into a heap, or moves it there to where its new key belongs."""
    h = view(heap, 1, HEAP)[0]
    items, keys = view(h.items_at, h.room, np.int64), view(h.keys_at, h.room, np.int64)
    place = view(h.places_at, h.room, np.int64)[item] - 1
    if place < 0:
        place = h.count
        h.count += 1
    keys[item] = key
    while place and key < keys[items[(place - 1) // 2]]:
        put_at(heap, items[(place - 1) // 2], place)
        place = (place - 1) // 2
    below = 2 * place + 1
    while below < h.count:
        if below + 1 < h.count and keys[items[below + 1]] < keys[items[below]]:
            below += 1
        if key <= keys[items[below]]:
            break
        put_at(heap, items[below], place)
        place, below = below, 2 * below + 1
    put_at(heap, item, place)


@inner
def take_off(heap: int, item: int) -> None:
    """Takes an item out of a heap, if it is there."""
    h = view(heap, 1, HEAP)[0]
    places = view(h.places_at, h.room, np.int64)
    place = places[item]
    if place == 0:
        return
    places[item] = 0
    h.count -= 1
    last = view(h.items_at, h.room, np.int64)[h.count]
    if last != item:
        places[last] = place
        offer(heap, last, view(h.keys_at, h.room, np.int64)[last])


@inner
def first_of(heap: int) -> int:
    """The first item of a heap; 0 if it is empty."""
    h = view(heap, 1, HEAP)[0]
    return view(h.items_at, h.room, np.int64)[0] if h.count else 0


@inner
def arrange(tree: int, node: int) -> None:
    """Puts a node into the order of eviction, or takes it out, depending on what needs the node."""
    t, nodes = tree_of(tree), nodes_of(tree)
    n = nodes[node]
    is_needed = n.live > 0 or n.pins > 0 or n.known_below > 0 or (n.child > 0 and nodes[n.child].rows > 0)
    if n.parent == 0 or is_needed or (n.full == 0 and n.holder == 0):
        take_off(t.order, node)
        take_off(t.timers, node)
        return
    if n.expires and n.expires <= t.now:
        n.priority, n.expires = DEFAULT_PRIORITY, 0
    offer(t.order, node, n.priority << CLOCK_BITS | n.used)
    if n.expires:
        offer(t.timers, node, n.expires)
    else:
        take_off(t.timers, node)


@inner
def arrange_up(tree: int, node: int) -> None:
    """Arranges a node, and the nodes above it up to the first that holds frames."""
    nodes = nodes_of(tree)
    while nodes[node].parent:
        arrange(tree, node)
        if nodes[node].full:
            return
        node = nodes[node].parent
