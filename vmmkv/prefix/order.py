"""The order of eviction: a heap of nodes by priority and last use, and one of those whose priority ends some time."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .tables import DEFAULT_PRIORITY, NODE, TREE

ORDER, TIMERS = 0, 1


@inner
def heap_at(tree: int, which: int) -> int:
    """The address of a heap."""
    t = view(tree, 1, TREE)[0]
    return t.order_at if which == ORDER else t.timers_at


@inner
def place_of(tree: int, which: int, node: int) -> int:
    """The place of a node in a heap, + 1; 0 if it is not there."""
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
    return n.place if which == ORDER else n.timer


@inner
def put_at(tree: int, which: int, node: int, place: int) -> None:
    """Puts a node on a place of a heap."""
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
    view(heap_at(tree, which), t.nodes, np.int64)[place] = node
    if which == ORDER:
        n.place = place + 1
    else:
        n.timer = place + 1


@inner
def is_before(tree: int, which: int, one: int, other: int) -> int:
    """Whether a node comes before another."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    a, b = nodes[one], nodes[other]
    if which == TIMERS:
        return 1 if a.expires < b.expires else 0
    if a.priority != b.priority:
        return 1 if a.priority < b.priority else 0
    return 1 if a.used < b.used else 0


@inner
def sift(tree: int, which: int, place: int) -> None:
    """Moves the node on a place of a heap up or down, to where it belongs."""
    t = view(tree, 1, TREE)[0]
    heap, count = view(heap_at(tree, which), t.nodes, np.int64), t.order if which == ORDER else t.timers
    node = heap[place]
    while place and is_before(tree, which, node, heap[(place - 1) // 2]):
        put_at(tree, which, heap[(place - 1) // 2], place)
        place = (place - 1) // 2
    below = 2 * place + 1
    while below < count:
        if below + 1 < count and is_before(tree, which, heap[below + 1], heap[below]):
            below += 1
        if not is_before(tree, which, heap[below], node):
            break
        put_at(tree, which, heap[below], place)
        place, below = below, 2 * below + 1
    put_at(tree, which, node, place)


@inner
def offer(tree: int, which: int, node: int) -> None:
    """Puts a node into a heap, or to its new place there."""
    t = view(tree, 1, TREE)[0]
    place = place_of(tree, which, node) - 1
    if place < 0:
        place = t.order if which == ORDER else t.timers
        if which == ORDER:
            t.order += 1
        else:
            t.timers += 1
        put_at(tree, which, node, place)
    sift(tree, which, place)


@inner
def take_off(tree: int, which: int, node: int) -> None:
    """Takes a node out of a heap."""
    t = view(tree, 1, TREE)[0]
    place, nodes = place_of(tree, which, node) - 1, view(t.nodes_at, t.nodes, NODE)
    if place < 0:
        return
    if which == ORDER:
        t.order -= 1
        nodes[node].place, last = 0, t.order
    else:
        t.timers -= 1
        nodes[node].timer, last = 0, t.timers
    if place < last:
        put_at(tree, which, view(heap_at(tree, which), t.nodes, np.int64)[last], place)
        sift(tree, which, place)


@inner
def arrange(tree: int, node: int) -> None:
    """Puts a node into the order of eviction, or takes it out, as it is to be."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    n = nodes[node]
    is_needed = n.live > 0 or n.pins > 0 or n.known_below > 0 or (n.child > 0 and nodes[n.child].rows > 0)
    if n.parent and not is_needed and (n.full or n.holder):
        if n.expires and n.expires <= t.now:
            n.priority, n.expires = DEFAULT_PRIORITY, 0
        offer(tree, ORDER, node)
        if n.expires:
            offer(tree, TIMERS, node)
        else:
            take_off(tree, TIMERS, node)
    else:
        take_off(tree, ORDER, node)
        take_off(tree, TIMERS, node)


@inner
def arrange_up(tree: int, node: int) -> None:
    """Does so with a node, and with those above it for which it may have been needed."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while nodes[node].parent:
        arrange(tree, node)
        if nodes[node].full:
            return
        node = nodes[node].parent


@inner
def expire(tree: int, now: int) -> None:
    """Gives nodes the default priority whose time has passed."""
    t = view(tree, 1, TREE)[0]
    nodes, t.now, is_over = view(t.nodes_at, t.nodes, NODE), now, True
    while t.timers and is_over:
        node = int(view(t.timers_at, t.nodes, np.int64)[0])
        is_over = nodes[node].expires <= now
        if is_over:
            arrange(tree, node)
