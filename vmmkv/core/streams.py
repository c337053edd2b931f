"""Streams and fences of rows. A row names its streams by the slots of `vmmkv.driver.fencing`, as bits. A slot is not
given to another stream while a row names it."""

from typing import Any

from ..compiled import accessor, entry, inner
from ..compiled.native import call, view
from ..driver.fencing import FULL as NO_SLOT
from ..driver.fencing import SLOTS, STREAM, put, slot_for, wait_event
from ..driver.fencing import ask as ask_slot
from ..driver.running import CAPTURED as IS_CAPTURED
from ..driver.running import WORD, captured, enter, leave
from ..driver.table import STATUS
from .access import ask_of, cache_of, driver_of, pool_of, row_at
from .codes import CAPTURED, DONE, FAILED, FULL
from .pages import row_of


@accessor
def stream_in(driver: int, slot: int) -> Any:
    """The stream in a slot."""
    return view(driver_of(driver).streams_at, SLOTS, STREAM)[slot]


@inner
def hold_slot(driver: int, handle: int, users: int, ask: int) -> int:
    """Names a stream: returns its slot, `FULL`, or `FAILED`. It needs the context."""
    found = NO_SLOT
    for slot in range(SLOTS):
        if stream_in(driver, slot).handle == handle:
            found = slot
            break
    if found == NO_SLOT:
        found = slot_for(driver, handle)
    if found == NO_SLOT:
        return FULL
    if users and stream_in(driver, found).users == 0:
        ask_of(ask).fresh = found + 1
    stream_in(driver, found).users += users
    return found


@inner
def let_slots(driver: int, slots: int) -> None:
    """Releases slots that a row has named."""
    for slot in range(SLOTS):
        if slots >> slot & 1:
            stream_in(driver, slot).users -= 1


@inner
def record_slots(driver: int, slots: int, current: int, ask: int) -> int:
    """Records an event on each of the streams, unless one of them or the current one is captured. Returns `DONE`,
    `CAPTURED` or `FAILED`; the tick and the slots go to `ask`. It needs the context."""
    d, a, status = driver_of(driver), ask_of(ask), 0
    a.slots, a.tick = slots, d.tick
    if slots == 0:
        return DONE
    if current:
        status = captured(driver, current, ask)
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0 and stream_in(driver, slot).handle != current:
            status = captured(driver, stream_in(driver, slot).handle, ask)
    if status == 0:
        d.tick += 1
        a.tick = d.tick
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0:
            status = put(driver, slot, a.tick, ask)
    a.status = status
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
    status = 0
    for other in range(SLOTS):
        if slots >> other & 1 and other != slot and status == 0:
            status = wait_event(driver, stream_in(driver, slot).handle, other, tick)
    return status


@inner
def add_fence(cache: int, row: int, ask: int) -> None:
    """Adds the fence in `ask` to that of a row."""
    r, a = row_at(cache, row), ask_of(ask)
    r.slots, r.tick = r.slots | a.slots, max(r.tick, a.tick)


@inner
def fence_row(cache: int, row: int, ask: int) -> int:
    """Puts the work that was submitted to a row's streams into its fence. Returns `DONE`, `CAPTURED` or `FAILED`."""
    driver, streams = pool_of(cache_of(cache).pool).driver, row_at(cache, row).streams
    if streams == 0:
        return DONE
    if enter(driver, ask):
        return FAILED
    code = record_slots(driver, streams, 0, ask)
    leave(driver, ask)
    if code == DONE:
        add_fence(cache, row, ask)
    return code


@inner
def order_row(cache: int, row: int, ask: int) -> int:
    """Makes later work on a sequence's own stream wait for all work so far on the streams that it names. Returns
    `DONE`, `CAPTURED` or `FAILED`. The row's fence stays: a plan that is made again must not wait for this one."""
    driver, r, a, status = pool_of(cache_of(cache).pool).driver, row_at(cache, row), ask_of(ask), 0
    if r.stream == 0:
        return DONE
    if enter(driver, ask):
        return FAILED
    code, slot = record_slots(driver, r.streams, 0, ask), hold_slot(driver, r.stream, 0, ask)
    if code == DONE and slot >= 0:
        status = order_slots(driver, a.slots, a.tick, slot) | order_slots(driver, r.slots, r.tick, slot)
    leave(driver, ask)
    a.slots = 0
    return FAILED if status or slot < 0 else code


@inner
def wait_for_all(driver: int, ask: int) -> None:
    """Waits for all work on the device where no event can be recorded: see `vmmkv.driver.running.synchronize`."""
    d = driver_of(driver)
    if enter(driver, ask) == 0:
        if call(d.allocate, (ask + STATUS * WORD, 1)):
            call(d.synchronize, ())
        else:
            call(d.deallocate, (ask_of(ask).status,))
        leave(driver, ask)


@inner
def fence_stream(cache: int, row: int, stream: int, ask: int) -> None:
    """Puts the work that was submitted to a stream into a row's fence, also where the row has another sequence by now,
    or none. If that fails, waits for the work."""
    driver = pool_of(cache_of(cache).pool).driver
    if stream == 0 or enter(driver, ask):
        return
    slot = hold_slot(driver, stream, 0, ask)
    code = record_slots(driver, 1 << slot, 0, ask) if slot >= 0 else slot
    leave(driver, ask)
    if code == DONE:
        add_fence(cache, row, ask)
    else:
        wait_for_all(driver, ask)


@inner
def order_stream(driver: int, first: int, stream: int, ask: int) -> None:
    """Makes later work on a stream wait for all work so far on another, `first`. If that fails, waits for the work."""
    if stream in (first, 0) or first == 0 or enter(driver, ask):
        return
    slot, status = hold_slot(driver, first, 0, ask), 1
    if slot >= 0 and record_slots(driver, 1 << slot, 0, ask) == DONE:
        status = wait_event(driver, stream, slot, ask_of(ask).tick)
    leave(driver, ask)
    if status:
        wait_for_all(driver, ask)


@inner
def is_captured(cache: int, row: int, ask: int) -> int:
    """Whether a graph is being captured on a row's own stream, or on the caller's."""
    driver, stream, current = pool_of(cache_of(cache).pool).driver, row_at(cache, row).stream, ask_of(ask).current
    if stream == 0 or enter(driver, ask):
        return 0
    status = captured(driver, current, ask) if current else 0
    if status == 0 and stream != current:
        status = captured(driver, stream, ask)
    leave(driver, ask)
    return 1 if status == IS_CAPTURED else 0


@entry
def record_stream(cache: int, ticket: int, handle: int, ask: int) -> int:
    """Names a stream that uses a sequence. Returns `DONE`, `GONE`, `FULL` or `FAILED`."""
    row = row_of(cache, ticket)
    if row < 0 or handle == 0:
        return row if row < 0 else DONE
    driver, r = pool_of(cache_of(cache).pool).driver, row_at(cache, row)
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
