"""The ring of events: which nodes can be found by the frames that are held for them.

An event names the node that ends at a boundary, and the one that ends at the boundary before it. Nodes between two
boundaries have no events of their own, so that cutting and joining nodes changes nothing of what was told.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from .tables import CLEARED, EVENT, NODE, REMOVED, STORED, TREE


@inner
def next_place(tree: int) -> int:
    """The place of a new event in the ring. If that is full, the oldest event is lost."""
    t = view(tree, 1, TREE)[0]
    if t.next_event - t.first_event == t.num_events:
        t.first_event += 1
    t.next_event += 1
    return int((t.next_event - 1) % t.num_events)


@inner
def emit(tree: int, kind: int, node: int, key: int) -> None:
    """Writes an event of a node, if it ends at a boundary."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    n = nodes[node]
    if t.num_events == 0 or t.silent or n.end != n.limit:
        return
    place = next_place(tree)
    event, ids = (
        view(t.events_at, t.num_events, EVENT)[place],
        view(t.event_ids_at + 8 * place * t.grain, t.grain, np.int64),
    )
    event.kind, event.node, event.begin, event.end, event.priority = kind, node, n.base, n.end, n.priority
    own, each = view(t.ids_at + 8 * node * t.grain, t.grain, np.int64), node
    for token in range(n.begin, n.end):
        ids[token - n.base] = own[token - n.base]
    while nodes[each].begin > n.base:  # nodes that end between boundaries
        each = nodes[each].parent
        above = view(t.ids_at + 8 * each * t.grain, t.grain, np.int64)
        for token in range(nodes[each].begin, nodes[each].end):
            ids[token - n.base] = above[token - n.base]
    event.parent, event.key = nodes[each].parent, key


@inner
def emit_cleared(tree: int) -> None:
    """Writes the event that all nodes are gone."""
    t = view(tree, 1, TREE)[0]
    if t.num_events:
        event = view(t.events_at, t.num_events, EVENT)[next_place(tree)]
        event.kind = CLEARED
        event.node = event.parent = event.key = event.begin = event.end = event.priority = 0


@inner
def is_clean(tree: int, node: int) -> int:
    """Whether no token of a node lies partly in a page behind it."""
    t = view(tree, 1, TREE)[0]
    kinds, end = view(t.kinds_at, t.kinds, np.int64), view(t.nodes_at, t.nodes, NODE)[node].end
    for index in range(t.kinds):
        if end * kinds[index] % t.page_size:
            return 0
    return 1


@inner
def know(tree: int, node: int) -> None:
    """Notes that a node holds frames, or a node below it does."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    if nodes[node].known == 0:
        nodes[node].known = 1
        nodes[nodes[node].parent].known_below += 1


@inner
def tell(tree: int, node: int, key: int) -> None:
    """Tells that the tokens of a known node are held, where that is so."""
    t = view(tree, 1, TREE)[0]
    n = view(t.nodes_at, t.nodes, NODE)[node]
    if n.told == 0 and (n.known_below or is_clean(tree, node)):
        n.told = 1
        emit(tree, STORED, node, key)


@inner
def untell(tree: int, node: int) -> None:
    """Tells that the tokens of a node, and of nodes above it, are no longer held, where that is so."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
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
def drain(tree: int, out: int, ids_out: int, most: int) -> int:
    """Takes up to so many events, the oldest first, and their ids. Returns their number."""
    t = view(tree, 1, TREE)[0]
    count = min(most, t.next_event - t.first_event)
    events, found = view(t.events_at, t.num_events, EVENT), view(out, most, EVENT)
    for index in range(count):
        place = (t.first_event + index) % t.num_events
        s, d = events[place], found[index]
        d.kind, d.node, d.parent, d.key, d.priority = s.kind, s.node, s.parent, s.key, s.priority
        d.begin, d.end = s.begin, s.end
        ids = view(t.event_ids_at + 8 * place * t.grain, t.grain, np.int64)
        copies = view(ids_out + 8 * index * t.grain, t.grain, np.int64)
        for token in range(s.end - s.begin):
            copies[token] = ids[token]
    t.first_event += count
    t.drained = t.first_event
    return count
