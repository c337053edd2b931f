"""Tokens that are copied from row to row, on one stream: behind all work on the rows, in front of all later work."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import call, view
from ..driver.fencing import SLOTS
from ..driver.running import enter, leave
from ..driver.table import DRIVER, SCRATCH, STATUS
from .rows import place, recount, row_of, use_tokens
from .starting import CUT, note
from .streams import hold_slot, order_slots, record_slots
from .tables import ASK, CACHE, DONE, FAILED, GONE, LISTS, POOL, ROW, SUSPENDED


@inner
def order_around(cache: int, tickets_at: int, count: int, slot: int, handle: int, before: int, ask: int) -> int:
    """Has a stream come behind all work on rows (`before` is 1), or the rows' streams behind that stream. Fences of the
    rows have that work, too. Returns `DONE`, `CAPTURED` or `FAILED`. It needs the context."""
    c, a, streams, slots = view(cache, 1, CACHE)[0], view(ask, 1, ASK)[0], 1 << slot, 0
    driver = view(c.pool, 1, POOL)[0].driver
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    for index in range(count):
        r = rows[row_of(cache, tickets[index])]
        streams, slots = streams | r.streams, slots | r.slots
    code = record_slots(driver, streams if before else 1 << slot, handle, ask)
    if code != DONE:
        return code
    status = order_slots(driver, streams | slots, a.tick, slot) if before else 0
    for other in range(SLOTS):
        if streams >> other & 1 and status == 0 and not before:
            status = order_slots(driver, 1 << slot, a.tick, other)
    for index in range(count):
        r = rows[row_of(cache, tickets[index])]
        r.slots, r.tick = r.slots | (r.streams if before else 1 << slot), max(r.tick, a.tick)
    view(ask, SCRATCH, np.int64)[STATUS] = status
    return FAILED if status else DONE


@inner
def hold_tokens(cache: int, row: int, start: int, length: int) -> None:
    """Has a row hold other tokens, which lie there."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    note(cache, CUT, row, r.owner, 0)
    cut = max(r.cut, r.length) if c.key_of_sequence else 0
    r.cut = cut if cut > length else 0
    c.tokens += (length - start) - (r.length - r.start)
    r.start, r.length = start, length
    use_tokens(cache, row, length)
    recount(cache, row)
    place(cache, row)


@entry
def copy_rows(
    cache: int, tickets_at: int, count: int, copies_at: int, copies: int, held_at: int, changed: int, handle: int,
    ask: int,
) -> int:  # fmt: skip
    """Makes copies between rows, of each a destination, a source and bytes, in the order of one stream. The first
    `changed` of the rows hold tokens from a start to a length then, which `held` has. Without any the stream comes
    behind all work on the rows, and that is all. It needs no lock.

    Returns `DONE`, or `GONE`, `SUSPENDED`, `CAPTURED`, `FULL` or `FAILED`. If `ask.row` is 1 the rows that
    were to change hold no tokens any more, and the device may still write to them.
    """
    c, a, code, slot = view(cache, 1, CACHE)[0], view(ask, 1, ASK)[0], DONE, 0
    driver, tickets = view(c.pool, 1, POOL)[0].driver, view(tickets_at, count, np.int64)
    words, held, status, a.row = view(copies_at, 3 * copies, np.int64), view(held_at, 2 * changed, np.int64), 0, 0
    for index in range(count):
        row = row_of(cache, tickets[index])
        if row < 0:
            return GONE
        if view(c.rows_at, c.num_rows + LISTS, ROW)[row].suspended:
            return SUSPENDED
    if enter(driver, ask):
        return FAILED
    if handle:
        slot = hold_slot(driver, handle, 0, ask)
        code = slot if slot < 0 else order_around(cache, tickets_at, count, slot, handle, 1, ask)
    if code == DONE and changed:
        a.row = 1
        for index in range(0, 3 * copies, 3):
            if status == 0:
                copy = view(driver, 1, DRIVER)[0].copy
                status = call(copy, (words[index], words[index + 1], words[index + 2], handle))
        view(ask, SCRATCH, np.int64)[STATUS] = status
        code = FAILED if status else DONE
        if code == DONE and handle:
            code = order_around(cache, tickets_at, count, slot, handle, 0, ask)
    leave(driver, ask)
    for index in range(changed if a.row else 0):
        is_done = code == DONE
        start, length = held[2 * index] * is_done, held[2 * index + 1] * is_done
        hold_tokens(cache, row_of(cache, tickets[index]), start, length)
    a.row = 1 if a.row and code != DONE else 0
    return code
