"""Checks that the books add up, from the outside: what mimalloc calls a heap check."""

from __future__ import annotations

from collections import Counter

from .errors import InvariantError
from .rows import NOBODY, Rows


def check_invariants(rows: Rows) -> None:
    """Checks the invariants that `vmmkv.pages`, `vmmkv.arena` and `vmmkv.rows` state.

    Raises:
        InvariantError: one is broken; the message says which.
    """
    pool = rows.pool

    def ensure(holds: bool, what: str) -> None:
        if not holds:
            raise InvariantError(what)

    mapped = Counter(page for arena, _ in rows.ranges for row in arena.rows for page in row.pages)
    exist = {page for page, handle in enumerate(pool.handles) if handle is not None}
    free = set(pool.free_pages)
    ensure(not pool.unsettled, "a page is being made or released")
    zero = set(rows.zero_pages)
    ensure(pool.created <= pool.budget, f"{pool.created} pages exist; the budget is {pool.budget}")
    ensure(all(count == 1 for count in mapped.values()), "a page is mapped twice")
    ensure(len(free) == pool.free, "a page is free twice")
    ensure(not free & mapped.keys(), "a free page is mapped")
    ensure(not zero & (free | mapped.keys()), "the zero page is free, or part of a row")
    ensure(free | mapped.keys() | zero == exist, "a page has leaked, or one that does not exist is mapped")
    mapped_pages = len(mapped) + len(zero)
    ensure(pool.taken == mapped_pages, f"{pool.taken} pages are taken, {mapped_pages} mapped")

    states = Counter(rows.count_states())
    ensure(sum(states.values()) == rows.num_rows, f"rows by state {dict(states)} are not {rows.num_rows} in all")
    owners = Counter(rows.owner[rows.owner != NOBODY].tolist())
    ensure(all(count == 1 for count in owners.values()), "a sequence has two rows")
    empty = set(rows.empty)
    ensure(len(empty) == len(rows.empty), "a row is empty twice")
    for row in range(rows.num_rows):
        start, length, capacity = (int(of[row]) for of in (rows.start, rows.length, rows.capacity))
        live = rows.owner[row] != NOBODY
        listed = (row in rows.parked) + (row in empty) + (row in rows.retired)
        ensure(listed <= 1, f"row {row} is on several lists")
        ensure(not (live and (row in rows.parked or row in empty)), f"live row {row} is up for adoption")
        ensure(live or listed == 1, f"row {row} is lost")
        ensure(live or length == 0, f"row {row} has {length} tokens and no sequence")
        ordered = start <= length <= capacity <= rows.max_seq_len
        ensure(not live or ordered, f"row {row}: {start=} {length=} {capacity=}")
        for arena, record in rows.ranges:
            mapping = arena.rows[row]
            ensure(mapping.first <= mapping.ready <= mapping.end, f"row {row}: first, ready, end out of order")
            tails = mapping.end <= mapping.tail <= mapping.tail_ready <= mapping.limit
            ensure(tails, f"row {row}: end, tail, tail_ready, limit out of order")
            ensure(bool(zero) or mapping.tail == mapping.limit, f"row {row} has a tail")
            ensure(mapping.doubt is None, f"row {row}: nobody knows what is mapped")
            ensure(mapping.limit * arena.page_size <= arena.row_bytes, f"row {row} runs into the next")
            if live and capacity > start:  # its pages are consecutive, so that the others are mapped as well
                ensure(mapping.first * arena.page_size <= start * record, f"row {row}: its first token is not mapped")
                ensure(mapping.ready * arena.page_size >= capacity * record, f"row {row}: {capacity=} is not mapped")
            if row in empty:
                ensure(not mapping.pages and mapping.first == 0, f"empty row {row} has pages")
            if row in rows.parked:
                ensure(mapping.first == 0, f"parked row {row} has a hole in front")
