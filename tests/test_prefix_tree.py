"""The prefix tree, against a model without a tree: a dictionary of all prefixes with which a page became whole.

The model counts byte by byte which pages tokens lie in, and looks for who goes next among all that it knows. So what
the tree does depends on tokens and pages alone, not on where its nodes happen to be cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from vmmkv import errors
from vmmkv.events import EventLog, Removed, Stored, Updated
from vmmkv.reuse import lookup
from vmmkv.reuse.node import Node
from vmmkv.reuse.retention import DEFAULT_PRIORITY, Retention, RetentionConfig
from vmmkv.reuse.telling import Key
from vmmkv.reuse.tree import Insertion, Match, PrefixTree

Rows = tuple[int, tuple[int, ...]]
"""Bytes of a page, and by arena of a token."""
Place = tuple[int, int]
"""Arena, page."""
Ids = tuple[int, ...]

ONE: list[Rows] = [(4, (4,)), (4, (1,)), (4, (3,)), (3, (5,)), (5, (3,))]
SEVERAL: list[Rows] = [(4, (4, 1)), (4, (2, 3)), (6, (4, 1, 9))]
"""Pages of one token, of four, tokens that straddle pages, tokens of several pages."""
LONGEST = 24
KEYS = [Key("a", None, None, 0), Key("b", None, None, 0)]


# ------------------------------------------------------------------ the model


@cache
def touched(rows: Rows, tokens: int) -> frozenset[Place]:
    """Pages that the first tokens have a byte in."""
    page_size, records = rows
    return frozenset(
        (arena, byte // page_size) for arena, record in enumerate(records) for byte in range(tokens * record)
    )


@cache
def whole(rows: Rows, tokens: int) -> frozenset[Place]:
    """Pages that they fill."""
    page_size, records = rows
    return frozenset(
        (arena, page) for arena, page in touched(rows, tokens) if (page + 1) * page_size <= tokens * records[arena]
    )


@cache
def readable(rows: Rows, tokens: int) -> int:
    """Tokens that lie in these, every byte of them."""
    return max(n for n in range(tokens + 1) if touched(rows, n) <= whole(rows, tokens))


@cache
def whole_after(rows: Rows, tokens: int) -> int:
    """With how many tokens the pages are whole that these are in."""
    return next(n for n in count() if touched(rows, tokens) <= whole(rows, n))


def common(a: Ids, b: Ids) -> int:
    """How long two prefixes are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclass
class Entry:
    """The pages that became whole with the last token of a prefix."""

    pages: dict[Place, int]
    used: int = 0
    priority: int = DEFAULT_PRIORITY
    expires: float = inf
    locks: int = 0

    def order(self, now: float) -> tuple[int, int]:
        return (self.priority if now < self.expires else DEFAULT_PRIORITY), self.used


