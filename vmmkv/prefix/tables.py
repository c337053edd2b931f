"""The tables of a prefix tree, and the invariants that hold between two calls.

    tree      geometry, counts, and addresses of all other tables
    nodes     ids of some tokens, links, what is held for them
    ids       token ids: `grain` words for each node
    slots     what is held for each node, as numbers + 1: `width` words for each node
    marks     which slots the node's copy in host memory covers: as many words
    holders   for each row of the cache: the node at which the known tokens of its sequence end
    parts     ranges: bytes of a token, places in a node's slots, and room to gather the slots of a path
    events    a ring of what routers are told

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

import numpy as np


def _record(names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names.split()])


TREE = _record(
    "cache page_size large ranges parts_at kinds kinds_at step grain width nodes nodes_at fresh free used ids_at "
    "slots_at buckets_at mask holders_at num_rows clock now order order_at timers timers_at path path_at list_at "
    "notes_at slots tick events_at event_ids_at num_events first_event next_event drained silent held pages marks_at "
    "moved serial"
)
"""`step` is `CHUNK` where that is a boundary, else 0. `kinds` are the different sizes of a token in bytes. `slots` and
`tick` are the fence of the work that wrote to held frames. `held` counts references to frames, and `pages` their pages.
Events are numbered from 0 on: `first_event` is the oldest that is there, `drained` follows the last one that was taken.
A `silent` tree writes none. `moved` counts the pages that an eviction has listed for the host, and `serial` nodes
that were moved there."""
NODE = _record(
    "parent first begin end base limit child next prev chain children rows live holder pins full known known_below "
    "told priority used expires place timer host lead"
)
"""`first` is the first id; `chain` the next node with the same hash; `holder` a row + 1; `full` the number of slots in
use; `place` and `timer` are places + 1 in the heaps. `host` is the handle of its copy in host memory, or a serial times
-1 while that is being made; `lead` says that the copy also has the pages in front, as far as a token needs them."""
PART = _record("record single large pages_at groups_at covered low high")
HOLDER = _record("owner node held parked next prev")
"""`held` is the number of tokens up to which the row's frames are held or known."""
FOUND = _record("action tokens row last frames key")
RANGE_OF_TOKENS = _record("start end priority expires")
MOVED = _record("node serial part page frame offset priority gain")
"""A page that goes to the host: the `offset`-th of a frame. `gain` says that the device gets it."""
ON_HOST = _record("handle part page")
EVENT = _record("kind node parent key begin end priority")

CHUNK = 64
"""The most tokens of a node."""
NOTES = 64
"""Notes that are read at a time."""
STORED, REMOVED, CLEARED = 1, 2, 3
"""Kinds of events."""
NOTHING, SHARE, ADOPT = 0, 1, 2
"""What a look-up advises: there is nothing; frames are to be shared; the row is to be adopted."""
OTHER_IDS, TOO_FEW, NO_FRONT = -102, -101, -100
"""Refusals of a commit: other ids were committed for the sequence; it has fewer tokens; it has released its front."""
DEFAULT_PRIORITY = 35
TOKEN_BITS = 32
