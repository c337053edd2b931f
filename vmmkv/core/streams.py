"""Streams and fences of rows. A row names its streams by the slots of `vmmkv.driver.fencing`, as bits. A slot is not
given to another stream while a row names it."""

from typing import Any

from ..compiled import accessor, entry, inner
from ..compiled.native import view
from ..driver.fencing import SLOTS, STREAM, let_slots, order_slots, pending_slots, record_slots, slot_for
from ..driver.running import WORD, either_captured, enter, leave, step
from ..driver.table import STATUS, SYNCHRONIZE
from .access import ask_of, cache_of, driver_of, pool_of, row_at
from .codes import CAPTURED, DONE, FAILED
from .pages import row_of


@accessor
def stream_in(driver: int, slot: int) -> Any:
    """The stream in a slot."""
    return view(driver_of(driver).streams_at, SLOTS, STREAM)[slot]


@inner
def hold_slot(driver: int, handle: int, users: int, ask: int) -> int:
    """Names a stream: returns its slot, or `FULL`. It needs the context."""
    slot = slot_for(driver, handle)
    if users and slot >= 0:
        if stream_in(driver, slot).users == 0:
            ask_of(ask).fresh = slot + 1
        stream_in(driver, slot).users += users
    return slot


@inner
def order(driver: int, streams: int, first: int, slots: int, tick: int, handle: int, ask: int) -> int:
    """Records an event on streams, by slot, and on the stream `first`; and makes later work on the stream `handle` wait
    for these events, and for a fence. 0 is no stream. The fence of all that goes to `ask`. Returns `DONE`, `FULL`,
    `CAPTURED` where one of the recorded streams is, or `FAILED`."""
    a, code = ask_of(ask), 0
    a.slots, a.tick = slots, tick
    if streams == 0 and first == 0 and (slots == 0 or handle == 0):
        return DONE
    if enter(driver, ask):
        return FAILED
    if first:
        code = slot_for(driver, first)
        streams |= 1 << max(code, 0)
    if code >= 0:
        code = record_slots(driver, streams, first, ask)
    if code >= 0:
        a.slots, a.tick, code = slots | streams, max(tick, code), DONE
        a.status = order_slots(driver, a.slots, a.tick, handle) if handle else 0
        code = FAILED if a.status else DONE
    leave(driver, ask)
    return code


@inner
def unfinished(driver: int, slots: int, tick: int, ask: int) -> int:
    """The slots of those streams of a fence whose work has not finished."""
    if slots and enter(driver, ask) == 0:
        slots = pending_slots(driver, slots, tick, ask)
        leave(driver, ask)
    return slots


@inner
def fence_row(cache: int, row: int, ask: int) -> int:
    """Puts the work that was submitted to a row's streams into its fence. Returns `DONE`, `CAPTURED` or `FAILED`."""
    r, a = row_at(cache, row), ask_of(ask)
    code = order(pool_of(cache_of(cache).pool).driver, r.streams, 0, r.slots, r.tick, 0, ask)
    if code == DONE:
        r.slots, r.tick = a.slots, a.tick
    return code


@inner
def order_row(cache: int, row: int, streams: int, slots: int, tick: int, ask: int) -> int:
    """Makes later work on a sequence's own stream wait for all work so far on streams, by slot, for the row's fence,
    and for another. Returns `DONE`, `CAPTURED` or `FAILED`. The row's fence stays: a plan that is made again must not
    wait for this one."""
    r, driver = row_at(cache, row), pool_of(cache_of(cache).pool).driver
    if r.stream == 0:
        return DONE
    if is_captured(cache, row, ask):
        return CAPTURED
    code = order(driver, streams, 0, r.slots | slots, max(r.tick, tick), r.stream, ask)
    ask_of(ask).slots = 0
    return code


@inner
def order_behind(cache: int, row: int, handle: int, ask: int) -> int:
    """Makes a stream wait for all work on a row, and on the current stream. Returns what `order` does."""
    r = row_at(cache, row)
    return order(pool_of(cache_of(cache).pool).driver, r.streams, ask_of(ask).current, r.slots, r.tick, handle, ask)


@inner
def wait_for_all(driver: int, ask: int) -> None:
    """Waits for all work on the device where no event can be recorded."""
    if enter(driver, ask) == 0:
        step(driver, SYNCHRONIZE, ask + STATUS * WORD, 0, 0, 0)
        leave(driver, ask)


@inner
def fence_stream(cache: int, row: int, stream: int, ask: int) -> None:
    """Puts the work that was submitted to a stream into a row's fence, also where the row has another sequence by now,
    or none. If that fails, waits for the work."""
    driver, r, a = pool_of(cache_of(cache).pool).driver, row_at(cache, row), ask_of(ask)
    if order(driver, 0, stream, r.slots, r.tick, 0, ask) == DONE:
        r.slots, r.tick = a.slots, a.tick
    else:
        wait_for_all(driver, ask)


@inner
def order_stream(driver: int, first: int, stream: int, ask: int) -> None:
    """Makes later work on a stream wait for all work so far on another, `first`. If that fails, waits for the work."""
    if stream not in (first, 0) and first and order(driver, 0, first, 0, 0, stream, ask) != DONE:
        wait_for_all(driver, ask)


@inner
def is_captured(cache: int, row: int, ask: int) -> int:
    """Whether a graph is being captured on a row's own stream, or on the caller's."""
    driver, stream = pool_of(cache_of(cache).pool).driver, row_at(cache, row).stream
    if stream == 0 or enter(driver, ask):
        return 0
    status = either_captured(driver, ask_of(ask).current, stream, ask)
    leave(driver, ask)
    return 1 if status == CAPTURED else 0


@inner
def name_stream(cache: int, row: int, handle: int, ask: int) -> int:
    """Names a stream that uses a row. Returns `DONE`, `FULL` or `FAILED`."""
    driver, r = pool_of(cache_of(cache).pool).driver, row_at(cache, row)
    if handle == 0:
        return DONE
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


@entry
def record_stream(cache: int, ticket: int, handle: int, ask: int) -> int:
    """Names a stream that uses a sequence. Returns `DONE`, `GONE`, `FULL` or `FAILED`."""
    row = row_of(cache, ticket)
    return row if row < 0 else name_stream(cache, row, handle, ask)
