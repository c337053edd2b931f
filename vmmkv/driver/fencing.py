"""Fences, compiled: events on streams, and which of them must have passed.

A *tick* is the number of a recording. A fence is a set of streams, as bits of their slots, and a tick: it has passed
when on each of these streams the last event up to that tick has. So two fences are one by the union of their streams
and the later of their ticks. Each slot has a ring of events, oldest first.

Invariants:
 1. Ticks in a ring ascend; each event there was recorded at its tick, and no query has found it passed.
 2. Of ticks that a ring has no event for, those below `low` have passed. Where the ring was full, the oldest event
    stands for all that were dropped before it, from `low` on: what waits for them waits a little longer.
 3. A slot is given to another stream only while its ring is empty and it has no users. Then an event is recorded there
    in the same call, or the slot gets a user. Fences from before name no tick of the new stream's, and have passed.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import call, view
from .running import CAPTURED, WORD, captured, enter, leave
from .table import CELL, DRIVER, NOT_READY, SCRATCH, STATUS

SLOTS, EVENTS = 62, 16
"""Streams at a time, as many as a word has bits for; and events of a ring."""
STREAM = np.dtype([(name, np.int64) for name in ("handle", "first", "count", "low", "users")])
WITHOUT_TIMING = 2
FAILED, FULL = -1, -4
"""A call has failed, and the scratch has its status; all slots have work under way."""


@inner
def event_for(driver: int, slot: int, tick: int) -> int:
    """The place in a slot's ring of the event that a tick waits for, or -1 where there is none."""
    d = view(driver, 1, DRIVER)[0]
    stream = view(d.streams_at, SLOTS, STREAM)[slot]
    ticks = view(d.ticks_at, (SLOTS, EVENTS), np.int64)
    if stream.count == 0 or tick < stream.low:
        return -1
    for behind in range(stream.count - 1, 0, -1):
        place = (stream.first + behind) % EVENTS
        if ticks[slot, place] <= tick:
            return place
    return stream.first


@inner
def ask(driver: int, slot: int, tick: int) -> int:
    """0 if a slot's work up to a tick has finished, otherwise NOT_READY, or another status. It needs the context."""
    d = view(driver, 1, DRIVER)[0]
    place = event_for(driver, slot, tick)
    if place < 0:
        return 0
    status = call(d.query, (view(d.events_at, (SLOTS, EVENTS), np.int64)[slot, place],))
    if status == 0 and event_for(driver, slot, tick) == place:  # a query may run Python, in tests, and another thread
        stream = view(d.streams_at, SLOTS, STREAM)[slot]  # this event, and all before it, leave the ring
        stream.count -= (place - stream.first) % EVENTS + 1
        stream.first = (place + 1) % EVENTS
        stream.low = view(d.ticks_at, (SLOTS, EVENTS), np.int64)[slot, stream.first]
    return status


@inner
def slot_for(driver: int, handle: int) -> int:
    """The slot of a stream: its own, else one that no stream has had, else the first whose stream has finished its
    work; `FULL`: there is none. It needs the context."""
    d = view(driver, 1, DRIVER)[0]
    streams = view(d.streams_at, SLOTS, STREAM)
    for slot in range(SLOTS):
        if streams[slot].handle == handle or streams[slot].handle == 0:
            streams[slot].handle = handle
            return slot
    for slot in range(SLOTS):
        if streams[slot].users == 0 and ask(driver, slot, d.tick) == 0:
            streams[slot].handle = handle
            return slot
    return FULL


@inner
def let_slots(driver: int, slots: int) -> None:
    """Takes a user from each of the slots."""
    streams = view(view(driver, 1, DRIVER)[0].streams_at, SLOTS, STREAM)
    for slot in range(SLOTS):
        if slots >> slot & 1:
            streams[slot].users -= 1


@inner
def put(driver: int, slot: int, tick: int, scratch: int) -> int:
    """Records an event on a slot's stream, and puts it into the ring. Returns a status. It needs the context."""
    d = view(driver, 1, DRIVER)[0]
    stream = view(d.streams_at, SLOTS, STREAM)[slot]
    events, ticks = view(d.events_at, (SLOTS, EVENTS), np.int64), view(d.ticks_at, (SLOTS, EVENTS), np.int64)
    if stream.count == EVENTS:
        status = ask(driver, slot, ticks[slot, stream.first])
        if status and status != NOT_READY:
            return status
    if stream.count == EVENTS:  # the next one stands for the oldest, which is recorded anew
        stream.first = (stream.first + 1) % EVENTS
        stream.count -= 1
    place = (stream.first + stream.count) % EVENTS
    if events[slot, place] == 0:
        status = call(d.make_event, (scratch + CELL * WORD, WITHOUT_TIMING))
        if status:
            return status
        events[slot, place] = view(scratch, SCRATCH, np.int64)[CELL]
    status = call(d.record, (events[slot, place], stream.handle))
    if status == 0:
        ticks[slot, place] = tick
        if stream.count == 0:
            stream.first, stream.low = place, tick
        stream.count += 1
    return status


