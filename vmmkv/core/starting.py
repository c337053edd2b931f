"""Sequences: their start on a row, the tokens that they keep, and their end."""

from ..compiled import entry, inner
from ..compiled.native import call, static, view
from ..driver.fencing import let_slots, order_slots, pending_slots
from ..driver.running import captured, enter
from ..driver.running import leave as leave_context
from .access import ask_of, cache_of, driver_of, extent_at, pool_of, range_at, row_at, rows_of, words_at
from .booking import settle
from .codes import CAPTURED, DEAD, DONE, FAILED, GONE, NEEDS, NO_PAGES, NO_ROWS, NO_TOKEN, RING, TAKEN, WAIT
from .journal import begin, close, plan_unmap_all
from .pages import active_row, address_of, fit, mapped_pages, page_of, pages_for, pages_with, row_of
from .reclaim import is_idle
from .rows import available, class_of, grow_to, is_over, queue_row, set_bounds, settle_row, unlink_old, use, use_tokens
from .streams import fence_row, fence_stream, hold_slot, is_captured, order, stream_in
from .tables import CLASSES, NOTE, NUM_CLASSES, RETIRED, ROW_BITS, VACANT_ROWS

FREED, CUT, PASSED = 1, 2, 3
"""Kinds of notes for a guest: a sequence has ended; was cut to a length; has passed on what it had left to another."""
CANDIDATES = 8
"""Parked rows of a size that `choose` looks at."""


@inner
def note(cache: int, kind: int, row: int, tokens: int) -> None:
    """Writes a note about a row's sequence for the guest. A note in a full ring overwrites the oldest."""
    c = cache_of(cache)
    if c.guest:
        n = view(c.ring_at, c.ring_size, NOTE)[c.ring_head % c.ring_size]
        n.kind, n.row, n.heir, n.tokens = kind, row, row_at(cache, row).owner, tokens
        n.owner = row_at(cache, row).last if kind == PASSED else n.heir
        c.ring_head += 1


@inner
def is_near(cache: int, row: int, slot: int, ask: int) -> int:
    """Whether work on a stream comes behind all work on a row's surplus."""
    r, others = row_at(cache, row), ~(1 << slot if slot >= 0 else 0)
    if r.slots & others:
        r.slots = pending_slots(pool_of(cache_of(cache).pool).driver, r.slots, r.tick, ask)
    return 1 if r.slots & others == 0 else 0


@inner
def follow_surplus(cache: int, row: int, slot: int, ask: int) -> int:
    """Makes the stream in a slot, -1 for none, wait for all work on a row's surplus. Returns `DONE`, `CAPTURED` where
    it cannot wait for other streams, or `FAILED`. It needs the context."""
    r, driver = row_at(cache, row), pool_of(cache_of(cache).pool).driver
    if slot < 0 or is_near(cache, row, slot, ask):
        return DONE
    handle = stream_in(driver, slot).handle
    if captured(driver, handle, ask):
        return CAPTURED
    a = ask_of(ask)
    a.status = order_slots(driver, r.slots, r.tick, handle)
    return FAILED if a.status else DONE


@inner
def suits(cache: int, row: int, target: int) -> int:
    """Whether a sequence of so many tokens would waste little on a parked row: large frames count as used whole."""
    for part in range(cache_of(cache).ranges):
        end = pages_for(cache, part, target + cache_of(cache).overread)
        if (fit(cache, row, part, end, 1) - end) * 8 > end:
            return 0
    return 1


@inner
def choose(cache: int, pages: int, target: int, key: int, avoid: int, slot: int, ask: int) -> int:
    """Chooses a parked row of the same key for so many pages, or -1: of the smallest size that is large enough, else of
    the largest; among the first few, one whose work has finished or is on the same stream."""
    c, rows, wanted, best = cache_of(cache), rows_of(cache), class_of(pages), -1
    for turn in range(NUM_CLASSES):
        which = wanted + turn if wanted + turn < NUM_CLASSES else NUM_CLASSES - 1 - turn
        row, looks = rows[c.num_rows + CLASSES + which].prev if c.classes >> which & 1 else c.num_rows, 0
        while row < c.num_rows and looks < CANDIDATES:
            if rows[row].key == key and row != avoid and suits(cache, row, target):
                if is_near(cache, row, slot, ask):
                    return row
                best = row if best < 0 else best
            row = rows[row].prev
            looks += 1
        if best >= 0:
            return best
    return best


