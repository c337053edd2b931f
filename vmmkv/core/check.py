"""Checks of the invariants of `vmmkv.core.tables`, for tests and for debugging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..driver.table import VACANT
from ..errors import InvariantError
from .cache import Cache
from .pool import LARGE, Pool
from .tables import CLASSES, LISTS, LIVE, RETIRED, SPARE, VACANT_ROWS


def check(pool: Pool, caches: Sequence[Cache], held: Counter[int] | None = None) -> None:
    """Raises `InvariantError` where the books of a pool and its caches are wrong. `held` counts the references of
    guests, by frame."""
    with pool.lock:
        state = pool.state[0]
        expect(state["pending"] == 0, "a journal is pending")
        found = SimpleNamespace(refs=Counter(), users=Counter(), place=Counter())  # of each frame, from the tables
        used = 0
        for cache in caches:
            used += check_rows(pool, cache, found)
        check_frames(pool, found, held or Counter())
        staged = int(state["staged"])
        used += (int(pool.frames[staged - 1]["pages"]) if staged else 0) + int(pool.accounts["leased"].sum())
        expect(used == state["used"], f"used is {state['used']}, and by the rows {used}")
        open_accounts = pool.accounts[pool.accounts["open"] == 1]
        expect(open_accounts["used"].sum() == state["used"], "accounts do not add up")
        committed = np.maximum(open_accounts["used"], open_accounts["reserved"]).sum()
        expect(committed == state["committed"], "committed is wrong")
        for cache in caches:
            check_lists(cache)


def expect(holds: Any, words: str) -> None:
    if not holds:
        raise InvariantError(words)


def check_frames(pool: Pool, found: SimpleNamespace, held: Counter[int]) -> None:
    """Checks frames, and the stacks of free ones."""
    state, frames = pool.state[0], pool.frames
    staged = {int(state["staged"]) - 1} if state["staged"] else set()
    small, larges, gone = (pool.stacks[name][: state[name]].tolist() for name in ("small", "larges", "unmade"))
    free = small + larges
    expect(len(set(free + gone)) == len(free + gone), "a frame is on two stacks, or twice on one")
    created = 0
    for number in range(int(state["fresh"])):
        frame = frames[number]
        where = f"frame {number}"
        expect(frame["moving"] == 0 and frame["leaving"] == 0, f"{where} is in a journal")
        if number in gone:
            expect(frame["handle"] == VACANT and not found.refs[number], f"{where} does not exist, and is used")
            continue
        created += int(frame["pages"])
        expect(frame["refs"] == found.refs[number], f"{where} has refs {frame['refs']}, not {found.refs[number]}")
        expect(frame["held"] == held[number] + (number in staged), f"{where} is held {frame['held']} times")
        expect(frame["users"] == found.users[number], f"{where} has users {frame['users']}")
        expect(frame["place"] == found.place.get(number, 0), f"{where} is not where it is said to be")
        expect((number in free) == (frame["refs"] == 0 and frame["held"] == 0), f"{where} is free, or is not")
        expect(frame["pages"] in (1, LARGE), f"{where} has {frame['pages']} pages")
    expect(created == state["created"], f"created is {state['created']}, and by the frames {created}")
    expect(created + state["leased"] <= state["budget"] or state["used"] <= state["budget"], "more than the budget")


def check_rows(pool: Pool, cache: Cache, found: SimpleNamespace) -> int:
    """Checks the rows of a cache. Returns the pages that they use; a frame of several users counts with the first."""
    used, tokens, live = 0, 0, 0
    size = pool.driver.page_size
    for row in range(cache.max_sequences):
        r, gain = cache.rows[row], 0
        tokens += int(r["length"] - r["start"])
        live += bool(r["owner"])
        expect(not r["busy"], f"row {row} is busy")
        if r["suspended"]:
            expect(r["owner"] and not r["length"] and r["capacity"] < 0, f"row {row} is suspended, and can be used")
        for index, part in enumerate(cache.ranges):
            e = cache.extents[row * len(cache.ranges) + index]
            where = f"row {row} of range {index}: {dict(zip(e.dtype.names, e.tolist()))}, length {r['length']}"
            expect(e["first"] <= e["ready"] <= e["mapped"] or e["first"] == e["mapped"] == 0, f"{where}: extents")
            expect(e["shared"] <= e["mapped"] and e["readonly"] <= e["mapped"], f"{where}: shared")
            expect(e["use_end"] <= e["mapped"] or e["use_first"] == e["use_end"], f"{where}: uses what is not mapped")
            length, record = int(r["length"]), int(part["record"])
            needed = -(-(length + int(cache.state[0]["overread"])) * record // size) if length else 0
            is_used = r["owner"] and not r["suspended"]
            expect(e["use_end"] >= needed if is_used else e["use_end"] == 0, f"{where}: tokens on no used page")
            page = int(e["first"])
            while page < e["mapped"]:
                number = int(cache.tables[index][row, page]) - 1
                expect(number >= 0, f"{where}: page {page} is not mapped")
                frame = pool.frames[number]
                found.refs[number] += 1
                found.place[number] = found.place.get(number, 0) ^ row
                expect((frame["pages"] > 1) == (page < e["head_end"]), f"{where}: page {page} and the large frames")
                alone = frame["refs"] == 1 and frame["held"] == 0
                expect(alone or page < e["shared"], f"{where}: page {page} is shared")
                gain += int(frame["pages"]) if alone else 0
                if r["owner"] and e["use_first"] <= page < e["use_end"]:
                    if page < e["shared"]:
                        used += 0 if found.users[number] else int(frame["pages"])
                        found.users[number] += 1
                    else:
                        used += int(frame["pages"])
                page += int(frame["pages"])
        expect(gain == r["gain"], f"row {row} has gain {r['gain']}, not {gain}")
    expect(tokens == cache.state[0]["tokens"], f"{cache.state[0]['tokens']} tokens are counted, and there are {tokens}")
    expect(live == cache.state[0]["live"], "sequences are counted wrong")
    return used


def check_lists(cache: Cache) -> None:
    """Checks that each row is on the list where it belongs."""
    rows, count, seen = cache.rows, cache.max_sequences, 0
    for which in range(LISTS):
        head = count + which
        row, before = int(rows[head]["next"]), head
        while row != head:
            r = rows[row]
            expect(r["list"] == which and r["prev"] == before, f"row {row} is linked wrong")
            kind = (LIVE, SPARE) if r["owner"] else (VACANT_ROWS, RETIRED, *range(CLASSES, LISTS))
            expect(which in kind, f"row {row} is on list {which}")
            row, before, seen = int(r["next"]), row, seen + 1
        occupied = int(cache.state[0]["classes"]) >> max(which - CLASSES, 0) & 1
        expect(which < CLASSES or occupied == (before != head), f"the bit of class {which} is wrong")
    expect(seen == count, f"{seen} of {count} rows are on lists")
    old = set()
    row = int(rows[count]["younger"])
    while row != count:
        old.add(row)
        row = int(rows[row]["younger"])
    wanted = {row for row in range(count) if not rows[row]["owner"] and rows[row]["gain"] > 0}
    expect(old == wanted, f"rows that can be reclaimed are {wanted}, not {old}")