@inner
def record_slots(driver: int, slots: int, current: int, scratch: int) -> int:
    """Records an event on the stream of each slot, unless one of them or the current one is captured. Returns the tick,
    or 0 for no slots; `CAPTURED`, and the scratch has the stream's handle; or `FAILED`. It needs the context."""
    d, words = view(driver, 1, DRIVER)[0], view(scratch, SCRATCH, np.int64)
    streams, handle = view(d.streams_at, SLOTS, STREAM), current
    status = captured(driver, current, scratch) if slots and current else 0
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0 and streams[slot].handle != current:
            handle = streams[slot].handle
            status = captured(driver, handle, scratch)
    tick = d.tick + 1 if slots else 0
    if slots and status == 0:
        d.tick = tick
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0:
            status = put(driver, slot, tick, scratch)
    words[STATUS] = handle if status == CAPTURED else status
    return tick if status == 0 else CAPTURED if status == CAPTURED else FAILED


@inner
def pending_slots(driver: int, slots: int, tick: int, scratch: int) -> int:
    """The slots of those streams of a fence whose work has not finished. The scratch has the status of a query that
    has failed, or 0. It needs the context."""
    left, words = 0, view(scratch, SCRATCH, np.int64)
    words[STATUS] = 0
    for slot in range(SLOTS):
        if slots >> slot & 1:
            status = ask(driver, slot, tick)
            left |= 1 << slot if status else 0
            words[STATUS] = status if status and status != NOT_READY else words[STATUS]
    return left


@inner
def order_slots(driver: int, slots: int, tick: int, stream: int) -> int:
    """Makes later work on a stream wait for a fence. Returns a status. It needs the context."""
    d, status = view(driver, 1, DRIVER)[0], 0
    streams, events = view(d.streams_at, SLOTS, STREAM), view(d.events_at, (SLOTS, EVENTS), np.int64)
    for slot in range(SLOTS):
        if slots >> slot & 1 and status == 0 and streams[slot].handle != stream:
            place = event_for(driver, slot, tick)
            status = call(d.wait, (stream, events[slot, place], 0)) if place >= 0 else 0
    return status


@entry
def record(driver: int, streams: int, count: int, current: int, scratch: int) -> int:
    """Records an event on each of `count` streams, behind all work that was submitted to them so far. The words at
    `streams` are their handles, and become their slots. Returns what `record_slots` does; or `FULL` where more streams
    than there are slots have work under way."""
    d, words = view(driver, 1, DRIVER)[0], view(streams, count, np.int64)
    if enter(driver, scratch):
        return FAILED
    handle, status = current, captured(driver, current, scratch)
    for index in range(count):
        if status == 0:
            handle = words[index]
            status = captured(driver, handle, scratch)
    tick = d.tick + 1
    d.tick = tick if status == 0 else d.tick
    for index in range(count):  # one by one: of more streams than slots, some may have finished by then
        if status == 0:
            words[index] = slot_for(driver, words[index])
            status = FULL if words[index] == FULL else put(driver, words[index], tick, scratch)
    leave(driver, scratch)
    view(scratch, SCRATCH, np.int64)[STATUS] = handle if status == CAPTURED else status
    return tick if status == 0 else status if status in (CAPTURED, FULL) else FAILED


@entry
def pending(driver: int, slots: int, tick: int, scratch: int) -> int:
    """Which of a fence's streams have not come so far, as bits of their slots; or `FAILED`. Does not wait."""
    if enter(driver, scratch):
        return FAILED
    left = pending_slots(driver, slots, tick, scratch)
    leave(driver, scratch)
    return FAILED if view(scratch, SCRATCH, np.int64)[STATUS] else left


@entry
def order(driver: int, slots: int, tick: int, stream: int, scratch: int) -> int:
    """Makes work that is submitted to a stream from now on wait for a fence; the host goes on. Returns a status."""
    status = enter(driver, scratch)
    if status == 0:
        status = order_slots(driver, slots, tick, stream)
        leave(driver, scratch)
    return status


@entry
def first_event(driver: int, slots: int, tick: int) -> int:
    """An event that a fence waits for, or 0."""
    d = view(driver, 1, DRIVER)[0]
    events = view(d.events_at, (SLOTS, EVENTS), np.int64)
    for slot in range(SLOTS):
        if slots >> slot & 1:
            place = event_for(driver, slot, tick)
            if place >= 0:
                return events[slot, place]
    return 0