@inner
def own(cache: int, row: int, key: int, expected: int, slot: int, handle: int) -> int:
    """Gives a row to a new sequence. Returns its ticket."""
    c, r, owners = cache_of(cache), row_at(cache, row), words_at(static("owners"), 1)
    owners[0] += 1
    r.owner, r.expected = owners[0], expected
    r.key = r.owner if c.key_of_sequence else key
    r.length = r.start = r.broken = r.cut = r.suspended = r.away = r.away_start = 0
    r.stream, r.streams = handle, 1 << slot if slot >= 0 else 0
    c.live += 1
    settle_row(cache, row)
    return r.owner << ROW_BITS | row


@entry
def adopt(cache: int, tokens: int, expected: int, key: int, wanted: int, handle: int, cell: int, ask: int) -> int:
    """Gives a row to a new sequence, and writes its ticket to `cell`. `wanted` is a row; -1 for any; or -2 - row, for
    any other than that row. It maps nothing, and needs no lock. If all of so many tokens lie on ready pages the
    sequence has them, and `ask.asked` is their number; else it has none. `ask.available` says whether the row has
    pages.

    Returns `DONE` or `RING`; `NO_ROWS`; `TAKEN`: the wanted row belongs to a live sequence; `NEEDS`: the pages of a row
    must be unmapped first (see `plan_empty`); `FULL` or `FAILED`: the stream could not be named.
    """
    c, a, slot = cache_of(cache), ask_of(ask), -1
    p = pool_of(c.pool)
    if p.dead or c.closed:
        return DEAD if p.dead else GONE
    if c.live == c.num_rows:
        return NO_ROWS
    if wanted >= 0 and row_at(cache, wanted).owner:
        return TAKEN
    if enter(p.driver, ask):
        return FAILED
    if handle:
        slot = hold_slot(p.driver, handle, 1, ask)
    code = take_row(cache, max(tokens, expected), key, wanted, slot, ask) if slot >= 0 or not handle else slot
    leave_context(p.driver, ask)
    row = a.row
    if code != DONE:
        if slot >= 0:
            let_slots(p.driver, 1 << slot)
        return code
    words_at(cell, 1)[0] = own(cache, row, key, expected, slot, handle)
    grown = grow_to(cache, row, tokens) if tokens else NEEDS
    a.available = mapped_pages(cache, row) > 0
    c.adopted += a.available
    a.asked = tokens if grown != NEEDS else 0
    if grown == RING:
        return RING
    return RING if expected > row_at(cache, row).capacity and c.lookahead and queue_row(cache, row) else DONE


@inner
def take_row(cache: int, target: int, key: int, wanted: int, slot: int, ask: int) -> int:
    """Writes a row for a new sequence to `ask.row`, and makes the stream wait for all work on its pages. Returns
    `DONE`, `NEEDS` or `FAILED`. It needs the context."""
    c, a, row, pages = cache_of(cache), ask_of(ask), wanted, 0
    vacant = row_at(cache, c.num_rows + VACANT_ROWS).next
    if wanted < 0:  # any: a parked row whose pages suit the sequence, else a row without pages
        for part in range(c.ranges):
            pages += pages_with(cache, part, target)
        if not c.key_of_sequence and c.classes and (pages or vacant >= c.num_rows):
            row = choose(cache, pages, target, key, -2 - wanted, slot, ask)
        row = vacant if row < 0 and vacant < c.num_rows else row
    a.row = row
    r = row_at(cache, max(row, 0))
    if row < 0 or r.busy or r.list == RETIRED:
        return NEEDS
    if r.list != VACANT_ROWS and (r.key != key or c.key_of_sequence):
        return NEEDS
    code = follow_surplus(cache, row, slot, ask)
    if code == CAPTURED:
        a.row = vacant
        return DONE if wanted < 0 and vacant < c.num_rows else NEEDS
    return code


