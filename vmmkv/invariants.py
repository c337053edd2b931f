"""Checks that the books add up, from the outside: what mimalloc calls a heap check."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable

import numpy as np

from .errors import InvariantError
from .memory.pool import FramePool
from .rows.rows import Rows
from .space.arena import Arena


def ensure(holds: bool, what: str) -> None:
    """Raises `InvariantError` where something does not hold."""
    if not holds:
        raise InvariantError(what)


def watch(pool: FramePool) -> None:
    """Has all that lies on a pool checked after each operation, from now on."""
    reference = weakref.ref(pool)

    def check() -> None:
        pool = reference()
        if pool is not None:
            check_pool(pool)
            for account in pool.accounts:
                holder = account.holder()
                if isinstance(holder, Rows):
                    check_rows(holder)

    pool.monitor.check = check


def check_pool(pool: FramePool) -> None:
    """Checks the invariants that `vmmkv.memory` and `vmmkv.space` state, for all that lies on a pool.

    Raises:
        InvariantError: one is broken; the message says which.
    """
    pool.collect()
    frames = pool.frames
    zeros = {frame for table in pool.tables for frame in table.zero_frames}
    mapped = Counter(page for table in pool.tables for page in table.mapped_pages())
    exist = set(np.flatnonzero(frames.handles >= 0).tolist())
    free = set(frames.in_pages([*frames.free, *frames.free_large]))
    room, leased = pool.accounts.room, pool.accounts.leased
    ensure(room >= 0, f"{frames.existing} pages exist and {leased} are leased; the limit is {pool.limit_pages}")

    def ensure_none(pages: Iterable[int], what: str) -> None:
        found = [*pages]
        ensure(not found, "\n  ".join([f"{what}: {found[:10]}", *pool.taken_by(found)]))

    for page, count in mapped.items():
        known = int(frames.shares[frames.frame_of(page)]) + 1
        ensure_none([page] * (count != known), f"a page is mapped {count} times, {known} known")
    shared = [page for page in free if frames.shares[page] or frames.users[page]]
    ensure_none(shared, "a free page is shared")
    ensure(len(free) == frames.free_pages, "a page is free twice")
    ensure(not free & zeros, "the zero page is free")
    ensure_none(free & mapped.keys(), "a free page is mapped")
    ensure_none((free | mapped.keys()) ^ exist, "a page has leaked, or one that does not exist is mapped")
    ensure(frames.taken == len(mapped), f"{frames.taken} pages are taken, {len(mapped)} mapped")
    for table in pool.tables:
        ensure(not table.doubt, "nobody knows what is mapped")
    over = pool.accounts.overdraft(pool.limit_pages)
    ensure(over <= 0, f"{pool.limit_pages + over} pages are firm or guaranteed; the limit is {pool.limit_pages}")
    for account in pool.accounts:
        taken, limit = account.taken, pool.accounts.limit_of(account)
        ensure(taken <= limit, f"an account of {limit} pages has {taken}")
        holder = account.holder()
        if account.is_lease and holder is not None:
            ensure(holder.kept_pages <= taken, f"of {taken} leased pages {holder.kept_pages} were made")


def check_rows(rows: Rows) -> None:
    """Checks the invariants that `vmmkv.rows` states, for one cache.

    Raises:
        InvariantError: one is broken; the message says which.
    """
    table = rows.table
    mapped = len(rows.frames_taken())
    rows.keeping.keeper.check()
    ensure(rows.account.taken == mapped, f"the account has {rows.account.taken} pages, {mapped} are mapped")
    live = table.live_rows().tolist()
    used = {(index, page) for row in live for index, (_, pages) in enumerate(rows.pages(row)) for page in pages}
    ensure(rows.books.used_pages == len(used), f"{rows.books.used_pages} pages are said to be used, {len(used)} are")
    states = table.counts()
    ensure(sum(states.values()) == table.num_rows, f"rows by state {states} are not {table.num_rows} in all")
    owners = Counter(table.owners[table.live_rows()].tolist())
    ensure(all(count == 1 for count in owners.values()), "a sequence has two rows")
    check_counts(rows)
    check_lists(rows)
    staging = rows.sharing.staging
    staged = {*staging.table.mapped_pages()} if staging else set()  # what a failure has left there nobody reads
    placed = Counter[Arena]()
    for row in range(table.num_rows):
        check_state(rows, row)
        for arena, record in rows.ranges:
            placed[arena] += check_pages(rows, row, arena, record, staged)
    for arena, _ in rows.ranges:
        ensure(len(arena.table.places) == placed[arena], "a frame is said to lie in a row that it has left")


def check_state(rows: Rows, row: int) -> None:
    """Checks that a row is in one state, and what its tokens are."""
    table = rows.table
    start, length, capacity, live = table.start[row], table.length[row], table.capacity[row], table.is_live(row)
    ensure(live == (row in table.live), f"row {row} is live, and is not")
    listed = (row in table.parked) + (row in table.empty) + (row in table.retired) + (row in table.kept)
    ensure(listed <= 1, f"row {row} is on several lists")
    ensure(not (live and listed), f"live row {row} is up for adoption")
    ensure(live or row not in table.fronts, f"row {row} has a front, and no sequence")
    ensure(live or listed == 1, f"row {row} is lost")
    ensure(live or length == 0, f"row {row} has {length} tokens and no sequence")
    ordered = start <= length <= capacity <= rows.max_seq_len
    ensure(not live or ordered or row in table.suspended, f"row {row}: {start=} {length=} {capacity=}")
    ensure(row not in table.suspended or (live and not length), f"row {row} is suspended, and has {length} tokens")


def check_pages(rows: Rows, row: int, arena: Arena, record: int, staged: set[int]) -> int:
    """Checks what is mapped on a row in one arena; returns how many frames that are."""
    table, pages = rows.table, arena.table
    first, ready, end, zeros = (of[row] for of in (pages.first, pages.ready, pages.end, pages.zeros))
    ensure(first <= ready <= end, f"row {row}: first, ready, end out of order")
    ensure(pages.own[row] <= end, f"row {row} shares pages that it has not")
    frames = pages.frames_in(row, first, end)
    ensure(all(row in pages.places.rows(frame) for frame in frames), f"row {row}: a frame cannot be found")
    alone = {*pages.frames_in(row, max(pages.own[row], first), end)} - staged
    ensure(not rows.pool.frames.shares[[*alone]].any(), f"row {row} may write to a page that others have, too")
    ordered = end <= zeros <= pages.zeros_ready[row] <= pages.limit
    ensure(ordered, f"row {row}: end, zeros, zeros_ready, limit out of order")
    ensure(bool(rows.books.zero_frames) or zeros == pages.limit, f"row {row} has zeros behind it")
    start, capacity = table.start[row], table.capacity[row]
    if table.is_live(row) and capacity > start:  # its pages are consecutive, so that the others are mapped as well
        ensure(first * arena.page_size <= start * record, f"row {row}: its first token is not mapped")
        ensure(ready * arena.page_size >= capacity * record, f"row {row}: {capacity=} is not mapped")
    if row in table.empty:
        ensure(not pages.pages(row) and first == 0, f"empty row {row} has pages")
    if row in table.parked or row in table.kept:
        ensure(first == 0, f"parked row {row} has a hole in front")
    return len(frames)


def check_counts(rows: Rows) -> None:
    """Checks what is counted, so that nobody has to look at all rows, against a look at all rows.

    Raises:
        InvariantError: something differs; the message says what.
    """
    table, books, tables = rows.table, rows.books, rows.books.tables
    live = table.live_rows()
    used, bound, parked = books.used_pages + books.duplicates, books.bound_pages(), books.parked_pages
    counted = books.pages_used(live, table.extents[live])
    ensure(used == counted, f"{used} pages are said to be used, row by row, {counted} are")
    room = np.stack([table.starts[live], np.maximum(table.lengths[live], table.brinks[live])], axis=1)
    ensure(used == books.pages_used(live, room), "a row's brink is in a page that it does not use")
    ensure(table.tokens == sum(table.length[row] - table.start[row] for row in live.tolist()), "tokens without a row")
    bound_pages, used_pages = set[int](), set[int]()
    firm = mapped = len(books.zero_frames)
    firm += books.used_pages
    for row in live.tolist():
        mapped += sum(each.pages(row) for each in tables)
        for each, (first, end) in zip(tables, books.used(row)):
            behind = max(end, each.first[row])
            used_pages.update(each.pages_in(row, first, end).tolist())
            if _is_bound(rows, row):
                bound_pages.update(each.pages_in(row, behind).tolist())
            elif row not in table.suspended:  # which does not grow
                grown = each.frame_begin(row, behind) if first == end and behind < each.end[row] else behind
                firm += max(each.end[row] - max(grown, each.first[row], each.own[row]), 0)
    behind_all = len(bound_pages - used_pages)
    ensure(bound == behind_all, f"{bound} pages are said to be bound, {behind_all} are")
    firm += behind_all
    ensure(books.firm_pages == firm, f"{books.firm_pages} pages are said to be firm, {firm} are")
    ensure(parked == rows.account.taken - mapped, f"{parked} pages are said to be parked, {mapped} are not")


def check_lists(rows: Rows) -> None:
    """The same for lists of rows.

    Raises:
        InvariantError: a row is missing on one, or is there and should not be.
    """
    table, books, tables, rules = rows.table, rows.books, rows.books.tables, rows.rules
    for row in table.live_rows().tolist():
        length, kept = table.length[row], books.spans(table.start[row], max(table.length[row], table.expected[row]))
        ends = [max(end, each.first[row]) for each, (_, end) in zip(tables, books.used(row))]
        behind = sum(max(each.end[row] - end, 0) for each, end in zip(tables, ends))
        spare = sum(max(each.end[row] - max(end, kept_end), 0) for each, end, (_, kept_end) in zip(tables, ends, kept))
        is_spare = behind > 0 and not _is_bound(rows, row)
        ensure((row in table.spare) == is_spare, f"row {row} has {behind} pages behind it")
        ensure(row not in table.spare or table.spare.size(row) == spare, f"row {row} has {spare} spare pages")
        is_needy = length > table.wake[row] or table.expected[row] > table.capacity[row]
        ensure(not (rules.lookahead and is_needy) or row in table.needy, f"row {row} is needy, and nobody knows")
        ensure(row in table.fenced or not table.fences[row].is_pending, f"row {row} has a fence, and nobody knows")
        brink = table.brink[row]
        ensure(length <= brink or row in table.stirred, f"row {row} has passed {brink=}, and nobody knows")
        ensure(table.alert[row] <= min(brink, table.wake[row]), f"row {row}: its alert comes late")
    ensure(all(table.is_live(row) for row in table.spare), "pages behind a row that nobody has")
    for row in table.parked:
        ensure(table.parked.size(row) == table.capacity[row], f"parked row {row} has another capacity")


def _is_bound(rows: Rows, row: int) -> bool:
    """Whether pages behind a live row are read as its tail, so that nobody else can have them."""
    return rows.rules.zero_tail and rows.table.length[row] > 0
