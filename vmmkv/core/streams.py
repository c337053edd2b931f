"""Streams and fences of rows. A row names its streams by the slots of `vmmkv.driver.fencing`, as bits. A slot is not
given to another stream while a row names it."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import call, view
from ..driver.fencing import EVENTS, SLOTS, STREAM, event_for, put, slot_for
from ..driver.fencing import FULL as NO_SLOT
from ..driver.fencing import ask as ask_slot
from ..driver.running import CAPTURED as IS_CAPTURED
from ..driver.running import WORD, captured, enter, leave
from ..driver.table import DRIVER, SCRATCH, STATUS
from .rows import row_of
from .tables import ASK, CACHE, CAPTURED, DONE, FAILED, FULL, LISTS, POOL, ROW


@inner
def hold_slot(driver: int, handle: int, users: int, ask: int) -> int:
    """Names a stream: returns its slot, `FULL`, or `FAILED`. It needs the context."""
    d, found = view(driver, 1, DRIVER)[0], NO_SLOT
    streams = view(d.streams_at, SLOTS, STREAM)
    for slot in range(SLOTS):
        if streams[slot].handle == handle:
            found = slot
            break
    if found == NO_SLOT:
        found = slot_for(driver, handle)
    if found == NO_SLOT:
        return FULL
    if users and streams[found].users == 0:
        view(ask, 1, ASK)[0].fresh = found + 1
    streams[found].users += users
    return found


@inner
def let_slots(driver: int, slots: int) -> None:
    """Releases slots that a row has named."""
    d = view(driver, 1, DRIVER)[0]
    streams = view(d.streams_at, SLOTS, STREAM)
    for slot in range(SLOTS):
        if slots >> slot & 1:
            streams[slot].users -= 1


@inner
def record_slots(driver: int, slots: int, current: int, ask: int) -> int:
    """Records an event on each of the streams, unless one of them or the current one is captured. Returns `DONE`,
    `CAPTURED` or `FAILED`; the tick and the slots go to `ask`. It needs the context."""
    d, a, words = view(driver, 1, DRIVER)[0], view(ask, 1, ASK)[0], view(ask, SCRATCH, np.int64)
    streams, status = view(d.streams_at, SLOTS, STREAM), 0
    a.slots, a.tick = slots, d.tick
    if slots == 0:
        return DONE
    if current:
        status = captured(driver, current, ask)
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0 and streams[slot].handle != current:
            status = captured(driver, streams[slot].handle, ask)
    if status == 0:
        d.tick += 1
        a.tick = d.tick
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0:
            status = put(driver, slot, a.tick, ask)
    words[STATUS] = status
    return DONE if status == 0 else CAPTURED if status == IS_CAPTURED else FAILED


@inner
def pending_slots(driver: int, slots: int, tick: int) -> int:
    """The slots of a fence whose work has not finished. It needs the context."""
    left = 0
    for slot in range(SLOTS):
        if slots >> slot & 1 and ask_slot(driver, slot, tick):
            left |= 1 << slot
    return left


@inner
def order_slots(driver: int, slots: int, tick: int, slot: int) -> int:
    """Makes later work on a slot's stream wait for a fence. Returns a status. It needs the context."""
    d = view(driver, 1, DRIVER)[0]
    events, status = view(d.events_at, (SLOTS, EVENTS), np.int64), 0
    stream = view(d.streams_at, SLOTS, STREAM)[slot].handle
    for other in range(SLOTS):
        if slots >> other & 1 and other != slot and status == 0:
            place = event_for(driver, other, tick)
            if place >= 0:
                status = call(d.wait, (stream, events[other, place], 0))
    return status


@inner
def fence_row(cache: int, row: int, ask: int) -> int:
    """Puts the work that was submitted to a row's streams into its fence. Returns `DONE`, `CAPTURED` or `FAILED`."""
    c = view(cache, 1, CACHE)[0]
    driver = view(c.pool, 1, POOL)[0].driver
    r, a = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(ask, 1, ASK)[0]
    if r.streams == 0:
        return DONE
    if enter(driver, ask):
        return FAILED
    code = record_slots(driver, r.streams, 0, ask)
    leave(driver, ask)
    if code == DONE:
        r.slots, r.tick = r.slots | a.slots, max(r.tick, a.tick)
    return code


@inner
def wait_for_all(driver: int, ask: int) -> None:
    """Waits for all work on the device, where an event could not be recorded behind it: see
    `vmmkv.driver.running.synchronize`."""
    d = view(driver, 1, DRIVER)[0]
    if enter(driver, ask) == 0:
        if call(d.allocate, (ask + STATUS * WORD, 1)):
            call(d.synchronize, ())
        else:
            call(d.deallocate, (view(ask, SCRATCH, np.int64)[STATUS],))
        leave(driver, ask)


@inner
def fence_stream(cache: int, row: int, stream: int, ask: int) -> None:
    """Puts the work that was submitted to a stream into a row's fence, also where the row has another sequence by now,
    or none. If that fails, waits for the work."""
    c = view(cache, 1, CACHE)[0]
    driver = view(c.pool, 1, POOL)[0].driver
    r, a = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(ask, 1, ASK)[0]
    if stream == 0 or enter(driver, ask):
        return
    slot = hold_slot(driver, stream, 0, ask)
    code = record_slots(driver, 1 << slot, 0, ask) if slot >= 0 else slot
    leave(driver, ask)
    if code == DONE:
        r.slots, r.tick = r.slots | a.slots, max(r.tick, a.tick)
    else:
        wait_for_all(driver, ask)


@inner
def order_stream(driver: int, first: int, stream: int, ask: int) -> None:
    """Makes later work on a stream wait for all work so far on another, `first`. If that fails, waits for the work."""
    if stream in (first, 0) or first == 0 or enter(driver, ask):
        return
    slot, status = hold_slot(driver, first, 0, ask), 1
    if slot >= 0 and record_slots(driver, 1 << slot, 0, ask) == DONE:
        d = view(driver, 1, DRIVER)[0]
        place = event_for(driver, slot, view(ask, 1, ASK)[0].tick)
        events = view(d.events_at, (SLOTS, EVENTS), np.int64)
        status = call(d.wait, (stream, events[slot, place], 0)) if place >= 0 else 0
    leave(driver, ask)
    if status:
        wait_for_all(driver, ask)


@inner
def is_captured(cache: int, row: int, ask: int) -> int:
    """Whether a graph is being captured on a row's own stream, or on the caller's."""
    c = view(cache, 1, CACHE)[0]
    driver = view(c.pool, 1, POOL)[0].driver
    r, a, status = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(ask, 1, ASK)[0], 0
    if r.stream == 0 or enter(driver, ask):
        return 0
    if a.current:
        status = captured(driver, a.current, ask)
    if status == 0 and r.stream != a.current:
        status = captured(driver, r.stream, ask)
    leave(driver, ask)
    return 1 if status == IS_CAPTURED else 0


@entry
def record_stream(cache: int, ticket: int, handle: int, ask: int) -> int:
    """Names a stream that uses a sequence. Returns `DONE`, `GONE`, `FULL` or `FAILED`."""
    c, row = view(cache, 1, CACHE)[0], row_of(cache, ticket)
    if row < 0 or handle == 0:
        return row if row < 0 else DONE
    driver = view(c.pool, 1, POOL)[0].driver
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if enter(driver, ask):
        return FAILED
    slot = hold_slot(driver, handle, 1, ask)
    leave(driver, ask)
    if slot < 0:
        return slot
    if r.streams >> slot & 1:
        let_slots(driver, 1 << slot)
    r.streams |= 1 << slot
    return DONE