@dataclass
class Model:
    rows: Rows
    entries: dict[tuple[Key, Ids], Entry] = field(default_factory=dict)
    uses: Iterator[int] = field(default_factory=count)

    def paths(self, key: Key) -> list[Ids]:
        return [ids for of, ids in self.entries if of == key]

    def along(self, key: Key, ids: Ids) -> list[tuple[int, Entry]]:
        """What stands on a path, by tokens."""
        prefixes = ((n, self.entries.get((key, ids[:n]))) for n in range(1, len(ids) + 1))
        return [(n, entry) for n, entry in prefixes if entry]

    def known(self, key: Key, ids: Ids) -> int:
        """The longest common prefix with any path."""
        return max((common(ids, path) for path in self.paths(key)), default=0)

    def pages_at(self, key: Key) -> dict[Place, list[tuple[Ids, int]]]:
        """By place in a row the paths that have a page there, and its number."""
        found: dict[Place, list[tuple[Ids, int]]] = {}
        for (of, path), entry in self.entries.items():
            for place, number in entry.pages.items() if of == key else ():
                found.setdefault(place, []).append((path, number))
        return found

    def holders(self, pages: dict[Place, list[tuple[Ids, int]]], ids: Ids, place: Place) -> set[int]:
        """Numbers of the pages at a place of rows that begin with these ids, as far as the place lies behind them."""
        arena, page = place
        needed = ids[: -(-(page + 1) * self.rows[0] // self.rows[1][arena])]
        return {number for path, number in pages.get(place, ()) if path[: len(needed)] == needed}

    def longest(self, key: Key, ids: Ids) -> int:
        """How many tokens all pages are there for."""
        pages = self.pages_at(key)
        return next(
            n
            for n in range(self.known(key, ids), -1, -1)
            if all(self.holders(pages, ids[:n], place) for place in touched(self.rows, n))
        )

    def tokens(self) -> int:
        """How many different prefixes there are."""
        ordered = sorted(self.entries)
        again = (common(ids, before) for (of, before), (key, ids) in pairwise(ordered) if of == key)
        return sum(len(ids) for _, ids in ordered) - sum(again)

    def insert(
        self, key: Key, ids: Ids, matched: int, given: dict[Place, int], ranges: list[Retention], now: float, held: int
    ) -> tuple[int, list[tuple[int, ...]]]:
        """`matched` is how many of the tokens could be had before, `held` how many are in the tree by a lock."""
        end = whole_after(self.rows, readable(self.rows, len(ids)))
        known = max(self.known(key, ids[:end]), held)
        duplicates = [
            (*place, given[place], number)
            for n, entry in self.along(key, ids[:known])
            for place, number in entry.pages.items()
            if n > held and number != given[place]
        ]
        if readable(self.rows, len(ids)) > matched:
            for n in range(known + 1, end + 1):
                if new := whole(self.rows, n) - whole(self.rows, n - 1):
                    self.entries[key, ids[:n]] = Entry({place: given[place] for place in new})
            known = end
        path, use = self.along(key, ids[:known]), next(self.uses)
        for n, entry in path:
            entry.used = use
            for each in ranges:
                if whole_after(self.rows, each.start) < n <= whole_after(self.rows, each.end or LONGEST):
                    entry.priority = each.priority
                    entry.expires = inf if each.seconds is None else now + each.seconds
        return (path[-1][0] if path else 0), sorted(duplicates)

    def evict(self, pages: int, now: float) -> list[tuple[int, int, int]]:
        gone: list[tuple[int, int, int]] = []
        while len(gone) < pages:
            behind = {(key, ids[:n]) for key, ids in self.entries for n in range(len(ids))}
            last = [prefix for prefix, entry in self.entries.items() if not entry.locks and prefix not in behind]
            if not last:
                break
            gone += self.drop(min(last, key=lambda prefix: self.entries[prefix].order(now)))
        return gone

    def drop(self, prefix: tuple[Key, Ids]) -> list[tuple[int, int, int]]:
        return [(*place, number) for place, number in self.entries.pop(prefix).pages.items()]


def array(ids: Ids) -> np.ndarray:
    return np.array(ids, np.int64)


# ------------------------------------------------------------------ any operations in any order


RANDOM = st.randoms(use_true_random=True)
"""What a rule draws from: a hundred draws of hypothesis would take longer than what is tested."""


class TreeMachine(RuleBasedStateMachine):
    geometries: list[Rows]

    @initialize(rng=RANDOM)
    def make(self, rng: Random) -> None:
        self.rows = rng.choice(self.geometries)
        self.time = 0.0
        self.log = EventLog(rng.randint(1, 6))
        self.told: dict[tuple[str, Ids], int] = {}
        self.names: dict[int | None, tuple[str, Ids]] = {}
        self.tree = PrefixTree(*self.rows, clock=lambda: self.time, log=self.log)
        self.model = Model(self.rows)
        self.fresh = count()
        self.seen: list[Ids] = [()]
        self.locked: list[tuple[Any, Key, Ids]] = []

    def draw_ids(self, rng: Random) -> Ids:
        """Mostly what begins like something that was there before."""
        before = rng.choice(self.seen[-20:])
        kept = rng.choice([len(before), rng.randint(0, len(before))])
        ids = before[:kept] + tuple(rng.choices(range(3), k=rng.randint(0, LONGEST - kept)))
        self.seen.append(ids)
        return ids

    def draw_ranges(self, rng: Random) -> list[Retention]:
        bounds = sorted(rng.sample(range(LONGEST), rng.randint(0, 6)))
        return [
            Retention(start, end, rng.choice([0, 35, 80]), rng.choice([None, 0, 3]))
            for start, end in zip(bounds[::2], [*bounds[1::2], None])
        ]

    @rule(rng=RANDOM)
    def insert(self, rng: Random) -> None:
        key, ids, held = rng.choice(KEYS), self.draw_ids(rng), None
        if self.locked and rng.random() < 0.5:
            held, key, ids = which = rng.choice(self.locked)
            ids += self.draw_ids(rng)[: LONGEST - len(ids)]
            self.seen.append(ids)
        begin = held.end if held else 0
        ranges = self.draw_ranges(rng) if rng.random() < 0.5 else []
        given = {place: next(self.fresh) for place in sorted(whole(self.rows, len(ids)))}
        shares = rng.random() < 0.7
        if shares:
            for _, entry in self.model.along(key, ids):
                given |= entry.pages
        pages: list[list[int]] = [[] for _ in self.rows[1]]
        for arena, page in sorted(given.keys() - whole(self.rows, begin)):
            pages[arena].append(given[arena, page])
        matched = self.tree.match(key, array(ids))
        self.check_match(matched, key, ids)
        found = self.tree.insert(key, array(ids), pages, ranges, held)
        tokens, duplicates = self.model.insert(key, ids, matched.tokens, given, ranges, self.time, begin)
        assert (found.tokens, sorted(found.duplicates)) == (tokens, duplicates)
        assert not (shares and duplicates)
        if held and found.node is held:  # its lock is of what was added, too
            self.locked[self.locked.index(which)] = held, key, ids[:tokens]
            for n, entry in self.model.along(key, ids[:tokens]):
                entry.locks += n > begin
        if rng.random() < 0.3:
            self.lock(found, key, ids)

    @rule(rng=RANDOM)
    def match(self, rng: Random) -> None:
        key, ids = rng.choice(KEYS), self.draw_ids(rng)
        found = self.tree.match(key, array(ids))
        self.check_match(found, key, ids)
        if rng.random() < 0.7:
            self.lock(found, key, ids)

    def check_match(self, found: Match, key: Key, ids: Ids) -> None:
        longest = self.model.longest(key, ids)
        if len(self.rows[1]) == 1:
            assert found.tokens == longest
        else:
            assert readable(self.rows, self.model.known(key, ids)) <= found.tokens <= longest
        numbers = {(arena, page): number for arena, of in enumerate(found.pages) for page, number in enumerate(of)}
        assert numbers.keys() == whole(self.rows, found.tokens)
        numbers |= {
            (arena, len(found.pages[arena])): number for arena, number in enumerate(found.partial) if number is not None
        }
        assert numbers.keys() == touched(self.rows, found.tokens)
        pages = self.model.pages_at(key)
        for place, number in numbers.items():
            assert number in self.model.holders(pages, ids[: found.tokens], place)

    def lock(self, found: Match | Insertion, key: Key, ids: Ids) -> None:
        ids = ids[: found.tokens]
        self.locked.append((self.tree.lock(found.node, found.tokens), key, ids))
        for _, entry in self.model.along(key, ids):
            entry.locks += 1

    @precondition(lambda self: self.locked)
    @rule(rng=RANDOM)
    def unlock(self, rng: Random) -> None:
        node, key, ids = self.locked.pop(rng.randrange(len(self.locked)))
        self.tree.unlock(node)
        use = next(self.model.uses)
        for _, entry in self.model.along(key, ids):
            entry.locks -= 1
            entry.used = use

    @precondition(lambda self: self.locked)
    @rule(rng=RANDOM)
    def renumber_locked(self, rng: Random) -> None:
        node, key, ids = rng.choice(self.locked)
        places = [(entry.pages, place) for _, entry in self.model.along(key, ids) for place in entry.pages]
        if places:
            pages, place = rng.choice(places)
            number = next(self.fresh)
            assert self.tree.renumber(list(node.path())[::-1], *place, [pages[place]], [number])
            pages[place] = number

    @rule(pages=st.sampled_from([1, 1, 2, 3, 5, 20]))
    def evict(self, pages: int) -> None:
        evictable = sum(len(entry.pages) for entry in self.model.entries.values() if not entry.locks)
        gone = self.tree.evict(pages)
        assert list(map(sorted, gone)) == self.numbers(self.model.evict(pages, self.time))
        assert sum(map(len, gone)) >= min(pages, evictable)

    @precondition(lambda self: self.model.entries)
    @rule(rng=RANDOM)
    def renumber(self, rng: Random) -> None:
        key, ids = rng.choice(sorted(self.model.entries))
        arena = rng.randrange(len(self.rows[1]))
        entries = {place: entry for _, entry in self.model.along(key, ids) for place in entry.pages}
        places = sorted(place for place in entries if place[0] == arena)
        if not places:
            return
        first = rng.randrange(len(places))
        places = places[first : rng.randint(first + 1, len(places))]
        old, new = [entries[place].pages[place] for place in places], [next(self.fresh) for _ in places]
        path = self.tree.path(key, array(ids))
        assert not self.tree.renumber(path, arena, first, [*old[:-1], -1], new)
        assert self.tree.renumber(path, arena, first, old, new)
        for place, number in zip(places, new):
            entries[place].pages[place] = number

    @rule(seconds=st.integers(0, 2))
    def wait(self, seconds: int) -> None:
        self.time += seconds

    @precondition(lambda self: self.model.entries)
    @rule(rng=RANDOM)
    def forget(self, rng: Random) -> None:
        key = rng.choice([*KEYS, *10 * [Key("c", None, None, 0)]])
        gone = self.tree.forget(key)
        dropped = [page for ids in self.model.paths(key) for page in self.model.drop((key, ids))]
        assert list(map(sorted, gone)) == self.numbers(dropped)
        for node, of, _ in self.locked:
            if of == key:
                self.tree.unlock(node)
        self.locked = [each for each in self.locked if each[1] != key]

    def numbers(self, pages: list[tuple[int, int, int]]) -> list[list[int]]:
        """Those of pages of the model, by arena."""
        return [sorted(number for at, _, number in pages if at == arena) for arena in range(len(self.rows[1]))]

    def hear(self) -> None:
        """Has what was told since: prefixes that end with a block, and their priorities."""
        for event in self.log.events():
            if isinstance(event, Stored):
                assert event.blocks.salt is not None
                key, before = self.names.get(event.blocks.parent, (event.blocks.salt, ()))
                assert len(before) == event.blocks.start
                for end, name in enumerate(event.blocks.hashes, 1):
                    self.names[name] = key, before + tuple(event.blocks.ids[: end * event.blocks.size].tolist())
                    assert self.names[name] not in self.told
                    self.told[self.names[name]] = event.priority
            elif isinstance(event, Updated):
                assert event.priority is not None
                for name in event.blocks.hashes:
                    self.told[self.names[name]] = event.priority[1]
            else:
                assert isinstance(event, Removed)
                for name in event.hashes:
                    del self.told[self.names[name]]

    @invariant()
    def routers_know_what_can_be_found(self) -> None:
        if hasattr(self, "tree"):
            self.hear()
            size = self.log.block_size
            known = {
                (key.salt, ids[:end])
                for key, ids in self.model.entries
                for end in range(size, readable(self.rows, len(ids)) + 1, size)
            }
            assert self.told.keys() == known
            for (key, ids), entry in self.model.entries.items():
                assert self.told.get((key.salt, ids), entry.priority) == entry.priority

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()
            entries = self.model.entries
            assert self.tree.pages == sum(len(entry.pages) for entry in entries.values())
            assert self.tree.tokens == self.model.tokens()
            assert self.tree.roots.keys() == {key for key, _ in entries}


@pytest.mark.parametrize("geometries", [ONE, SEVERAL], ids=["one arena", "several"])
def test_any_operations_in_any_order(geometries: list[Rows]) -> None:
    usual = settings.default
    longer = settings(max_examples=usual.max_examples // 3, stateful_step_count=2 * usual.stateful_step_count)
    run_machine(type("Machine", (TreeMachine,), {"geometries": geometries}), settings=longer)


# ------------------------------------------------------------------ conversations


def conversations(rng: np.random.Generator, turns: int) -> Iterator[tuple[Ids, Ids]]:
    """Prompts and answers of conversations in turns: each begins with one of a few system prompts, most turns go on
    where one ended, and some ask again from the middle of another."""
    systems = [draw(rng, int(rng.integers(5, 30))) for _ in range(3)]
    ended: list[Ids] = []
    for _ in range(turns):
        before = systems[rng.integers(3)] if rng.random() < 0.2 or not ended else ended[rng.integers(len(ended))]
        if rng.random() < 0.2:
            before = before[: rng.integers(len(before) + 1)]
        prompt, answer = before + draw(rng, int(rng.integers(1, 20))), draw(rng, int(rng.integers(1, 20)))
        yield prompt, answer
        ended.append(prompt + answer)


def draw(rng: np.random.Generator, tokens: int) -> Ids:
    return tuple(rng.integers(0, 3, tokens).tolist())


class Engine:
    """Uses a tree as a server does: looks a prompt up, holds that, makes the rest known, and lets go in the end."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.tree, self.fresh = rows, PrefixTree(*rows), count()

    def begin(self, key: object, prompt: Ids) -> tuple[Match, Any, list[list[int]]]:
        found = self.tree.match(key, array(prompt))
        held = self.tree.lock(found.node, found.tokens)
        pages = self.pages(prompt, found.pages)
        made = self.tree.insert(key, array(prompt), pages)
        own = self.tree.lock(made.node)
        self.tree.unlock(held)
        return found, own, pages

    def end(self, key: object, ids: Ids, held: Any, pages: list[list[int]]) -> None:
        self.tree.insert(key, array(ids), self.pages(ids, pages))
        self.tree.unlock(held)

    def serve(self, key: object, prompt: Ids, answer: Ids = ()) -> Match:
        found, held, pages = self.begin(key, prompt)
        self.end(key, prompt + answer, held, pages)
        self.tree.check()
        return found

    def pages(self, ids: Ids, begin: list[list[int]]) -> list[list[int]]:
        """A row's pages, of which the first are there."""
        counts = self.tree.geometry.pages(len(ids))
        return [of + [next(self.fresh) for _ in range(most - len(of))] for of, most in zip(begin, counts)]


@pytest.mark.parametrize("rows", [(1, (1,)), (16, (4,)), (16, (3,)), (10, (4, 3)), (64, (3, 1, 16))])
def test_an_unlimited_tree_finds_whatever_was_there_before(rows: Rows) -> None:
    """The longest common prefix with any sequence before, to the token, as far as its whole pages reach."""
    engine, before = Engine(rows), []
    for prompt, answer in conversations(np.random.default_rng(), 60):
        expected = max((min(common(prompt, ids), readable(rows, len(ids))) for ids in before), default=0)
        assert engine.serve("key", prompt, answer).tokens == expected
        before.append(prompt + answer)


def test_several_arenas_help_one_another_out() -> None:
    """What one path lacks of an arena is found on another, where that has the same tokens."""
    tree, fresh = PrefixTree(10, [4, 3]), count()
    ids, first, second = np.arange(25), 100 + np.arange(26), 200 + np.arange(26)

    def insert(*parts: np.ndarray) -> None:
        tokens = np.concatenate(parts)
        pages = [[next(fresh) for _ in range(n)] for n in tree.geometry.pages(len(tokens))]
        found = tree.match("key", tokens).pages
        tree.insert("key", tokens, [old + new[len(old) :] for old, new in zip(found, pages)])
        tree.check()

    insert(ids)
    assert tree.match("key", ids).tokens == 23  # 70 bytes of the other arena
    insert(ids[:24], first)
    assert tree.match("key", ids[:24]).tokens == 24
    assert tree.match("key", ids).tokens == 24  # though what goes on to 25 lacks the other arena's page
    tree.unlock(tree.lock(tree.match("key", ids).node))
    tree.evict(sum(tree.geometry.pages(50)) - sum(tree.geometry.pages(25)))
    assert tree.match("key", np.concatenate([ids[:24], first])).tokens == 23
    insert(ids, second)
    assert tree.match("key", ids[:24]).tokens == 24


def test_a_conversation_stays_one_node() -> None:
    engine, ids = Engine((4, (1,))), ()
    for _ in range(50):
        ids += draw(np.random.default_rng(), 7)
        engine.serve("key", ids)
    assert engine.tree.nodes == 1
    assert engine.tree.tokens == 50 * 7 // 4 * 4


def test_keys_share_nothing() -> None:
    """Not even where they have the same hash."""
    keys = [("salt", None), ("salt", 1), ("salt", 2), -1, -2, None]
    assert hash(-1) == hash(-2)
    engine, rng = Engine((2, (1,))), np.random.default_rng()
    prompts = list(conversations(rng, 30))
    alone = [engine.serve(keys[0], *each) for each in prompts]
    for key in keys[1:]:
        assert [engine.serve(key, *each).tokens for each in prompts] == [found.tokens for found in alone]
    pages = [set(*engine.tree.forget(key)) for key in keys]
    assert len(set().union(*pages)) == sum(map(len, pages))
    assert (engine.tree.nodes, engine.tree.pages, engine.tree.tokens) == (0, 0, 0)


# ------------------------------------------------------------------ what is kept


def test_a_page_goes_with_the_range_that_its_first_token_is_in() -> None:
    tree = PrefixTree(4, [1])
    tree.insert("key", np.arange(24), [[*range(6)]], [Retention(6, 9, 80), Retention(9, 17, 10)])
    others = tree.insert("key", 100 + np.arange(24), [[*range(10, 16)]], [Retention(16, None, 10)])
    assert tree.evict(2) == [[15, 14]]  # of priority 10, while 5 and 4 have 35
    assert tree.evict(12) == [[5, 4, 3, 13, 12, 11, 10, 2, 1, 0]]
    assert others.tokens == 24


def test_a_priority_ends() -> None:
    time = 0.0
    tree = PrefixTree(4, [1], clock=lambda: time)
    tree.insert("key", np.arange(8), [[0, 1]], [Retention(0, None, 90, seconds=10)])
    tree.insert("key", 10 + np.arange(8), [[2, 3]], [Retention(0, None, 40)])
    tree.insert("key", 20 + np.arange(8), [[4, 5]], [Retention(0, None, 0, seconds=20)])
    assert tree.evict(1) == [[5]]
    time = 10.0
    assert tree.evict(2) == [[4, 1]]
    time = 20.0
    assert tree.evict(9) == [[0, 3, 2]]


def test_what_is_generated_has_a_priority_of_its_own() -> None:
    ranges = RetentionConfig((Retention(8, None, 60, 5.0), Retention(0, 4, 100)), decode_priority=20, decode_seconds=9)
    assert ranges.of_sequence(20) == (Retention(0, 4, 100), Retention(8, 20, 60, 5.0), Retention(20, None, 20, 9))
    assert ranges.of_sequence(3) == (Retention(0, 3, 100), Retention(3, None, 20, 9))
    assert RetentionConfig().of_sequence(20) == ()  # says nothing, so that others' words hold


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Retention(-1), "from -1 on"),
        (lambda: Retention(1.5), "from 1.5 on"),  # type: ignore[arg-type]
        (lambda: Retention(4, 4), r"tokens \[4, 4\)"),
        (lambda: Retention(4, 2), r"tokens \[4, 2\)"),
        (lambda: Retention(0, "9"), r"tokens \[0, '9'\)"),  # type: ignore[arg-type]
        (lambda: Retention(priority=-1), "priority -1"),
        (lambda: Retention(priority=101), "priority 101"),
        (lambda: Retention(priority=True), "priority True"),
        (lambda: Retention(priority=0.5), "priority 0.5"),  # type: ignore[arg-type]
        (lambda: Retention(seconds=-0.1), "-0.1 seconds"),
        (lambda: Retention(seconds=float("nan")), "nan seconds"),
        (lambda: Retention(seconds="1"), "'1' seconds"),  # type: ignore[arg-type]
        (lambda: RetentionConfig((Retention(0, 5), Retention(4, 6))), r"\[0, 5\) and \[4, 6\)"),
        (lambda: RetentionConfig((Retention(7, 8), Retention(3))), r"\[3, end\) and \[7, 8\)"),
        (lambda: RetentionConfig(((0, 5),)), r"got \(0, 5\)"),  # type: ignore[arg-type]
        (lambda: RetentionConfig(Retention(0, 5)), "a list of"),  # type: ignore[arg-type]
        (lambda: RetentionConfig(None), "got None.*a list of"),  # type: ignore[arg-type]
        (lambda: RetentionConfig(decode_priority=200), "priority 200"),
        (lambda: RetentionConfig(decode_seconds=-1), "-1 seconds"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(errors.RetentionError, match=says):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = np.random.default_rng().integers(0, 50, 3)
    start, end, priority = numbers[0], numbers[0] + 1 + numbers[1], numbers[2]
    kept = Retention(start, end, priority, np.float32(2))  # type: ignore[arg-type]
    assert kept == Retention(start.item(), end.item(), priority.item(), 2)
    assert {type(kept.start), type(kept.end), type(kept.priority)} == {int}


def test_what_is_left_of_a_fork_is_cut_at_a_page() -> None:
    """Behind it, where the other branch was, nothing could be given up."""
    tree = PrefixTree(4, [1])
    tree.insert("key", np.arange(12), [[0, 1, 2]])
    other = np.concatenate([np.arange(6), [50] * 6])
    tree.insert("key", other, [[0, 11, 12]], [Retention(0, None, 0)])
    assert tree.evict(2) == [[12, 11]]
    tree.check()
    assert tree.evict(3) == [[2, 1, 0]]
    tree.check()


def test_what_is_given_up_takes_no_memory() -> None:
    tree, ids = PrefixTree(4, [1]), np.arange(40_000)
    tree.insert("key", ids, [[*range(10_000)]], [Retention(0, 100, 90)])
    tree.evict(9990)
    left = tree.match("key", ids)
    assert left.tokens == tree.tokens == 40
    assert left.node.ids.base is None or left.node.ids.base.nbytes <= 2 * left.node.ids.nbytes


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([1, 2, 3, 4], errors.ArgumentError),
        (np.zeros((2, 2), np.int64), errors.ShapeError),
        (np.array(3), errors.ShapeError),
        (np.zeros(4), errors.DtypeError),
        (np.zeros(4, bool), errors.DtypeError),
        (np.zeros(4, np.uint64), errors.DtypeError),
    ],
)
def test_what_is_no_ids_is_refused(ids: Any, error: type[Exception]) -> None:
    tree = PrefixTree(4, [1])
    with pytest.raises(error):
        tree.match("key", ids)
    with pytest.raises(error):
        tree.insert("key", ids, [[0]])
    assert not tree.roots


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, ">i8"])
def test_ids_of_any_integer_type_are_the_same(dtype: Any) -> None:
    tree = PrefixTree(4, [1])
    ids = np.arange(40)
    tree.insert("key", ids.astype(dtype), [[*range(10)]])
    assert tree.match("key", ids.repeat(2).astype(dtype)[::2]).tokens == 40


