"""Salts, adapters and tenants: which values are accepted, and which names routers hear of blocks under them."""

from __future__ import annotations

import enum
import hashlib
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vmmkv
from vmmkv.events import EventLog, salt_of
from vmmkv.events.log import Link
from vmmkv.events.naming import told_names

Names = tuple[str | None, str | int | None, str | int | None]


def make(**options: Any) -> vmmkv.KVCache:
    layout = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
    return vmmkv.KVCache(layout, 4, 60, max_bytes="1MiB", device="cpu", page_size=4096, **options)


def hashes(names: Names, ids: list[int], size: int) -> list[int]:
    """What events call the blocks of tokens under salt, adapter and tenant."""
    return [*Link.root(told_names(*names), size).follow(np.array(ids), size).hashes]


def chained(root: bytes, ids: list[int], size: int) -> list[int]:
    """What the guide says that these are, from the bytes of the root on."""
    found, digest = [], hashlib.sha256(root).digest()
    for block in np.array(ids[: len(ids) // size * size], "<i8").reshape(-1, size):
        digest = hashlib.sha256(digest + block.tobytes()).digest()
        found.append(int(digest[-8:].hex(), 16))
    return found


@pytest.mark.parametrize(
    ("names", "size", "root"),
    [
        ((None, None, None), 4, b"vmmkvn0:n0:n0:i1:4"),
        (("chat", None, 7), 16, b"vmmkvs4:chatn0:i1:7i2:16"),
        (("", "", ""), 16, b"vmmkvs0:s0:s0:i2:16"),
        ((None, 0, -(2**100)), 3, b"vmmkvn0:i1:0i32:-1267650600228229401496703205376i1:3"),
        (("\U0001fae8", "étéX", None), 4, b"vmmkvs4:\xf0\x9f\xab\xa8s6:\xc3\xa9t\xc3\xa9Xn0:i1:4"),
        (("s0:n0:", "'\"\\\n\0", None), 4, b"vmmkvs6:s0:n0:s5:'\"\\\n\0n0:i1:4"),
    ],
    ids=range(6),
)
def test_blocks_are_named_as_the_guide_says(names: Names, size: int, root: bytes) -> None:
    ids = np.random.default_rng().integers(0, 1 << 32, 100).tolist()
    assert hashes(names, ids, size) == chained(root, ids, size)


ODD_TEXT = st.sampled_from(["[null, null]", '["x", null]', '[null, "x"]'])
TEXT = st.text('x"[], nul:0s1\\\U0001fae8', max_size=9) | ODD_TEXT
NAME = st.none() | TEXT | st.integers(-3, 20)
ADAPTER = st.none() | TEXT | st.integers(0, 20)


@given(*2 * [st.tuples(st.none() | TEXT, ADAPTER, NAME)])
def test_other_names_give_other_blocks_and_other_salts(one: Names, other: Names) -> None:
    ids = [1, 2]
    assert (hashes(one, ids, 2) == hashes(other, ids, 2)) == (one == other)
    apart = (one[0], one[2]) != (other[0], other[2])
    assert (salt_of(one[0], one[2]) != salt_of(other[0], other[2])) == apart


NO_NAMES: dict[str, Any] = {"salt": None, "adapter": None, "tenant": None}


class Number(enum.IntEnum):
    ONE = 1


class Text(enum.StrEnum):
    X = "x"


ODD = [
    *(True, 1.0, 1j, (1,), ["x"], frozenset("a"), {}, object(), Decimal(1), Fraction(1), np.int64(1), np.True_),
    *("a\ud800", "\udcff", 1 << 200, -(1 << 128)),
]


@pytest.mark.parametrize("kind", ["salt", "adapter", "tenant"])
@pytest.mark.parametrize("value", ODD, ids=lambda value: ascii(value)[:20])
def test_what_is_no_name_is_refused(kind: str, value: Any) -> None:
    """Of numbers that are equal in Python, and of text that cannot be encoded, no two would share what is known."""
    with make() as cache, make(event_log=EventLog()) as telling:
        calls = [
            lambda: cache.sequence(token_ids=[1, 2], **{kind: value}),
            lambda: cache.sequence(token_ids=[1, 2], reuse=False, **{kind: value}),
            lambda: cache.shared_pages([1, 2], **{kind: value}),
            lambda: telling.sequence(token_ids=[1, 2], **{kind: value}),
            lambda: told_names(**NO_NAMES | {kind: value}),
        ]
        if kind == "tenant":
            calls += [
                lambda: cache.sequence(5, tenant=value),
                lambda: cache.sequence(tenant=value),
                lambda: cache.receive(0, tenant=value),
            ]
        if kind != "adapter":
            calls += [lambda: salt_of(**{"salt": None, kind: value})]
        for call in calls:
            with pytest.raises(vmmkv.ArgumentError, match=kind):
                call()
        assert cache.stats().rows["live"] == telling.stats().rows["live"] == 0


@pytest.mark.parametrize("kind", ["salt", "adapter", "tenant"])
def test_text_bytes_and_numbers_are_kept_apart_and_subclasses_are_their_plain_values(kind: str) -> None:
    ids, values = np.random.default_rng().integers(0, 1000, 24), [None, "1", b"1", 1, "", b"", 0, -1, "é", "é".encode()]
    for value, other in product(values, values):
        with make() as cache:
            with cache.sequence(token_ids=ids, **{kind: value}) as first:
                first.commit(ids)
            with cache.sequence(token_ids=ids, **{kind: other}) as second:
                assert (second.cached_tokens == 23) == (value is other)
    for value, other in [("x", Text.X), (1, Number.ONE), ("x", np.str_("x")), (b"x", np.bytes_(b"x"))]:
        with make() as cache:
            with cache.sequence(token_ids=ids, **{kind: value}) as first:
                first.commit(ids)
            with cache.sequence(token_ids=ids, **{kind: other}) as second:
                assert second.cached_tokens == 23
