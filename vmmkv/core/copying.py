"""Tokens that are copied from row to row, on one stream: behind all work on the rows, in front of all later work."""

from ..compiled import entry, inner
from ..compiled.native import call
from ..driver.fencing import SLOTS
from ..driver.running import enter, leave
from .access import ask_of, cache_of, driver_of, pool_of, row_at, words_at
from .codes import DONE, FAILED
from .pages import active_row, row_of
from .rows import set_bounds
from .starting import CUT, note
from .streams import hold_slot, order_slots, record_slots


@inner
def order_around(cache: int, tickets_at: int, count: int, slot: int, handle: int, before: int, ask: int) -> int:
    """Has a stream come behind all work on rows (`before` is 1), or the rows' streams behind that stream. Fences of the
    rows have that work, too. Returns `DONE`, `CAPTURED` or `FAILED`. It needs the context."""
    driver, a, tickets = pool_of(cache_of(cache).pool).driver, ask_of(ask), words_at(tickets_at, count)
    streams, slots = 1 << slot, 0
    for index in range(count):
        r = row_at(cache, row_of(cache, tickets[index]))
        streams, slots = streams | r.streams, slots | r.slots
    code = record_slots(driver, streams if before else 1 << slot, handle, ask)
    if code != DONE:
        return code
    status = order_slots(driver, streams | slots, a.tick, slot) if before else 0
    for other in range(SLOTS):
        if streams >> other & 1 and status == 0 and not before:
            status = order_slots(driver, 1 << slot, a.tick, other)
    for index in range(count):
        r = row_at(cache, row_of(cache, tickets[index]))
        r.slots, r.tick = r.slots | (r.streams if before else 1 << slot), max(r.tick, a.tick)
    a.status = status
    return FAILED if status else DONE


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
    driver, a, code, slot, status = pool_of(cache_of(cache).pool).driver, ask_of(ask), DONE, 0, 0
    tickets, copy, held = words_at(tickets_at, count), words_at(copies_at, 3 * copies), words_at(held_at, 2 * changed)
    a.row = 0
    for index in range(count):
        row = active_row(cache, tickets[index])
        if row < 0:
            return row
    if enter(driver, ask):
        return FAILED
    if handle:
        slot = hold_slot(driver, handle, 0, ask)
        code = slot if slot < 0 else order_around(cache, tickets_at, count, slot, handle, 1, ask)
    if code == DONE and changed:
        a.row = 1
        for index in range(0, 3 * copies, 3):
            if status == 0:
                status = call(driver_of(driver).copy, (copy[index], copy[index + 1], copy[index + 2], handle))
        a.status = status
        code = FAILED if status else DONE
        if code == DONE and handle:
            code = order_around(cache, tickets_at, count, slot, handle, 0, ask)
    leave(driver, ask)
    for index in range(changed if a.row else 0):
        row, is_done = row_of(cache, tickets[index]), code == DONE
        r, start, length = row_at(cache, row), held[2 * index] * is_done, held[2 * index + 1] * is_done
        note(cache, CUT, row, 0)
        cut = max(r.cut, r.length) if cache_of(cache).key_of_sequence else 0
        r.cut = cut if cut > length else 0
        set_bounds(cache, row, start, length)
    a.row = 1 if a.row and code != DONE else 0
    return code