@entry
def adopt_kept(
    cache: int, row: int, last: int, tokens: int, length: int, expected: int, handle: int, cell: int, ask: int
) -> int:
    """Gives a parked row to a new sequence that begins with first tokens of the sequence `last`, which had the row, and
    has `length` tokens if these lie on ready pages. Returns `GONE` if pages are gone, or what `adopt` returns."""
    c, a, slot, code = cache_of(cache), ask_of(ask), -1, DONE
    p = pool_of(c.pool)
    if p.dead:
        return DEAD
    if c.closed or not 0 <= row < c.num_rows or not 0 <= tokens <= kept(cache, row, last):
        return GONE
    if enter(p.driver, ask):
        return FAILED
    if handle:
        slot = hold_slot(p.driver, handle, 1, ask)
        code = min(slot, DONE)
    r = row_at(cache, row)
    if code == DONE:
        code = follow_surplus(cache, row, slot, ask)
    leave_context(p.driver, ask)
    a.asked, a.available = p.used, available(cache)
    if code == DONE:
        use_tokens(cache, row, tokens)
        if is_over(cache):
            a.asked = p.used - a.asked
            use_tokens(cache, row, 0)
            code = NO_PAGES
    if code != DONE:
        if slot >= 0:
            let_slots(p.driver, 1 << slot)
        return code
    ticket = own(cache, row, r.key, expected, slot, handle)
    r.length = tokens
    for part in range(c.ranges if c.key_of_sequence else 0):  # what the other sequence has left is filled
        ready = extent_at(cache, row, part).ready * p.page_size // range_at(cache, part).record
        r.cut = min(max(r.cut, ready + 1), c.max_tokens)
    c.tokens += tokens
    c.reused += 1
    settle_row(cache, row)
    note(cache, PASSED, row, tokens)
    words_at(cell, 1)[0] = ticket
    grow_to(cache, row, max(length, tokens))
    return RING if max(expected, r.length) > r.ahead_at and c.lookahead and queue_row(cache, row) else DONE


