"""The order of eviction: nodes by priority and last use, and the end of priorities."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .containers import offer, take_off
from .tables import DEFAULT_PRIORITY, HEAP, nodes_of, tree_of

CLOCK_BITS = 48


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


@inner
def expire(tree: int, now: int) -> None:
    """Gives the default priority to nodes with a priority that has expired."""
    t = tree_of(tree)
    t.now, node = now, first_of(t.timers)
    while node and nodes_of(tree)[node].expires <= now:
        arrange(tree, node)
        node = first_of(t.timers)
