"""A random machine for the prefix tree: the machine of the books, with a tree as each cache's guest.

The byte of a token is a function of a key and of all ids up to the token. So a sequence that begins with tokens of
other ids, or of another key, reads wrong bytes. Hits are compared with a plain model, which knows what was committed,
and what live sequences have of it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from core_machine import Machine, Model

from vmmkv.core.cache import Cache
from vmmkv.errors import VmmkvError
from vmmkv.layout import KVLayout
from vmmkv.prefix import entries
from vmmkv.prefix.prefixes import TOKENS, WORDS, Key, Prefixes
from vmmkv.prefix.retention import Retention
from vmmkv.prefix.tables import HEAP, HOLDER, NODE, PART

Ids = list[int]


@dataclass(eq=False)
class Known(Model):
    """A sequence with ids; `names` is its key, and None for one that the tree has not started."""

    names: Key | None = None
    ids: Ids = field(default_factory=list)
    committed: int = 0


def bytes_of(key: Key, ids: Ids) -> list[int]:
    """The byte of each token."""
    found, mixed = [], key.number + 1
    for each in ids:
        mixed = (mixed * 1_000_003 + each + 17) % 2_147_483_647
        found.append(mixed % 254 + 1)
    return found


def common(one: Ids, other: Ids) -> int:
    """The number of ids that two lists begin with alike."""
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def some_ids(random: Random, known: list[Ids], most: int) -> Ids:
    """Ids that may begin like known ones."""
    begin = random.choice(known) if known and random.random() < 0.8 else []
    begin = begin[: random.choice([len(begin), random.randint(0, len(begin))])]
    return (begin + [random.randrange(3) for _ in range(random.randint(1, 60))])[:most]


def table(address: int, count: int, dtype: Any = np.int64) -> Any:
    """The table at an address."""
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (max(count, 1) * dtype.itemsize)).from_address(int(address)), dtype)


class Tables:
    """The tables of a tree, and checks of its invariants."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.state = t = prefixes.state[0]
        self.prefixes, self.fresh = prefixes, int(t["fresh"])
        self.nodes = table(t["nodes_at"], self.fresh, NODE)
        self.slots = table(t["slots_at"], self.fresh * int(t["width"])).reshape(self.fresh, -1)
        self.ids = table(t["ids_at"], self.fresh * int(t["grain"])).reshape(self.fresh, -1)
        self.holders = table(t["holders_at"], int(t["num_rows"]), HOLDER)
        self.parts = table(t["parts_at"], int(t["ranges"]), PART)
        self.free = set()
        node = int(t["free"])
        while node:
            self.free.add(node)
            node = int(self.nodes[node]["next"])

    def held(self) -> Counter[int]:
        """References to frames."""
        there = [node for node in range(1, self.fresh) if node not in self.free]
        return Counter(int(slot) - 1 for node in there for slot in self.slots[node] if slot)

    def children(self, node: int) -> list[int]:
        return self.ring(self.nodes, int(self.nodes[node]["child"]), 0)

    def rows(self, node: int) -> list[int]:
        return [row - 1 for row in self.ring(self.holders, int(self.nodes[node]["holder"]), 1)]

    def ring(self, records: Any, head: int, base: int) -> list[int]:
        """The items of a ring, whose records begin with the item `base`."""
        found = [head] if head else []
        while head and (following := int(records[found[-1] - base]["next"])) != head:
            assert int(records[following - base]["prev"]) == found[-1]
            found.append(following)
        return found

    def check(self) -> None:
        t, nodes, seen = self.state, self.nodes, 0
        stack = [(child, 0) for child in self.children(0)]
        assert self.nodes[0]["children"] == len(stack)
        in_order = set()
        while stack:
            node, _ = stack.pop()
            seen += 1
            n, children, rows = nodes[node], self.children(node), self.rows(node)
            assert node not in self.free
            assert n["children"] == len(children)
            assert all(nodes[child]["parent"] == node and nodes[child]["begin"] == n["end"] for child in children)
            firsts = [int(nodes[child]["first"]) for child in children]
            assert len({*firsts}) == len(firsts)
            is_root = n["parent"] == 0
            if not is_root:
                assert n["base"] <= n["begin"] < n["end"] <= n["limit"]
                assert n["first"] == self.ids[node][n["begin"] - n["base"]]
            full = int(np.count_nonzero(self.slots[node]))
            assert n["full"] == full
            live = sum(not self.holders[row]["parked"] for row in rows)
            assert n["live"] == live
            assert n["rows"] == len(rows) + sum(int(nodes[child]["rows"]) for child in children)
            with_rows = [nodes[child]["rows"] > 0 for child in children]
            assert with_rows == sorted(with_rows, reverse=True)
            known = sum(int(nodes[child]["known"]) for child in children)
            clean = all(n["end"] * part["record"] % t["page_size"] == 0 for part in self.parts)
            assert n["known_below"] == known
            assert is_root or n["known"] == (full > 0 or known > 0)
            assert is_root or n["told"] == (known > 0 or (full > 0 and clean))
            assert children or full or rows or n["pins"] or n["host"]
            assert n["end"] == n["limit"] or full == 0
            assert n["end"] == n["limit"] or rows or n["pins"] or len(children) > 1
            assert n["end"] == n["limit"] or n["host"] == 0
            below = known or any(with_rows)
            if not is_root and (full or rows) and not (below or live or n["pins"]):
                in_order.add(node)
            for row in rows:
                assert self.holders[row]["node"] == node
            stack += [(child, node) for child in children]
        assert seen == t["used"] == self.fresh - 1 - len(self.free)
        for name in ("order", "timers"):
            heap = table(t[name], 1, HEAP)[0]
            items = table(heap["items_at"], int(heap["count"]))[: heap["count"]].tolist()
            places = table(heap["places_at"], int(heap["room"]))
            assert {*items} == {node for node in in_order if name == "order" or nodes[node]["expires"]}
            keys = [int(nodes[node]["priority"]) << 48 | int(nodes[node]["used"]) for node in items]
            keys = keys if name == "order" else [int(nodes[node]["expires"]) for node in items]
            assert all(keys[(place - 1) // 2] <= keys[place] for place in range(1, len(items)))
            assert [places[node] for node in items] == [*range(1, len(items) + 1)]
            assert np.count_nonzero(places[: self.fresh]) == len(items)
        assert t["held"] == sum(self.held().values())
        assert t["pages"] == sum(int(self.prefixes.cache.pool.frames["pages"][frame]) for frame in self.held())


class View:
    """What a router knows, from drained events alone."""

    def __init__(self) -> None:
        self.position = 0
        self.clear()

    def clear(self) -> None:
        self.nodes: dict[int, tuple[int, int]] = {}
        self.children: dict[tuple[int, int], dict[tuple[int, ...], int]] = {}
        self.tokens: dict[int, dict[int, tuple[int, ...]]] = {}
        self.roots: dict[object, dict[int, tuple[int, ...]]] = {}

    def follow(self, prefixes: Prefixes) -> None:
        first, changes = prefixes.ring.drain()
        assert first == self.position
        self.position += len(changes)
        for each in changes:
            if each.kind == "cleared":
                self.clear()
            elif each.kind == "stored":
                before = self.roots.setdefault(each.names, {}) if each.start == 0 else self.tokens[each.parent]
                assert each.node not in self.tokens
                self.tokens[each.node] = {}
                before[each.node] = tuple(each.ids.tolist())
                self.nodes[each.node] = (each.parent, each.start)
            else:
                assert not self.tokens.pop(each.node), "removed before what follows it"
                owners = [*self.roots.values(), *self.tokens.values()]
                assert sum(owner.pop(each.node, None) is not None for owner in owners) == 1
        if changes:
            self.follow(prefixes)

    def find(self, names: object, ids: Ids) -> int:
        """How many of the first tokens are there."""
        level, found = self.roots.get(names, {}), 0
        while True:
            best = max(((common([*own], ids[found:]), node, len(own)) for node, own in level.items()), default=None)
            if best is None or best[0] == 0:
                return found
            found += best[0]
            if best[0] < best[2]:
                return found
            level = self.tokens[best[1]]


class PrefixMachine(Machine):
    """Random operations on caches with a prefix tree each."""

    often = ("do_begin_here", "do_hit", "do_commit", "do_free", "do_adopt_kept", "do_extend", "do_look")

    def __init__(self, random: Random, *, faults: bool = True) -> None:
        super().__init__(random, faults=faults)
        self.pool.evict.clear()
        self.now = 0
        self.trees = [self.new_tree(cache) for cache in self.caches]
        self.views = [View() for _ in self.caches]
        self.names = [tree.key(salt=salt, tenant=tenant) for tree in self.trees[:1] for salt, tenant in
                      ((None, None), ("a", None), (None, 3))]  # fmt: skip
        for tree in self.trees[1:]:
            assert self.names == [tree.key(), tree.key(salt="a"), tree.key(tenant=3)]
        self.ever: list[dict[Key, list[Ids]]] = [{key: [] for key in self.names} for _ in self.caches]
        self.queries = 0

    def new_tree(self, cache: Cache) -> Prefixes:
        return Prefixes(cache, events=1 << 14, clock=lambda: self.now)

    def new_cache(self) -> Cache:
        random = self.random
        layout = KVLayout(
            random.choice([1, 3]), 1, random.choice([4, 16, 36, 64, 600]), torch.float32,
            layers_per_range=random.choice([None, None, 1, 2]),
        )  # fmt: skip
        return Cache(
            self.pool, layout.record_bytes, random.choice([4, 7, 12]), random.choice([40, 400]),
            large=random.random() < 0.5,
            reserved=random.choice([0, 0, 3]), overread=random.choice([0, 0, 5]), scrub=random.random() < 0.15,
            lookahead=random.choice([0, 20]),
        )  # fmt: skip

    # ------------------------------------------------------------------ ids and bytes

    def some_ids(self, count: int) -> Ids:
        return [self.random.choice((1, 1, 1, 1, 1, 1, 2)) for _ in range(count)]

    def write(self, model: Model, first: int) -> None:
        if isinstance(model, Known) and model.names is not None:
            model.ids = model.ids[:first] + self.some_ids(len(model.tokens) - first)
            model.tokens[first:] = bytes_of(model.names, model.ids)[first:]
        super().write(model, first)

    def truncated(self, model: Known) -> None:
        """Follows a truncation in what is known."""
        model.ids = model.ids[: len(model.tokens)]
        model.committed = min(model.committed, len(model.tokens))

    def prompt(self, index: int) -> tuple[Key, Ids]:
        """Ids that may begin like others."""
        key, most = self.random.choice(self.names), self.caches[index].max_seq_len
        ids: Ids = []
        live = [each for each in self.models[index] if isinstance(each, Known) and each.committed < len(each.ids)]
        if live and self.random.random() < 0.3:  # the new sequence has to compute them, too
            model = self.random.choice(live)
            key, ids = model.names or key, model.ids
        elif self.ever[index][key] and self.random.random() < 0.85:
            ids = self.random.choice(self.ever[index][key][-20:])
            ids = ids[: self.random.choice([len(ids), len(ids), self.random.randint(0, len(ids))])]
        return key, (ids + self.some_ids(self.some()))[:most]

    def bounds(self, index: int, key: Key, ids: Ids) -> tuple[int, int]:
        """At least, and at most, how many of the first ids can be found."""
        lower = upper = 0
        for model in self.models[index]:
            is_there = isinstance(model, Known) and model.names == key and model.start == 0
            if is_there and not self.caches[index].rows["broken"][model.sequence.row]:
                lower = max(lower, common(model.ids[: model.committed], ids))
        for each in self.ever[index][key]:
            upper = max(upper, common(each, ids))
        return lower, upper

    # ------------------------------------------------------------------ operations

    def check(self) -> None:
        held: Counter[int] = Counter()
        for tree, view in zip(self.trees, self.views):
            tables = Tables(tree)
            tables.check()
            held += tables.held()
            view.follow(tree)
        self.held = held
        super().check()

    def held_frames(self) -> Counter[int]:
        return self.held

    def do_begin_here(self, index: int) -> None:
        key, ids = self.prompt(index)
        stream = self.device.current = self.random.choice(self.device.streams[:3])
        _, upper = self.bounds(index, key, ids[:-1])
        whole = self.random.random() < 0.7
        sequence, cached = self.trees[index].start(ids, key, whole=whole, expected=self.random.choice([0, 0, 30]))
        assert cached <= upper
        self.done["hits"] += cached > 0
        self.done["cached"] += cached
        self.done["exact"] += cached == upper > 0
        tokens = bytes_of(key, ids)[: len(ids) if whole else cached]
        assert sequence.length == len(tokens)
        model = Known(sequence, stream, key.tenant, tokens, names=key, ids=ids[: len(tokens)], committed=cached)
        self.models[index].append(model)
        Machine.write(self, model, cached)
        if self.random.random() < 0.5:
            self.read(model, stream)

    def do_look(self, index: int) -> None:
        """A look-up finds what live sequences have of the ids, and what routers were told."""
        for _ in range(4):
            key, ids = self.prompt(index)
            lower, upper = self.bounds(index, key, ids)
            tree, given, found = self.trees[index], array("q", ids), array("q", bytes(8 * WORDS))
            place = given.buffer_info()[0]
            entries.look_up(tree.address, key.number, place, len(ids), found.buffer_info()[0])
            assert lower <= found[TOKENS] <= upper, (lower, found[TOKENS], upper)
            names = next(name for name, each in tree.names.items() if each == key)
            cache, told = self.caches[index], self.views[index].find(names, ids)
            is_even = len({*cache.records}) == 1 and (len(cache.records) == 1 or not cache.state[0]["large"])
            assert told <= found[TOKENS] or not is_even, (told, found[TOKENS])  # a frame of one range may be too large
            self.queries += 1

    def do_commit(self, index: int) -> None:
        model = self.pick(index)
        if not isinstance(model, Known) or model.names is None or model.start or not model.tokens:
            return
        tokens, tree = self.random.randint(1, len(model.tokens)), self.trees[index]
        tokens = len(model.tokens) if self.random.random() < 0.5 else tokens
        retention = []
        if self.random.random() < 0.3:
            start = self.random.randrange(tokens)
            retention = [Retention(start, None, self.random.choice([0, 35, 80]), self.random.choice([None, 1e-8]))]
        known = tree.commit(model.sequence, model.ids[:tokens], retention)
        assert known >= tokens
        model.committed = max(model.committed, tokens)
        self.ever[index][model.names].append(model.ids[: model.committed])
        if tokens > 1 and model.committed:
            wrong = model.ids[:tokens]
            wrong[self.random.randrange(min(tokens, model.committed))] += 5
            try:
                tree.commit(model.sequence, wrong)
            except ValueError:
                self.done["refused"] += 1
            else:
                raise AssertionError("other ids were committed")

    def do_truncate(self, index: int) -> None:
        if model := self.pick(index):
            length = self.random.randint(model.start, len(model.tokens))
            if self.random.random() < 0.5:
                length = max(length, len(model.tokens) - 3)
            model.sequence.truncate(length)
            del model.tokens[length:]
            if isinstance(model, Known):
                self.truncated(model)

    def do_fork(self, index: int) -> None:
        model = self.pick(index)
        if model is None:
            return
        if not isinstance(model, Known):
            super().do_fork(index)
            return
        stream = self.device.current = self.random.choice(self.device.streams[:3])
        fork = model.sequence.fork()
        self.trees[index].inherit(fork, model.sequence)
        self.models[index].append(
            Known(fork, stream, model.key, list(model.tokens), model.start, names=model.names, ids=list(model.ids),
                  committed=model.committed)
        )  # fmt: skip

    def do_unshare(self, index: int) -> None:
        if model := self.pick(index):
            token = self.random.randint(model.start, len(model.tokens))
            if isinstance(model, Known):  # also where it fails
                model.committed = min(model.committed, token)
            model.sequence.cache.part(model.sequence.ticket, token)
            Machine.write(self, model, token)

    def do_evict(self, index: int) -> None:
        self.now += self.random.choice([0, 5, 50])
        self.trees[index].evict(self.random.choice([1, 3, 10]))

    def do_clear(self, index: int) -> None:
        if self.random.random() < 0.1:
            with self.pool.lock:
                entries.clear(self.trees[index].address)
            assert not Tables(self.trees[index]).held()
            for model in self.models[index]:
                if isinstance(model, Known):
                    model.committed = 0

    def do_hit(self, index: int) -> None:
        self.do_begin_here(index)

    def do_copy_left(self, index: int) -> None:
        self.do_begin_here(index)

    def do_adopt_kept(self, index: int) -> None:
        """The next turn of a chat, on the row of a sequence that has just ended."""
        model = self.pick(index)
        if isinstance(model, Known) and model.names is not None and model.start == 0 and model.committed:
            self.caches[index].free([model.sequence])
            self.models[index].remove(model)
            ids = (model.ids[: model.committed] + self.some_ids(self.some() + 1))[: self.caches[index].max_seq_len]
            before = int(self.caches[index].state[0]["reused"])
            sequence, cached = self.trees[index].start(ids, model.names)
            self.done["adopted"] += int(self.caches[index].state[0]["reused"]) > before
            model = Known(sequence, model.home, model.key, bytes_of(model.names, ids), names=model.names, ids=ids,
                          committed=cached)  # fmt: skip
            self.models[index].append(model)
            Machine.write(self, model, cached)

    def do_forget(self, index: int) -> None:
        self.do_evict(index)

    # ------------------------------------------------------------------ the end

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for models in self.models:
            for model in models:
                self.read(model, model.home)
        self.device.finish()
        for models in self.models:
            models.clear()
        for cache, tree in zip(self.caches, self.trees):
            cache.sweep()
            tree.close()
            with suppress(VmmkvError):
                cache.close()
        self.pool.trim_to()
        assert self.pool.word("created") == self.device.num_pages == 0
