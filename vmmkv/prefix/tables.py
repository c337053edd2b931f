"""The tables of a prefix tree, and the invariants that hold between two calls.

    tree      geometry, counts, and addresses of all other tables
    nodes     ids of some tokens, links, what is held for them
    ids       token ids: `grain` words for each node
    slots     frames held for each node, as numbers + 1: `width` words for each node
    marks     which slots the node's copy in host memory covers: as many words
    shapes    for each of the `width` slots: its range, its pages, and its place among the node's slots of that size
    holders   for each row of the cache: the node at which the known tokens of its sequence end
    parts     ranges: bytes of a token, and room to gather the slots of a path, by page and by group of pages
    heaps     nodes in the order of eviction, and nodes with a priority that expires, in the order of time
    events    a ring of events for routers, each followed by `grain` token ids

A *boundary* is a number of tokens with which a page of a range becomes full; where pages have many tokens, also each
multiple of `CHUNK`. A node lies between two boundaries, `base` and `limit`. So the slots of a node are those of the
pages that its last token fills: one for each such page, and one for each large frame that ends there.

Invariants between two calls:
 1. A child is found by its parent and its first id, and no two children of a node begin with the same id. The children
    of node 0 are the roots of keys; their `first` is the key.
 2. A node without children has slots, rows, pins, or a copy in host memory. A node that ends between boundaries,
    without rows and pins, has two children or more.
 3. `rows` of a node counts the rows that end there or below. Children that have such rows come before others.
 4. On a path, what is held comes first: a node that holds a frame is below others that hold all frames in front of it.
 5. A node is in the order of eviction if it holds frames or has parked rows, but has no live rows and no pins, and no
    node below it holds frames or has rows.
 6. A node is `known` if it holds a frame, or a node below it does. It is told if a child is known; or if it holds a
    frame, and its last token lies on no page behind it.
"""

from typing import Any

import numpy as np

from ..compiled import accessor
from ..compiled.native import view
from ..core.access import cache_of, frame_in, record_of
from ..core.tables import fields


TREE = fields(
    "cache page_size large ranges parts_at step grain width shapes_at nodes nodes_at fresh free used ids_at slots_at "
    "marks_at buckets_at mask holders_at num_rows clock now order timers path path_at list_at listed slots tick "
    "events_at event_words num_events first_event next_event held pages moved serial"
)
"""`step` is `CHUNK` where that is a boundary, else 0. `slots` and `tick` are the fence of the work that wrote to held
frames. `held` counts references to frames, `pages` their pages, and `listed` the frames that `list_all` has listed.
`order` and `timers` are addresses of heaps. Events are numbered from 0 on: `first_event` is the oldest that is there.
`moved` counts the pages that an eviction has listed for the host, and `serial` the nodes that were moved there."""
NODE = fields(
    "next prev parent first begin end base child "  # a walk reads these
    "used known rows known_below live holder pins full limit chain children told priority expires host lead"
)
"""`first` is the first id; `chain` the next node with the same hash; `holder` a row + 1; `full` the number of slots in
use. `host` is the serial of the node's copy in host memory, times -1 while the copy is being made; `lead` says that the
copy also has the pages in front, as far as a token needs them. A node's ids in `ids` are those from `base` on."""
PART = fields("record pages_at groups_at covered low high")
SHAPE = fields("part size offset")
HOLDER = fields("next prev owner node held parked")
"""`held` is the number of tokens up to which the row's frames are held or known."""
HEAP = fields("count room items_at places_at keys_at")
FOUND = fields("action tokens row last")
RANGE_OF_TOKENS = fields("start end priority expires")
MOVED = fields("node serial part page frame offset priority gain old")
"""A page that goes to the host: the `offset`-th of a frame. `gain` says that the device gets the page, `old` is the
serial of an earlier copy of the node, or 0."""
ON_HOST = fields("serial part page")
EVENT = fields("number kind node parent key begin end priority")
NODE_BYTES, HOLDER_BYTES, EVENT_BYTES = NODE.itemsize, HOLDER.itemsize, EVENT.itemsize
NODE_WORDS, EVENT_WORDS = NODE_BYTES // 8, EVENT_BYTES // 8

CHUNK = 64
"""The most tokens of a node."""
STORED, REMOVED, CLEARED = 1, 2, 3
"""Kinds of events."""
NOTHING, SHARE, ADOPT = 0, 1, 2
"""What a look-up advises: there is nothing; frames are to be shared; the row is to be adopted."""
OTHER_IDS, TOO_FEW, NO_FRONT = -102, -101, -100
"""Refusals of a commit: other ids were committed for the sequence; it has fewer tokens; it has released its front."""
DEFAULT_PRIORITY = 35
TOKEN_BITS = 32


tree_of = record_of(TREE)


@accessor
def nodes_of(tree: int) -> Any:
    """All nodes."""
    return view(tree_of(tree).nodes_at, tree_of(tree).nodes, NODE)


@accessor
def ids_of(tree: int, node: int) -> Any:
    """The token ids of a node, from its base on."""
    return view(tree_of(tree).ids_at + 8 * node * tree_of(tree).grain, tree_of(tree).grain, np.int64)


@accessor
def slots_of(tree: int, node: int) -> Any:
    """The slots of a node."""
    return view(tree_of(tree).slots_at + 8 * node * tree_of(tree).width, tree_of(tree).width, np.int64)


@accessor
def marks_of(tree: int, node: int) -> Any:
    """Which slots of a node are in host memory."""
    return view(tree_of(tree).marks_at + 8 * node * tree_of(tree).width, tree_of(tree).width, np.int64)


@accessor
def shapes_of(tree: int) -> Any:
    """What the slots of a node are for."""
    return view(tree_of(tree).shapes_at, tree_of(tree).width, SHAPE)


@accessor
def parts_of(tree: int) -> Any:
    """All ranges."""
    return view(tree_of(tree).parts_at, tree_of(tree).ranges, PART)


@accessor
def holders_of(tree: int) -> Any:
    """What is known of each row."""
    return view(tree_of(tree).holders_at, tree_of(tree).num_rows, HOLDER)


@accessor
def held_frame(tree: int, slot: int) -> Any:
    """The core's record of the frame in a slot."""
    return frame_in(cache_of(tree_of(tree).cache).pool, slot - 1)