@entry
def kept(cache: int, row: int, last: int) -> int:
    """The number of first tokens of an ended sequence that are mapped on its row; -1 if another one has had the row."""
    c, r = cache_of(cache), row_at(cache, row)
    if r.owner or r.busy or r.last != last or r.broken:
        return -1
    tokens, size = c.max_tokens, pool_of(c.pool).page_size
    for part in range(c.ranges):
        e = extent_at(cache, row, part)
        tokens = min(tokens, e.ready * size // range_at(cache, part).record - c.overread if e.first == 0 else 0)
    return max(min(tokens, r.left), 0)


@entry
def plan_empty(cache: int, wanted: int, ask: int) -> int:
    """Plans to unmap all of a row without a sequence: the wanted one, else the oldest retired one, else the oldest
    parked one. `wanted` is as in `adopt`. Returns a serial, `DONE` if a row has no pages, `NO_ROWS`, `TAKEN` or
    `WAIT`."""
    c, rows, row, avoid = cache_of(cache), rows_of(cache), wanted, -2 - wanted
    settle(c.pool, ask)
    ask_of(ask).slots = 0
    if wanted < 0:
        row = rows[c.num_rows + RETIRED].next
        row = rows[row].next if row == avoid else row
    if row >= c.num_rows:
        row = rows[c.num_rows].younger
        row = rows[row].younger if row == avoid else row
    if row >= c.num_rows:
        row = rows[c.num_rows + VACANT_ROWS].next  # another thread may have emptied one meanwhile
        row = rows[row].next if row == avoid else row
        return DONE if row < c.num_rows else NO_ROWS
    if rows[row].owner:
        return TAKEN
    if not is_idle(cache, row, ask):
        return WAIT
    begin(c.pool)
    for part in range(c.ranges):
        plan_unmap_all(cache, row, part)
    return close(c.pool)


# ---------------------------------------------------------------------- ending


@inner
def is_poisoned(cache: int) -> int:
    """Whether memory without tokens is filled with NaN."""
    return 1 if pool_of(cache_of(cache).pool).poison and not cache_of(cache).overread else 0


@inner
def poison(cache: int, row: int, first: int, end: int, ask: int) -> None:
    """Fills tokens of a row with NaN, for debugging, so that a kernel which reads where tokens are gone is found. The
    row's fence covers all work on them, and then the fill. Fills nothing while a graph is captured, or where a call
    fails.

    A pool with poison fills frames that a row takes (see `must_fill`), tokens that are truncated or released, and those
    of a sequence that ends, and leaves pages alone that other rows or guests may have. A cache with `overread` is not
    poisoned: kernels read behind its lengths, and find finite numbers there. The tokens of ended sequences stay where a
    guest may find them.
    """
    p, r, status = pool_of(cache_of(cache).pool), row_at(cache, row), 0
    if first >= end or not is_poisoned(cache) or r.broken or r.suspended or is_captured(cache, row, ask):
        return
    if order(p.driver, 0, 0, r.slots, r.tick, r.stream, ask) != DONE or enter(p.driver, ask):
        return
    for part in range(cache_of(cache).ranges):
        e, record = extent_at(cache, row, part), range_at(cache, part).record
        begin, behind = max(first * record, max(e.shared, e.readonly, e.first) * p.page_size), end * record
        if begin < behind and status == 0:
            place = address_of(cache, row, part, 0) + begin
            status = call(driver_of(p.driver).fill, (place, p.poison, behind - begin, r.stream))
    leave_context(p.driver, ask)
    fence_stream(cache, row, r.stream, ask)


@inner
def disown(cache: int, row: int) -> None:
    """Ends a row's sequence, and parks the row. A journal that has the row finds the owner changed."""
    c, r = cache_of(cache), row_at(cache, row)
    p = pool_of(c.pool)
    note(cache, FREED, row, r.length)
    for part in range(c.ranges):
        e = extent_at(cache, row, part)
        c.page_uses += e.use_end - e.use_first
        use(cache, row, part, 0, 0)
    c.tokens -= max(r.length - r.start, 0)
    c.live -= 1
    let_slots(p.driver, r.streams)
    r.last, r.left = r.owner, r.length if r.start == 0 and (c.guest or not is_poisoned(cache)) else 0
    r.owner = r.length = r.start = r.streams = r.stream = r.expected = r.suspended = r.away = r.away_start = 0
    p.clock += 1
    unlink_old(cache, row)
    r.stamp = p.clock
    settle_row(cache, row)


@entry
def free(cache: int, tickets_at: int, count: int, handle: int, ask: int) -> int:
    """Ends sequences. Their fence covers all work so far on their streams and on the current one. Stale tickets are
    ignored. Returns `DONE`; or `CAPTURED`, `FULL` or `FAILED`, and no sequence has ended. It needs no lock."""
    a, tickets, slots, found = ask_of(ask), words_at(tickets_at, count), 0, 0
    p = pool_of(cache_of(cache).pool)
    if p.dead:
        return DEAD
    for index in range(count):
        row = row_of(cache, tickets[index])
        if row >= 0:
            slots |= row_at(cache, row).streams
            found += 1
    if found == 0:
        return DONE
    code = order(p.driver, slots, handle, 0, 0, 0, ask)
    if code != DONE:
        return code
    own_slot, tick = 1 << hold_slot(p.driver, handle, 0, ask) if handle else 0, a.tick
    for index in range(count):
        row = row_of(cache, tickets[index])
        if row >= 0:
            r = row_at(cache, row)
            if slots | own_slot:
                r.slots |= r.streams | own_slot
                r.tick = tick
            poison(cache, row, r.start, 0 if cache_of(cache).guest else r.length, ask)
            disown(cache, row)
    return DONE


@entry
def keep(cache: int, ticket: int, start: int, length: int, ask: int) -> int:
    """Drops all tokens of a sequence but `[start, length)`; -1 leaves a bound as it is. Pages without tokens stay
    mapped until they are reclaimed. Returns `DONE`, `GONE`, `SUSPENDED`, `NO_TOKEN`, `CAPTURED` or `FAILED`."""
    c, row, gives_up = cache_of(cache), active_row(cache, ticket), False
    if pool_of(c.pool).dead:
        return DEAD
    if row < 0:
        return row
    r = row_at(cache, row)
    start, length = r.start if start < 0 else start, r.length if length < 0 else length
    if not r.start <= start <= length <= r.length:
        return NO_TOKEN
    for part in range(c.ranges):
        e = extent_at(cache, row, part)
        gives_up |= (page_of(cache, part, start) > e.use_first) | (pages_with(cache, part, length) < e.use_end)
    if gives_up or is_poisoned(cache):
        code = fence_row(cache, row, ask)
        if code == DONE:
            poison(cache, row, length, r.length, ask)
            poison(cache, row, r.start, start, ask)
        elif gives_up:
            return code
    if length < r.length or r.start == 0 < start:
        note(cache, CUT, row, 0 if start else length)
    if length < r.length:
        r.cut = max(r.cut, r.length) if c.key_of_sequence else 0
    set_bounds(cache, row, start, length)
    return DONE
