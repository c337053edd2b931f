"""A random machine that does the same on the second house, on the compiled core, and on a plain model.

The model is lists of bytes, and sets of pages: which page of which sequence is the same piece of memory as another's.
What differs on purpose is in `DIFFERENCES`, by a name that the machine's code mentions where it allows for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import numpy as np
from core_houses import LAYOUTS, LONG, MAX_SEQ_LEN, MAX_SEQUENCES, SIZE, House, New, Old
from core_twins import Twin, Twins

import vmmkv
from vmmkv.core.pool import LARGE
from vmmkv.errors import DriverError, OutOfPagesError, OutOfRowsError, SequenceTooLongError, UnsupportedError

DIFFERENCES = {
    "row": "which row a new sequence gets is free: the core looks at a few parked rows of a size class",
    "surplus": "how much stays mapped behind sequences, what is reclaimed first, and so how far one grows in place",
    "shared surplus": "the second house keeps room for copies of pages which only surplus shares with a sequence",
    "row stride": "rows of the core that can have large frames are whole large frames long, so that these coincide",
    "large frames": "what a large frame wastes counts as used; the core chooses other places for them",
    "limit below reserved": "one check of what is used or reserved, whichever is more: OutOfPagesError",
    "other cache": "a ticket of another cache is stale by the same comparison: UseAfterFreeError",
    "reorder in front": "the core refuses what lies in front of a sequence's first page, also outside of circles",
    "scrub and keys": "a cache of the core that scrubs has a key for each sequence; reordering compares none there",
    "reorder grows": "a sequence that becomes longer gets a page of its own where it ended; the second house shares it",
    "reorder shares": "the core copies; only sequences without tokens become forks",
}
"""What differs between the houses, and why."""


class Parity(Twins):
    """Runs random operations on both houses.

    Args:
        random: what chooses.
        faults: whether driver calls fail now and then, at the same numbers in both houses.
        large: whether there are large frames.
    """

    def __init__(self, random: Random, *, faults: bool = False, large: bool = False) -> None:
        super().__init__()
        self.random, self.faults, self.is_exact = random, faults, not large
        count = random.choice([1, 1, 2])
        self.budget = random.choice([60, 250, 600] if large else [14, 30, 90])
        self.options = [
            {
                "reserved": random.choice([0, 0, self.budget // 4]),
                "limit": random.choice([None, None, self.budget // 2]),
                "overread": random.choice([0, 0, 7]),
                "scrub": random.random() < 0.25,
                "large": large,
            }
            for _ in range(count)
        ]
        self.layouts = [random.choice(LONG if large else LAYOUTS) for _ in range(count)]
        arguments = self.budget, self.layouts, self.options
        self.houses: list[Any] = [Old(*arguments), New(*arguments)]
        self.keys = random.choice([[0], [0, 1]])
        self.touched: list[Twin] = []
        """Sequences that an operation is to change."""
        self.done: Counter[str] = Counter()
        self.log: list[str] = [f"{self.budget} pages, {self.layouts}, {self.options}"]
        self.check_strides()

    def check_strides(self) -> None:
        for index, layout in enumerate(self.layouts):
            for part, _ in enumerate(layout.record_bytes):
                old, new = (house.stride(index, part) for house in self.houses)
                pages = old // SIZE
                if self.options[index]["large"] and pages >= LARGE:  # DIFFERENCES["row stride"]
                    pages = -(-pages // LARGE) * LARGE
                assert new == pages * SIZE

    # ------------------------------------------------------------------ both houses

    def both(self, operation: Callable[[House, int], Any], expected: type[Exception] | None = None) -> list[Any] | None:
        """Does something in both houses, which both do, or refuse with the same error. Returns what they return."""
        outcomes = [self.attempt(place, operation) for place in (0, 1)]
        if isinstance(outcomes[0], OutOfPagesError) and self.is_exact and expected is None:
            self.houses[0].pool.trim()  # DIFFERENCES["shared surplus"]
            outcomes[0] = self.attempt(0, operation)
            self.done["shared surplus"] += 1
        kinds = [type(outcome) if isinstance(outcome, Exception) else None for outcome in outcomes]
        is_apart = OutOfPagesError in kinds and kinds[0] != kinds[1]
        if is_apart and (not self.is_exact or (kinds[0] is OutOfPagesError and expected is None)):
            raise Apart(outcomes)  # DIFFERENCES["large frames"], DIFFERENCES["shared surplus"]
        assert kinds[0] == kinds[1], outcomes
        if self.is_exact or expected is not OutOfPagesError:
            assert kinds[0] == expected or (not self.is_exact and kinds[0] is OutOfPagesError), (outcomes, expected)
        self.done[str(kinds[0].__name__ if kinds[0] else "done")] += 1
        return None if kinds[0] else outcomes

    def attempt(self, place: int, operation: Callable[[House, int], Any]) -> Any:
        """Does something in a house. If a driver call fails, all is as before, and it is done again."""
        house = self.houses[place]
        failures = house.driver.failures
        if self.faults and self.random.random() < 0.3:
            skip, out_of_memory = self.random.randrange(8), self.random.random() < 0.3
            house.driver.fail("any", skip, out_of_memory)
        outcome = self.outcome(house, place, operation)
        house.driver.heal()
        if isinstance(outcome, DriverError | OutOfPagesError) and house.driver.failures > failures:
            self.done["failed"] += 1
            self.compare(place, self.twins)
            outcome = self.outcome(house, place, operation)
        assert not isinstance(outcome, DriverError), outcome
        return outcome

    def outcome(self, house: House, place: int, operation: Callable[[House, int], Any]) -> Any:
        """What an operation returns, or is refused with."""
        try:
            return operation(house, place)
        except (vmmkv.VmmkvError, ValueError) as error:
            error.__context__ = None
            return error.with_traceback(None)  # whose frames hold sequences

    def compare(self, place: int, twins: Iterable[Twin]) -> None:
        """Compares sequences of a house with the model: lengths, addresses, and each byte."""
        house = self.houses[place]
        for twin in twins:
            sequence, (row, addresses) = twin.of[place], twin.places[place]
            assert (sequence.start, sequence.length) == (twin.start, len(twin.tokens)), house.name
            assert (sequence.row, self.addresses(place, twin.index, sequence.row)) == (row, addresses), house.name
            values = np.array(twin.tokens[twin.start :], np.uint8)[:, None]
            for part, _ in enumerate(addresses):
                found = house.memory(twin.index, row, part, twin.start, len(twin.tokens))
                assert (found == values).all(), f"{house.name}: wrong bytes in range {part} of row {row}"

    def addresses(self, place: int, index: int, row: int) -> list[int]:
        house = self.houses[place]
        return [house.address(index, row, part) for part, _ in enumerate(self.layouts[index].record_bytes)]

    def write(self, twin: Twin, count: int) -> None:
        """Writes new tokens in both houses, behind a look at what lies there."""
        first = len(twin.tokens)
        values = [self.random.randrange(1, 128) + 128 * twin.key for _ in range(count)]
        for place, (row, _) in enumerate(twin.places):
            for part, _ in enumerate(twin.places[place][1]):
                begin = max(first, twin.start)
                memory = self.houses[place].memory(twin.index, row, part, begin, first + count)
                if len(memory):
                    self.expect_clean(twin, memory, self.houses[place].name)
                    memory[:] = np.array(values[begin - first :], np.uint8)[:, None]
        twin.tokens += values
        twin.past.update(values)

    def expect_clean(self, twin: Twin, memory: Any, name: str) -> None:
        """What lies in new tokens is no other tenant's; in a cache that scrubs, of no other sequence."""
        found = {*np.unique(memory).tolist()} - {0}
        assert all(value >> 7 == twin.key for value in found), f"{name}: another tenant's bytes"
        if self.options[twin.index]["scrub"]:
            assert found <= twin.past, f"{name}: another sequence's bytes"

    # ------------------------------------------------------------------ operations

    def step(self) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [4 if name in ("do_begin", "do_extend", "do_extend_many") else 1 for name in names]
        name = self.random.choices(names, weights)[0]
        self.log.append(name)
        before = [(twin, twin.start, list(twin.tokens), dict(twin.pages)) for twin in self.twins]
        self.touched.clear()
        try:
            getattr(self, name)()
        except Apart as apart:  # take it back where it was done
            for place, outcome in enumerate(apart.outcomes):
                if not isinstance(outcome, Exception):
                    self.take_back(place, outcome, [(twin, tokens) for twin, _, tokens, _ in before])
            for twin, start, tokens, pages in before:
                twin.start, twin.tokens, twin.pages = start, tokens, pages
                if any(each.start > start for each in twin.of) or (twin in self.touched and self.is_exact):
                    self.twins.remove(twin)  # it cannot become as it was
                    for each in twin.of:
                        each.free()
            self.done["apart"] += 1
        self.check()

    def take_back(self, place: int, outcome: Any, before: list[tuple[Twin, list[int]]]) -> None:
        """Takes a growth back, or a new sequence."""
        if outcome is not None:
            outcome.free()
        for twin, tokens in before:
            if twin.of[place].length > len(tokens) >= twin.of[place].start:
                twin.of[place].truncate(len(tokens))

    def check(self) -> None:
        for place, house in enumerate(self.houses):
            self.compare(place, self.random.sample(self.twins, min(2, len(self.twins))))
            assert house.physical() == house.driver.num_pages <= self.budget, house.name
            for index, _ in enumerate(self.options):
                if self.is_exact:
                    assert house.used(index) == self.used(index), f"{house.name}, not {self.used(index)}"
                else:  # DIFFERENCES["large frames"]
                    assert house.used(index) >= self.used(index), house.name
        self.houses[1].check()
        if self.random.random() < 0.2:
            self.houses[0].check()

    def pick(self) -> Twin | None:
        return self.random.choice(self.twins) if self.twins else None

    def some(self) -> int:
        return self.random.choice([0, 1, 1, 2, 5, 5, 17, 40, 60, 101])

    def expected_of(self, longest: int) -> type[Exception] | None:
        """What is refused, as the model is now."""
        if longest > MAX_SEQ_LEN:
            return SequenceTooLongError
        return None if self.fits() else OutOfPagesError

    def do_begin(self) -> None:
        index, key = self.random.randrange(len(self.options)), self.random.choice(self.keys)
        tokens, expected = self.some(), self.random.choice([0, 0, 30, 100])
        row = self.random.choice([None, None, self.random.randrange(MAX_SEQUENCES)])
        is_live = [any(twin.places[place][0] == row for twin in self.of(index)) for place in (0, 1)]
        row = row if is_live[0] == is_live[1] else None  # DIFFERENCES["row"]
        twin = Twin(index, [], [], key)
        self.twins.append(twin)
        self.lay(twin, 0, min(tokens, MAX_SEQ_LEN))
        error = self.expected_of(tokens)
        if len(self.of(index)) > MAX_SEQUENCES or (row is not None and is_live[0]):
            error = error if error is SequenceTooLongError else OutOfRowsError
        self.twins.remove(twin)
        made = self.both(lambda house, _: house.begin(index, tokens, expected, key, row), error)
        if made:
            assert row is None or [each.row for each in made] == [row, row]
            self.add(twin, made)
            self.write(twin, tokens)

    def add(self, twin: Twin, made: list[Any]) -> None:
        """Adds a sequence that has begun."""
        twin.of = made
        twin.places = [(each.row, self.addresses(place, twin.index, each.row)) for place, each in enumerate(made)]
        self.twins.append(twin)

    def grow(
        self,
        twins: list[Twin],
        counts: list[int],
        operation: Callable[[House, int], Any],
        starts: list[int] | None = None,
    ) -> None:
        """Grows sequences in both houses by such an operation, and in the model."""
        before = [dict(twin.pages) for twin in twins]
        self.touched += twins
        longest = 0
        for twin, count, start in zip(twins, counts, starts or [twin.start for twin in twins]):
            length = len(twin.tokens)
            longest = max(longest, length + count)
            if length + count <= MAX_SEQ_LEN:
                self.lay(twin, start, length + count)
                if count:
                    self.part(twin, length)
        error = self.expected_of(longest)
        try:
            is_done = self.both(operation, error)
        except Apart:
            is_done = None
            raise
        finally:
            if error:
                for twin, pages in zip(twins, before):
                    twin.pages = pages
        if is_done:
            for twin, count, start in zip(twins, counts, starts or [twin.start for twin in twins]):
                twin.tokens += [0] * start if starts else []
                twin.start = start
                self.write(twin, count - (start if starts else 0))
        else:
            for twin, pages in zip(twins, before):
                twin.pages = pages

    def do_extend(self) -> None:
        if twin := self.pick():
            count = self.some()
            self.grow([twin], [count], lambda _, place: twin.of[place].extend(count))

    def do_extend_many(self) -> None:
        index = self.random.randrange(len(self.options))
        twins = self.random.sample(self.of(index), self.random.randint(0, len(self.of(index))))
        counts: Any = [self.some() for _ in twins]
        given: Any = counts
        if self.random.random() < 0.5:
            given = self.random.choice([0, 1, 1, 5, 20])
            counts = [given] * len(twins)
        self.grow(
            twins, counts, lambda house, place: house.caches[index].extend([twin.of[place] for twin in twins], given)
        )

    def do_step(self) -> None:
        """All grow by a token: a list of them, or a batch handle."""
        index = self.random.randrange(len(self.options))
        twins = self.of(index)
        self.grow(twins, [1] * len(twins), lambda house, place: house.step(index, [twin.of[place] for twin in twins]))

    def do_start_late(self) -> None:
        """Sequences whose fronts are never there."""
        index = self.random.randrange(len(self.options))
        twins = [twin for twin in self.of(index) if not twin.tokens]
        counts = [self.random.randint(1, MAX_SEQ_LEN) for _ in twins]
        starts = [self.random.randint(0, count) for count in counts]
        self.grow(
            twins,
            counts,
            lambda house, place: house.caches[index].extend([twin.of[place] for twin in twins], counts, starts=starts),
            starts,
        )

    def do_extend_in_place(self) -> None:
        """One house may have room where the other has none: DIFFERENCES["surplus"]."""
        if not (twin := self.pick()):
            return
        count, held = self.random.choice([0, 1, 5]), len(twin.tokens)
        assert not any(each.extend_in_place(1, held=held + 1) for each in twin.of)
        had_room = [each.extend_in_place(count, held=held) for each in twin.of]
        if any(had_room):
            operation = lambda _, place: None if had_room[place] else twin.of[place].extend(count)  # noqa: E731
            self.grow([twin], [count], operation)

    def do_truncate(self) -> None:
        if twin := self.pick():
            length = self.random.randint(twin.start, len(twin.tokens))
            self.both(lambda _, place: twin.of[place].truncate(length))
            del twin.tokens[length:]
            self.lay(twin, twin.start, length)

    def do_release_before(self) -> None:
        if (twin := self.pick()) and self.random.random() < 0.5:
            start = self.random.randint(twin.start, len(twin.tokens))
            self.both(lambda _, place: twin.of[place].release_before(start))
            twin.start = start
            self.lay(twin, start, len(twin.tokens))

    def do_fork(self) -> None:
        if not (parent := self.pick()):
            return
        twin = Twin(parent.index, [], [], parent.key, list(parent.tokens), parent.start, past=set(parent.past))
        records, length = self.layouts[twin.index].record_bytes, len(parent.tokens)
        full = {(part, page): n for (part, page), n in parent.pages.items() if page < length * records[part] // SIZE}
        self.twins.append(twin)
        self.lay(twin, twin.start, length, full)
        error = self.expected_of(0)
        if len(self.of(twin.index)) > MAX_SEQUENCES:
            error = OutOfRowsError
        self.twins.remove(twin)
        if made := self.both(lambda _, place: parent.of[place].fork(), error):
            self.add(twin, made)

    def do_unshare(self) -> None:
        """Tokens are written over."""
        if not (twin := self.pick()):
            return
        token, before = self.random.randint(twin.start, len(twin.tokens)), dict(twin.pages)
        self.touched.append(twin)
        self.part(twin, token)
        if self.both(lambda house, place: house.unshare(twin.index, twin.of[place], token), self.expected_of(0)):
            count = len(twin.tokens) - token
            del twin.tokens[token:]
            self.write(twin, count)
        else:
            twin.pages = before

    def do_reorder(self) -> None:
        """With memory enough for all copies. Sequences without tokens are left out: DIFFERENCES["reorder shares"]."""
        index = self.random.randrange(len(self.options))
        twins = [twin for twin in self.of(index) if twin.tokens]
        if self.options[index]["scrub"]:  # DIFFERENCES["scrub and keys"]
            twins = [twin for twin in twins if twin.key == twins[0].key]
        chosen = self.random.sample(twins, self.random.randint(0, len(twins)))
        indices = [self.random.randrange(len(chosen)) for _ in chosen]
        if self.random.random() < 0.4:
            self.random.shuffle(indices := list(range(len(chosen))))
        before = [(each, dict(each.pages)) for each in chosen]
        for each in chosen:  # as much as it could take
            self.lay(each, min(each.start, *(one.start for one in chosen)), max(len(one.tokens) for one in chosen))
            self.part(each, 0)
        has_room = self.fits() and all(
            self.is_exact or self.budget > 2 * sum(each.used(place) for place, _ in enumerate(self.options)) + 400
            for each in self.houses
        )
        for each, pages in before:
            each.pages = pages
        if not has_room:
            return
        pairs = [(twin, chosen[source]) for twin, source in zip(chosen, indices) if twin is not chosen[source]]
        if any(self.ends_on_common_page(twin, source) for twin, source in pairs):  # DIFFERENCES["reorder grows"]
            return
        is_refused = any(self.is_in_front(twin, source) or twin.key != source.key for twin, source in pairs)
        if is_refused and self.is_exact:  # DIFFERENCES["reorder in front"]
            assert isinstance(
                self.outcome(self.houses[1], 1, lambda *_: self.reorder(1, index, chosen, indices)), UnsupportedError
            )
            return
        if is_refused or isinstance(
            self.outcome(self.houses[0], 0, lambda *_: self.reorder(0, index, chosen, indices)),
            OutOfPagesError | UnsupportedError,
        ):  # DIFFERENCES["shared surplus"]
            return
        self.reorder(1, index, chosen, indices)
        self.done["reorder"] += 1
        held = [(twin.start, twin.tokens, twin.past) for twin in chosen]
        moves = {twin: chosen[source] for twin, source in zip(chosen, indices) if chosen[source] is not twin}
        common = self.common(moves)
        for twin, (start, tokens, past) in zip(chosen, [held[source] for source in indices]):
            if twin in moves:
                twin.pages = {page: number for page, number in twin.pages.items() if page in common[twin]}
                twin.start, twin.tokens = start, list(tokens)
                twin.past = twin.past | past
                self.lay(twin, start, len(tokens))

    def reorder(self, place: int, index: int, chosen: list[Twin], indices: list[int]) -> None:
        self.houses[place].reorder(index, [twin.of[place] for twin in chosen], indices)

    def do_free(self) -> None:
        twins = self.random.sample(self.twins, min(len(self.twins), self.random.choice([1, 1, 1, 3])))
        if twins:
            chosen = [twin for twin in twins if twin.index == twins[0].index]
            self.both(lambda house, place: house.caches[chosen[0].index].free([twin.of[place] for twin in chosen]))
            self.twins = [twin for twin in self.twins if twin not in chosen]
            self.expect_freed(chosen[0])

    def expect_freed(self, twin: Twin) -> None:
        """A sequence that has ended is refused everywhere, but for another end."""
        uses: list[Callable[[Any], Any]] = [
            lambda each: each.length,
            lambda each: each.row,
            lambda each: each.extend(1),
            lambda each: each.truncate(0),
            lambda each: each.release_before(0),
            lambda each: each.fork(),
        ]
        use = self.random.choice(uses)
        self.both(lambda _, place: use(twin.of[place]), vmmkv.UseAfterFreeError)
        assert not any(each.extend_in_place(1) for each in twin.of)
        self.both(lambda _, place: twin.of[place].free())

    def do_collect(self) -> None:
        """A sequence that nothing holds any more."""
        if twin := self.pick():
            self.twins.remove(twin)
            twin.of.clear()
            for house in self.houses:
                house.collect()

    def do_trim(self) -> None:
        if self.both(lambda house, _: house.pool.trim() and None) and self.is_exact:
            used = sum(map(self.used, range(len(self.options))))
            assert [house.driver.num_pages for house in self.houses] == [used, used]

    def do_limit(self) -> None:
        pages = self.random.choice([10, 14, 30, 90, 250, 600])
        committed = sum(map(self.committed, range(len(self.options))))
        if pages < sum(each["reserved"] for each in self.options):  # DIFFERENCES["limit below reserved"]
            return
        error = OutOfPagesError if pages < committed else None
        if self.both(lambda house, _: house.set_limit(pages), error):
            self.budget = pages

    def do_misuse(self) -> None:
        """What is refused whatever there is."""
        if not (twin := self.pick()):
            return
        length, start, index = len(twin.tokens), twin.start, twin.index
        uses: list[tuple[type[Exception], Callable[[Any, Any], Any]]] = [
            (ValueError, lambda cache, each: each.extend(-1)),
            (ValueError, lambda cache, each: cache.extend([each], -1)),
            (ValueError, lambda cache, each: cache.extend([each], [-1])),
            (ValueError, lambda cache, each: each.truncate(-1)),
            (ValueError, lambda cache, each: each.release_before(-1)),
            (ValueError, lambda cache, each: cache.extend([each, each], 0)),
            (ValueError, lambda cache, each: cache.extend([each], [1, 1])),
            (SequenceTooLongError, lambda cache, each: each.extend(MAX_SEQ_LEN + 1)),
            (SequenceTooLongError, lambda cache, each: cache.extend([each], MAX_SEQ_LEN + 1)),
            (vmmkv.OutOfRangeError, lambda cache, each: cache.sequence(row=MAX_SEQUENCES)),
            (vmmkv.OutOfRangeError, lambda cache, each: cache.sequence(row=-1)),
            (ValueError, lambda cache, each: cache.sequence(-1)),
            (SequenceTooLongError, lambda cache, each: cache.sequence(MAX_SEQ_LEN + 1)),
        ]
        if length < MAX_SEQ_LEN:
            uses.append((ValueError, lambda cache, each: each.truncate(length + 1)))
            uses.append((ValueError, lambda cache, each: each.release_before(length + 1)))
        if not length:
            uses.append((ValueError, lambda cache, each: cache.extend([each], 1, starts=[-1])))
            uses.append((ValueError, lambda cache, each: cache.extend([each], 1, starts=[2])))
            uses.append((ValueError, lambda cache, each: cache.extend([each], 1, starts=[0, 0])))
        if start:
            uses.append((ValueError, lambda cache, each: each.truncate(start - 1)))
        if length:
            uses.append((ValueError, lambda cache, each: cache.extend([each], 0, starts=[0])))
        number = self.random.randrange(len(uses))
        error, use = uses[number]
        self.log.append(f"misuse {number}")
        self.both(lambda house, place: use(house.caches[index], twin.of[place]), error)

    def do_name_in_another_cache(self) -> None:
        if (twin := self.pick()) and len(self.options) > 1:
            outcomes = [
                self.outcome(
                    house, place, lambda house, place: house.caches[1 - twin.index].extend([twin.of[place]], 1)
                )
                for place, house in enumerate(self.houses)
            ]
            assert [*map(type, outcomes)] == [ValueError, vmmkv.UseAfterFreeError]  # DIFFERENCES["other cache"]

    # ------------------------------------------------------------------ the end

    def run(self, steps: int) -> None:
        """Runs so many steps, and ends."""
        try:
            for _ in range(steps):
                self.step()
            for place, house in enumerate(self.houses):
                self.compare(place, self.twins)
                house.check()
                for cache in house.caches:
                    cache.close()
                house.pool.trim()
                assert house.driver.num_pages == 0
        except BaseException as error:
            error.add_note("\n".join([self.log[0], " ".join(self.log[-30:])]))
            raise


class Apart(Exception):  # noqa: N818
    """One house has refused for want of pages what the other one has done."""

    def __init__(self, outcomes: list[Any]) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes
