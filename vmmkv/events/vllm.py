"""Events in vLLM's words, which Dynamo, llm-d and others read: msgpack batches `[time, events, data_parallel_rank]`.

vLLM's `vllm/distributed/kv_events.py` is the schema. Up to 0.23 an event is an array, its name first; since then it is
a map with the name as `type`, and what is None and optional is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .chain import Blocks
from .kinds import Event, Removed, Stored
from .naming import salt_of

MEDIUM = "GPU"
"""Where blocks are: they are read there, whether or not they wait on the host until then."""

Fields = dict[str, Any]


def encode(events: Sequence[Event], *, data_parallel_rank: int | None = None, arrays: bool = False) -> bytes | None:
    """Packs events into one batch.

    `Stored` is a `BlockStored`, `Removed` a `BlockRemoved`. `Cleared`, `Created` and `Dropped` are an
    `AllBlocksCleared`: what a router knew of this worker is wrong, or may be.

    Args:
        events: in order; the batch has the time of the last one.
        data_parallel_rank: whose events they are, among several ranks; None: there is only one.
        arrays: whether to write events as vLLM did up to 0.23.

    Returns:
        The bytes, or None without events.
    """
    told = [_as_array(*each) if arrays else _as_map(*each) for each in map(_told, events)]
    return msgspec.msgpack.encode([events[-1].time, told, data_parallel_rank]) if told else None


def _told(event: Event) -> tuple[str, Fields, Fields]:
    """Name, fields, and optional fields of vLLM's event."""
    if isinstance(event, Stored):
        return _stored(event.blocks)
    if isinstance(event, Removed):
        return "BlockRemoved", {"block_hashes": event.hashes, "medium": MEDIUM}, {"group_idx": None}
    return "AllBlocksCleared", {}, {}


def _stored(blocks: Blocks) -> tuple[str, Fields, Fields]:
    numbered = isinstance(blocks.adapter, int)
    fields = {
        "block_hashes": blocks.hashes,
        "parent_block_hash": blocks.parent,
        "token_ids": blocks.ids.tolist(),
        "block_size": blocks.size,
        "lora_id": blocks.adapter if numbered else None,
        "medium": MEDIUM,
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


def _as_map(name: str, fields: Fields, optional: Fields) -> Fields:
    return {"type": name} | fields | {key: value for key, value in optional.items() if value is not None}


def _as_array(name: str, fields: Fields, optional: Fields) -> list[Any]:
    return [name, *fields.values(), *optional.values()]
