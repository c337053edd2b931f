"""The tables of the books, and the invariants that hold between two calls.

    pool      budget, free frames, the journal, the caches and accounts that lie on it
    accounts  what each user of a pool uses, may use, and has reserved, in pages
    frames    physical memory: handle, pages, mappings, references
    cache     geometry; the row lists, of which each is a ring through a head behind the rows
    rows      owner, length, capacity, fence, list links
    extents   which pages of a row are mapped, ready, shared and used, for each range
    pages     page table of a range: pages[row, page] is the frame + 1; 0 outside of the extents, and not scanned
    steps     the journal of the change that is under way

Compiled functions are given one integer, the address of a pool or of a cache, and find all tables from there. They run
from the first line to the last with the interpreter's lock held, so that no other code sees the books half changed.
`run` alone gives that lock up; it touches only the journal and the handles of its frames. A state is never freed.

A change of what is mapped is three calls, under the planning lock (`Pool.lock`):

    plan      writes a journal. Pages to be unmapped leave the extents at once; pages to be mapped enter the extents
              with the commit, and lengths change then.
    run       makes the journal's driver calls, one after another.
    commit    books the calls that were made. If one failed, lengths are as before, pages that were not unmapped come
              back, pages that were mapped are surplus, and frames that were made are free.

Invariants between two calls, in pages:
 1. `created + leased <= budget`, and `used` of all accounts adds up to `pool.used`. `committed` is the sum over
    accounts of the larger of `used` and `reserved`.
 2. A frame is on one free stack (`refs == held == 0`), or mapped (`refs`), or held by a guest, or in the journal.
    `place` is the exclusive or of the rows in which the frame is mapped: with one mapping, that row.
 3. `first <= use_first <= use_end`, `first <= ready <= mapped`, and pages from `first` to `mapped` are mapped. Below
    `head_end` they lie on whole large frames. A frame that is mapped twice, or held, lies below `shared` in each of its
    rows; below `readonly` a row cannot write.
 4. Below `shared` each frame counts the live rows that use it (`users`); above it the pages of a live row are its own,
    and are counted by arithmetic.
 5. `gain` of a row is the number of its pages whose frames would be free if they were unmapped there.
 6. A suspended row has an owner, no tokens, and uses no pages; it cannot grow until it is resumed.
 7. A row's fence covers all work on its surplus pages. Free frames and frames that a guest alone holds have none.
"""

import numpy as np

from ..driver.table import SCRATCH, STATUS


def fields(names: str) -> np.dtype[np.void]:
    """A type of records of integers."""
    return np.dtype([(name, np.int64) for name in names.split()])


POOL = fields(
    "driver page_size large frames_at capacity fresh "
    "small small_at larges larges_at unmade unmade_at gained gained_at gained_large gained_large_at "
    "budget created leased used committed accounts_at accounts caches_at caches clock "
    "steps_at max_steps steps calls done status serial pending settled "
    "spent spent_ahead run_scratch staging staged staged_for staged_owner staged_part staged_page source_of source "
    "hungry asleep dead poison poisons fills made ahead mapped_ahead mapped_in_need"
)
"""Stacks (`small`, `larges`, ...) are counts, and addresses of numbers of frames. `fresh` is the first frame number
that was never used. `staging` is the address of a range to copy to; `staged` is the frame there + 1, which counts as
used by the cache `staged_for`, and a copy of what lies on a page of the sequence `staged_owner`. `source` is a row of
the cache `source_of` that the journal reads from. `poison` is the byte that debugging fills with, and `poisons` what
the journal does: 0 in a capture. `made` counts pages that were created since the beginning,
`mapped_ahead` and `mapped_in_need` those that the mapper and other threads have mapped."""
ACCOUNT = fields("used limit reserved leased open")
CACHE = fields(
    "pool account num_rows ranges ranges_at rows_at extents_at max_tokens overread lookahead large key_of_sequence "
    "classes live tokens adopted reused ring_at ring_size ring_head ring_tail guest queue_at queue_first queue_count "
    "turn closed page_uses"
)
"""`page_uses` counts the pages that sequences used when they ended."""
RANGE = fields("address record row_pages pages_at")
ROW = fields(
    "owner last left length start room capacity expected ahead_at key streams stream slots tick stamp gain busy turn "
    "target cut list next prev is_old older younger queued broken broken_part broken_page suspended away away_start"
)
EXTENT = fields("first ready mapped head_end shared readonly use_first use_end")
FRAME = fields("handle pages refs held users key place leaving moving")
STEP = fields("kind cache row range page count frame other address nbytes stream ready head_end shared readonly owner")
ASK = fields(
    " ".join("status" if index == STATUS else f"scratch{index}" for index in range(SCRATCH))
    + " asked available slots tick row fresh frugal current"
)
"""Numbers beside a code, behind words for the driver (`vmmkv.driver.table`), the first of which is a call's status:
pages asked for and available, a fence to wait for, a row, the new slot of a stream + 1. The caller sets `frugal`, where
the driver has no memory for new frames, and `current`, the handle of its stream."""
COUNTS = fields("mapped bytes uses live parked retired")
"""Pages that are mapped for a cache, and bytes of its live tokens, each byte of memory counted once; pages that live
sequences use, each as often as it is used; live rows, parked rows, rows that no sequence can adopt as they are."""
NOTE = fields("kind row owner tokens heir")
"""A message to a guest about a row, and the owner that its tokens have then: see `vmmkv.core.sharing`."""

VACANT_ROWS, LIVE, SPARE, RETIRED, CLASSES = 0, 1, 2, 3, 4
"""Lists: rows without pages, live rows without surplus, live rows with surplus, rows that no sequence can adopt as they
are; then parked rows by size."""
NUM_CLASSES = 44
LISTS = CLASSES + NUM_CLASSES

LENGTH, STAGE, UNSTAGE, OUT, IN = range(20, 25)
"""Kinds of steps beside the driver's (`vmmkv.driver.table`). `LENGTH` makes no call: it is a row's length after the
commit. `STAGE` maps a frame in the staging range, `UNSTAGE` unmaps it. `OUT` and `IN` put another frame under pages of
a row."""
ROW_BITS = 24
ROW_MASK = (1 << ROW_BITS) - 1

INTACT, LOST = 1, 2
"""Values of `suspended`: pages that are still mapped in the row hold its tokens; or not all of them do. The sequence's
bounds are `away_start` and `away` then, and the row has no tokens."""
GAINED, TAKEN_FRAME = 1, 2
"""Values of `moving`: the journal makes the frame free; a step of the journal has taken the frame."""
FRESH_KEY = -1
"""The key of a frame that no sequence has had."""
