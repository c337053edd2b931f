"""The ring of events: which nodes can be found by the frames that are held for them.

An event names the node that ends at a boundary, and the one that ends at the boundary before it. Nodes between two
boundaries have no events of their own, so that cutting and joining nodes changes nothing of what was told.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from .tables import EVENT, EVENT_BYTES, REMOVED, STORED, nodes_of, parts_of, tree_of


@inner
def copy_words(target: int, source: int, count: int) -> None:
    """Copies words from one address to another."""
    there, here = view(target, count, np.int64), view(source, count, np.int64)
    for index in range(count):
        there[index] = here[index]


@inner
def emit(tree: int, kind: int, node: int, key: int) -> None:
    """Writes an event of a node, if the node ends at a boundary. If the ring is full, its oldest event is lost."""
    t, nodes = tree_of(tree), nodes_of(tree)
    n = nodes[node]
    if t.num_events == 0 or n.end != n.limit:
        return
    t.first_event = max(t.first_event, t.next_event - t.num_events + 1)
    place, above = t.events_at + 8 * (t.next_event % t.num_events) * t.event_words, n.parent
    while nodes[above].end > n.base:  # nodes that end between boundaries
        above = nodes[above].parent
    event = view(place, 1, EVENT)[0]
    event.number, event.kind, event.node, event.parent, event.key = t.next_event, kind, node, above, key
    event.begin, event.end, event.priority = n.base, n.end, n.priority
    copy_words(place + EVENT_BYTES, t.ids_at + 8 * node * t.grain, n.end - n.base)
    t.next_event += 1


@inner
def is_clean(tree: int, node: int) -> int:
    """Whether no token of a node lies partly in a page behind it."""
    for part in range(tree_of(tree).ranges):
        if nodes_of(tree)[node].end * parts_of(tree)[part].record % tree_of(tree).page_size:
            return 0
    return 1


@inner
def tell(tree: int, node: int, key: int) -> None:
    """Tells that the tokens of a known node are held, where that is so."""
    n = nodes_of(tree)[node]
    if n.told == 0 and (n.known_below or is_clean(tree, node)):
        n.told = 1
        emit(tree, STORED, node, key)


@inner
def untell(tree: int, node: int) -> None:
    """Tells that the tokens of a node, and of nodes above it, are no longer held, where that is so."""
    nodes = nodes_of(tree)
    while nodes[node].known:
        n = nodes[node]
        if n.told and n.known_below == 0 and (n.full == 0 or is_clean(tree, node) == 0):
            n.told = 0
            emit(tree, REMOVED, node, 0)
        if n.full or n.told:
            return
        n.known = 0
        nodes[n.parent].known_below -= 1
        node = n.parent


@entry
def drain(tree: int, out: int, most: int) -> int:
    """Takes up to so many events, the oldest first, each with its ids. Returns their number."""
    t = tree_of(tree)
    count = min(most, t.next_event - t.first_event)
    for index in range(count):
        place = (t.first_event + index) % t.num_events
        copy_words(out + 8 * index * t.event_words, t.events_at + 8 * place * t.event_words, t.event_words)
    t.first_event += count
    return count
