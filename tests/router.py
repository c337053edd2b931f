"""A router for tests: what it makes of events, in either engine's words, read by structs of these engines' schemas."""

from __future__ import annotations

from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")

from vmmkv.events import Event, vllm  # noqa: E402

Hash = int | bytes


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's batch, the same in all versions."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """vLLM 0.23's: positions count."""


class MapEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """vLLM's since 0.24, with the fields of 0.29."""


def schema(base: type[msgspec.Struct], *later: str) -> Any:
    """The three events of vLLM as structs; `later` are fields that came after 0.23, for blocks stored and removed."""
    optional = [(name, str | None, None) for name in later]
    stored = [
        ("block_hashes", list[Hash]),
        ("parent_block_hash", Hash | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ("group_idx", int | None, None),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None),
    ]
    removed = [("block_hashes", list[Hash]), ("medium", str | None), ("group_idx", int | None, None)]
    kinds = {"BlockStored": stored + optional, "BlockRemoved": removed + optional, "AllBlocksCleared": []}
    stored_type, removed_type, cleared_type = (
        msgspec.defstruct(name, fields, bases=(base,), tag=name) for name, fields in kinds.items()
    )
    return msgspec.defstruct(
        "KVEventBatch", [("events", list[stored_type | removed_type | cleared_type])], bases=(Batch,)
    )


ARRAYS = schema(ArrayEvent)
MAPS = schema(MapEvent, "locality", "ownership")


def read(payload: bytes, arrays: bool = False) -> Any:
    """A batch, as vLLM's own structs read it, which also would have written the same bytes."""
    batch = msgspec.msgpack.decode(payload, type=ARRAYS if arrays else MAPS)
    assert msgspec.msgpack.encode(batch) == payload
    return batch


Prefix = tuple[Any, ...]


class Router:
    """What a router knows of a worker: prefixes, by the hashes of their last blocks."""

    def __init__(self) -> None:
        self.prefixes: dict[int, Prefix] = {}
        self.has_missed = False  # so that it may be told of what it does not know

    @property
    def known(self) -> set[Prefix]:
        known = set(self.prefixes.values())
        assert len(known) == len(self.prefixes)
        return known

    def hit(self, key: Prefix, ids: list[int], size: int) -> int:
        """How many of the ids lie in blocks that are known, from the first one on."""
        known, tokens = self.known, size
        while tokens <= len(ids) and (*key, *ids[:tokens]) in known:
            tokens += size
        return tokens - size

    def stored(self, hashes: list[int], parent: int | None, ids: list[int], key: Prefix) -> None:
        if parent is not None and parent not in self.prefixes:
            assert self.has_missed
            return  # as routers do: without the prefix it is no use
        size = len(ids) // len(hashes)
        assert len(ids) == size * len(hashes)
        prefix = key if parent is None else self.prefixes[parent]
        for i, block in enumerate(hashes):
            assert 0 <= block < 1 << 64
            prefix = (*prefix, *ids[i * size : (i + 1) * size])
            assert block not in self.prefixes, "stored twice"
            self.prefixes[block] = prefix

    def removed(self, hashes: list[int]) -> None:
        for block in hashes:
            assert block in self.prefixes or self.has_missed
            self.prefixes.pop(block, None)

    def cleared(self) -> None:
        self.has_missed = True
        self.prefixes.clear()

    def read_vllm(self, events: list[Event], arrays: bool) -> None:
        payload = vllm.encode(events, arrays=arrays)
        for event in read(payload, arrays).events if payload else []:
            match type(event).__name__:
                case "BlockStored":
                    salt = event.extra_keys[0][0] if event.extra_keys else None
                    key = (salt, event.lora_name)
                    assert event.extra_keys is None or event.extra_keys[1:] == [None] * (len(event.block_hashes) - 1)
                    assert event.medium == "GPU"
                    self.stored(event.block_hashes, event.parent_block_hash, event.token_ids, key)
                case "BlockRemoved":
                    self.removed(event.block_hashes)
                case "AllBlocksCleared":
                    self.cleared()