def test_what_was_inserted_is_the_trees_own() -> None:
    tree, ids = PrefixTree(4, [1]), np.arange(8)
    pages = [[0, 1]]
    tree.insert("key", ids, pages)
    ids[:], pages[0][0] = 9, 9
    assert tree.match("key", np.arange(8)).pages == [[0, 1]]
    found = tree.match("key", np.arange(8))
    found.pages[0].clear()
    tree.check()


def test_an_error_changes_nothing() -> None:
    tree = PrefixTree(4, [1, 2])
    tree.insert("key", np.arange(8), [[0, 1], [0, 1, 2, 3]])
    before = tree.match("key", np.arange(20))
    counts = tree.nodes, tree.pages, tree.tokens
    more = np.concatenate([np.arange(6), np.arange(50, 56)])
    for pages, ranges, error in [
        ([[0, 1], [0, 1, 2, 3, 4, 5]], (), errors.ShapeError),
        ([[0, 1, 2]], (), errors.ShapeError),
        ([[0, 5, 6], [0, 1, 2, 5, 6, 7, 8]], (), errors.ShapeError),
        ([[0, 5, 5], [0, 1, 2, 5, 6, 7]], (), errors.InvariantError),
        ([[0, 5, 6], [0, 1, 2, 5, 6, 3]], (), ValueError),
        ([[1, 5, 6], [0, 1, 2, 5, 6, 7]], (), ValueError),
        ([[0, 5, 6], [0, 1, 2, 5, 6, 7]], [Retention(0, 9), Retention(8)], errors.RetentionError),
    ]:
        with pytest.raises(error):
            tree.insert("key", more, pages, ranges)
        tree.check()
        assert tree.match("key", np.arange(20)) == before
        assert (tree.nodes, tree.pages, tree.tokens) == counts
    tree.insert("key", more, [[0, 5, 6], [0, 1, 2, 5, 6, 7]], [Retention(8), Retention(0, 8)])


