"""Events in vLLM's words, which Dynamo, llm-d and others read: msgpack batches `[time, events, data_parallel_rank]`.

vLLM's `vllm/distributed/kv_events.py` is the schema. Up to 0.23 an event is an array, its name first; since then it is
a map with the name as `type`, and what is None and optional is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from .chain import Blocks
from .kinds import Cleared, Created, Dropped, Event, Removed, Stored, Tier, Updated
from .naming import salt_of

MEDIUM: dict[Tier, str] = {"device": "GPU", "host": "CPU"}

Fields = dict[str, Any]


def encode(events: Sequence[Event], *, data_parallel_rank: int | None = None, arrays: bool = False) -> bytes | None:
    """Packs events into one batch.

    `Stored` is a `BlockStored`, `Removed` a `BlockRemoved`. `Updated` is a `BlockStored` in the new tier and a
    `BlockRemoved` from the old one. `Cleared`, `Created` and `Dropped` are an `AllBlocksCleared`: what a router knew of
    this worker is wrong, or may be.

    Args:
        events: in order; the batch has the time of the last one.
        data_parallel_rank: whose events they are, among several ranks; None: there is only one.
        arrays: whether to write events as vLLM did up to 0.23.

    Returns:
        The bytes, or None if vLLM has no event for any of these: it has no priorities.
    """
    told = [_as_array(*each) if arrays else _as_map(*each) for event in events for each in _told(event)]
    return msgspec.msgpack.encode([events[-1].time, told, data_parallel_rank]) if told else None


def _told(event: Event) -> Iterator[tuple[str, Fields, Fields]]:
    """Name, fields, and optional fields of what vLLM would tell."""
    match event:
        case Cleared() | Created() | Dropped():
            yield "AllBlocksCleared", {}, {}
        case Stored():
            yield _stored(event.blocks, event.tier)
        case Removed():
            yield _removed(event.hashes, event.tier)
        case Updated(tier=(old, new)):
            yield _stored(event.blocks, new)  # first: a router that knows it nowhere forgets what it is
            yield _removed(event.blocks.hashes[::-1], old)


def _stored(blocks: Blocks, tier: Tier) -> tuple[str, Fields, Fields]:
    numbered = isinstance(blocks.adapter, int)
    fields = {
        "block_hashes": blocks.hashes,
        "parent_block_hash": blocks.parent,
        "token_ids": blocks.ids.tolist(),
        "block_size": blocks.size,
        "lora_id": blocks.adapter if numbered else None,
        "medium": MEDIUM[tier],
        "lora_name": str(blocks.adapter) if numbered else blocks.adapter,  # all that routers tell adapters by
    }
    salt = salt_of(blocks.salt, blocks.tenant) if blocks.start == 0 else None
    optional = {
        "extra_keys": [[salt], *[None] * (len(blocks.hashes) - 1)] if salt is not None else None,
        "group_idx": None,
        "kv_cache_spec_kind": None,
        "kv_cache_spec_sliding_window": None,
    }
    return "BlockStored", fields, optional


def _removed(hashes: tuple[int, ...], tier: Tier) -> tuple[str, Fields, Fields]:
    return "BlockRemoved", {"block_hashes": hashes, "medium": MEDIUM[tier]}, {"group_idx": None}


def _as_map(name: str, fields: Fields, optional: Fields) -> Fields:
    return {"type": name} | fields | {key: value for key, value in optional.items() if value is not None}


def _as_array(name: str, fields: Fields, optional: Fields) -> list[Any]:
    return [name, *fields.values(), *optional.values()]
