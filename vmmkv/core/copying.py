"""Tokens that are copied from row to row, on one stream: behind all work on the rows, in front of all later work."""

from ..compiled import entry
from ..compiled.native import call
from ..driver.fencing import SLOTS
from ..driver.running import enter, leave
from .access import ask_of, cache_of, driver_of, pool_of, row_at, words_at
from .codes import DONE, FAILED
from .pages import active_row, row_of
from .rows import set_bounds
from .starting import CUT, note
from .streams import fence_stream, order, order_stream, stream_in


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
    driver, a, code, streams, slots, tick = pool_of(cache_of(cache).pool).driver, ask_of(ask), DONE, 0, 0, 0
    tickets, copy, held = words_at(tickets_at, count), words_at(copies_at, 3 * copies), words_at(held_at, 2 * changed)
    a.row = 0
    for index in range(count):
        row = active_row(cache, tickets[index])
        if row < 0:
            return row
        r = row_at(cache, row)
        streams, slots, tick = streams | r.streams, slots | r.slots, max(tick, r.tick)
    if handle:
        code = order(driver, streams, handle, slots, tick, handle, ask)
    for index in range(count if code == DONE and handle else 0):
        r = row_at(cache, row_of(cache, tickets[index]))
        r.slots, r.tick = r.slots | r.streams, max(r.tick, a.tick)
    if code != DONE or changed == 0:
        return code
    if enter(driver, ask):
        return FAILED
    a.row, status = 1, 0
    for index in range(0, 3 * copies, 3):
        if status == 0:
            status = call(driver_of(driver).copy, (copy[index], copy[index + 1], copy[index + 2], handle))
    leave(driver, ask)
    for slot in range(SLOTS if handle else 0):
        if streams >> slot & 1:
            order_stream(driver, handle, stream_in(driver, slot).handle, ask)
    for index in range(count if handle else 0):
        fence_stream(cache, row_of(cache, tickets[index]), handle, ask)
    a.status = status
    for index in range(changed):
        row, is_done = row_of(cache, tickets[index]), status == 0
        r, start, length = row_at(cache, row), held[2 * index] * is_done, held[2 * index + 1] * is_done
        note(cache, CUT, row, 0)
        cut = max(r.cut, r.length) if cache_of(cache).key_of_sequence else 0
        r.cut = cut if cut > length else 0
        set_bounds(cache, row, start, length)
    a.row = 1 if status else 0
    return FAILED if status else DONE