def test_what_was_evicted_since_it_matched_cannot_be_locked() -> None:
    tree = PrefixTree(4, [1])
    tree.insert("key", np.arange(8), [[0, 1]])
    found = tree.match("key", np.arange(8))
    tree.evict(1)
    with pytest.raises(errors.StaleMatchError):
        tree.lock(found.node, found.tokens)
    tree.evict(1)
    for tokens in (found.tokens, None, -1):
        with pytest.raises(errors.StaleMatchError):
            tree.lock(found.node, tokens)
    tree.check()


def test_what_nobody_locked_cannot_be_unlocked() -> None:
    tree = PrefixTree(4, [1])
    node = tree.insert("key", np.arange(8), [[0, 1]]).node
    held = tree.lock(node, 5)
    with pytest.raises(errors.InvariantError):
        tree.unlock(node)
    assert tree.evict(5) == [[1]]
    tree.unlock(held)
    with pytest.raises(errors.InvariantError):
        tree.unlock(held)
    assert tree.evict(5) == [[0]]


@pytest.mark.parametrize(("page_size", "records"), [(0, [1]), (4, []), (4, [1, 0]), (4.0, [1]), (4, [-1])])
def test_rows_that_cannot_be_are_refused(page_size: Any, records: list[int]) -> None:
    with pytest.raises(errors.LayoutError):
        PrefixTree(page_size, records)


