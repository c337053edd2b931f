"""Prefixes in any order with all other operations, with failing driver calls and interruptions, against a plain model.

K and V of a token follow from the salt and all ids up to it. So what a sequence begins with must be what it would have
computed, and be known to the model under the same salt.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_state_machine import MAX_SEQ_LEN, ROWS, CacheMachine, Model, run

import vmmkv

SALTS = ["one", "two"]
WORDS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 15)), max_size=3)
"""Token ids, as letters, and how often they come: few, so that many prompts begin alike."""


@cache
def pattern(head_dim: int) -> torch.Tensor:
    """What K and V of a token are multiples of."""
    return torch.rand(3, 1, 2, 2, head_dim, generator=torch.Generator().manual_seed(0)) + 1


def factors(salt: str, ids: str) -> list[int]:
    """By how much, for each token: another number for each beginning under each salt."""
    found = [SALTS.index(salt)]
    for number in ids.encode():
        found.append((256 * found[-1] + number) * 5**9 % (2**23 - 15) + 1)
    return found[1:]


class PrefixMachine(CacheMachine):
    @initialize(
        layers_per_range=st.sampled_from([None, 1, 2]),
        scrub=st.booleans(),
        spare=st.integers(0, 3),
        host_priority=st.sampled_from([None, 30]),
    )
    def make(self, layers_per_range: int | None, scrub: bool, spare: int, host_priority: int | None = None) -> None:
        super().make(layers_per_range, scrub, spare, host_priority)

    def begin(self) -> None:
        super().begin()
        self.known: set[tuple[str, str]] = set()
        """What was ever committed."""

    def states(self, model: Model, begin: int) -> torch.Tensor:
        if model.ids is None or model.salt is None:
            return super().states(model, begin)
        model.ids = model.ids[:begin].ljust(model.length, "ab"[len(self.live) % 2])
        return self.computed(model, model.length)[:, begin:]

    def computed(self, model: Model, end: int) -> torch.Tensor:
        """K and V of the first tokens of a sequence."""
        assert model.ids is not None
        assert model.salt is not None
        factor = torch.tensor(factors(model.salt, model.ids[:end]), dtype=torch.float32)
        return factor[:, None, None, None] * pattern(self.layout.head_dim)

    def most_cached(self, salt: str, ids: str) -> int:
        """With how many tokens a new sequence may begin."""
        most = 0
        for other, known in self.known:
            if other == salt:
                common = (at for at, (one, two) in enumerate(zip(known, ids[:-1])) if one != two)
                most = max(most, next(common, min(len(known), len(ids) - 1)))
        return most

    # ------------------------------------------------------------------ operations

    @rule(
        data=st.data(),
        salt=st.sampled_from(SALTS),
        words=WORDS,
        reuse=st.sampled_from([True, True, True, False]),
        then=st.sampled_from(["stays", "is known", "is known", "has ended"]),
    )
    def start_sequence(
        self, data: st.DataObject, salt: str, words: list[tuple[str, int]], reuse: bool, then: str
    ) -> None:
        """Of ids that often begin like others."""
        ids = data.draw(st.sampled_from(sorted({"", *(ids for _, ids in self.known)})))
        ids = ids[: len(ids) - data.draw(st.sampled_from([0, 0, 1, 5, 12]))]
        ids = (ids + "".join(letter * count for letter, count in words))[:MAX_SEQ_LEN]
        model = self.begin_with(ids, salt, reuse)
        if model and reuse and then != "stays":
            self.make_known(model, ids)
        if model and then == "has ended":
            self.end(model)

    @precondition(lambda self: self.known)
    @rule()
    def look_up(self) -> None:
        """All that may be known."""
        cache = self.cache
        for salt, ids in sorted(self.known):
            if self.cache is cache and (model := self.begin_with(ids[: MAX_SEQ_LEN - 1] + "c", salt)):
                self.end(model)

    def begin_with(self, ids: str, salt: str, reuse: bool = True) -> Model | None:
        """The model of a new sequence, if there is one."""
        expected = vmmkv.OutOfRowsError if len(self.live) + len(self.away) == ROWS else None
        made: list[vmmkv.Sequence] = []
        start = lambda: made.append(self.cache.sequence(token_ids=[*ids.encode()], salt=salt, reuse=reuse))  # noqa: E731
        if not self.outcome(start, expected, lambda: bool(made), self.pages(0, len(ids))):
            return None
        model = self.model(made.pop(), len(ids))
        self.live.append(model)
        if reuse:
            model.salt, model.ids = salt, ids
            self.compute(model)
        else:
            assert not model.sequence.cached_tokens
            self.write(model, 0)
        return model

    def compute(self, model: Model) -> None:
        """Writes K and V of a new sequence that are not there; what is there must be the same."""
        assert model.salt
        assert model.ids is not None
        cached, states = model.sequence.cached_tokens, self.computed(model, model.length)
        assert cached <= self.most_cached(model.salt, model.ids), "nobody has made that known"
        model.content[:, :cached] = states[:, :cached]
        self.put(model, cached, states[:, cached:])
        assert self.holds(model, model), "another's K and V"

    def end(self, model: Model) -> None:
        self.live.remove(model)
        self.outcome(model.sequence.free, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), priority=st.sampled_from([35, 35, 0, 80]))
    def commit(self, data: st.DataObject, priority: int) -> None:
        known = [number for number, model in enumerate(self.live) if model.salt]
        numbers = st.integers(0, len(self.live) - 1)
        model = self.live[data.draw(st.sampled_from(known) | numbers if known else numbers)]
        tokens = max(model.length - data.draw(st.sampled_from([0, 0, 1, 7])), 0)
        if model.salt is None:
            self.outcome(lambda: model.sequence.commit([0] * tokens), vmmkv.ArgumentError)
        else:
            assert model.ids is not None
            self.make_known(model, model.ids[:tokens], priority)

    def make_known(self, model: Model, ids: str, priority: int = 35) -> None:
        """Commits the first tokens of a sequence."""
        assert model.salt
        retention = [vmmkv.Retention(priority=priority)]
        if not model.start:
            self.known.add((model.salt, ids))  # also if it is interrupted
        self.may_share = True
        commit = lambda: model.sequence.commit([*ids.encode()], retention=retention)  # noqa: E731
        self.outcome(commit, vmmkv.UnsupportedError if model.start else None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        is_interrupted = bool(self.interrupt_at)
        super().reorder(data)
        for model in self.live if is_interrupted else []:
            key = model.sequence.key
            if key is None:  # it makes nothing known that may be another's
                model.salt = model.ids = None
            elif key.salt != model.salt:
                assert model.start == model.length, "K and V of another salt"  # of no tokens nobody can tell
                model.salt, model.ids = key.salt, ""


@pytest.mark.parametrize("kind", [{}, {"large_frames": True, "budget": 90}], ids=str)
def test_any_operations_in_any_order(device: str, kind: dict[str, Any]) -> None:
    run(PrefixMachine, device, kind)
