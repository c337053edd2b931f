"""The ring of events: which nodes can be found by the frames that are held for them.

An event names the node that ends at a boundary, and the one that ends at the boundary before it. Nodes between two
boundaries have no events of their own, so that cutting and joining nodes changes nothing of what was told.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from .tables import EVENT, NODE, REMOVED, STORED, TREE


@inner
def emit(tree: int, kind: int, node: int, key: int) -> None:
    """Writes an event. If the ring is full, the oldest event is lost."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    n = nodes[node]
    if t.num_events == 0 or n.end != n.limit:
        return
    if t.next_event - t.first_event == t.num_events:
        t.first_event += 1
        t.lost_events += 1
    place = t.next_event % t.num_events
    t.next_event += 1
    event, ids = view(t.events_at, t.num_events, EVENT)[place], view(
        t.event_ids_at + 8 * place * t.grain, t.grain, np.int64
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
def tell(tree: int, node: int, key: int) -> None:
    """Tells that the tokens of a node are held. Those above it were told."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    if nodes[node].told == 0:
        nodes[node].told = 1
        nodes[nodes[node].parent].told_below += 1
        emit(tree, STORED, node, key)


@inner
def untell(tree: int, node: int) -> None:
    """Tells that the tokens of a node, and of nodes above it, are no longer held, where that is so."""
    t = view(tree, 1, TREE)[0]
    nodes = view(t.nodes_at, t.nodes, NODE)
    while node and nodes[node].told and nodes[node].full == 0 and nodes[node].told_below == 0:
        nodes[node].told = 0
        nodes[nodes[node].parent].told_below -= 1
        emit(tree, REMOVED, node, 0)
        node = nodes[node].parent


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
    return count