# ------------------------------------------------------------------ what it costs


def test_the_size_of_the_tree_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are compared for a match, or looked at for an eviction, are few among however many."""
    tree, looked_at = PrefixTree(4, [1]), Counter[str]()
    for number in range(2000):
        ids = np.concatenate([np.arange(8), [100 + number] * 8])
        tree.insert("key", ids, [[0, 1, 2 * number + 2, 2 * number + 3]])

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            looked_at[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(lookup, "common", counted("compared", lookup.common))
    monkeypatch.setattr(Node, "is_evictable", property(counted("offered", Node.is_evictable.fget)))
    assert tree.match("key", np.concatenate([np.arange(8), [1500] * 8])).tokens == 16
    assert looked_at.pop("compared") == 2
    assert len(*tree.evict(100)) == 100
    assert looked_at["offered"] <= 150


def test_uses_leave_nothing_behind() -> None:
    tree = PrefixTree(4, [1])
    nodes = [
        tree.insert("key", np.full(8, number), [[2 * number, 2 * number + 1]], [Retention(0, None, 50, 1e9)]).node
        for number in range(3)
    ]
    for _ in range(1000):
        for node in nodes:
            tree.unlock(tree.lock(node))
    assert len(tree.order._ranked) + len(tree.order._expiring) < 200
    assert tree.nodes == 3
