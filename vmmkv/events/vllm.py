"""Events in vLLM's words, which Dynamo, llm-d and others read: msgpack batches `[time, events, data_parallel_rank]`.

vLLM's `vllm/distributed/kv_events.py` is the schema. Up to 0.23 an event is an array, its name first; since then it is
a map with the name as `type`, and what is None and optional is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .log import Event, Removed, Stored
from .naming import salt_of

MEDIUM = "GPU"
"""Where blocks are: they are read there, whether or not they wait on the host until then."""
OPTIONAL = "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"
"""Fields that a map leaves out if they are None."""


def encode(events: Sequence[Event], *, data_parallel_rank: int | None = None, arrays: bool = False) -> bytes | None:
    """Packs events into one batch.

    `Stored` is a `BlockStored`, `Removed` a `BlockRemoved`. `Cleared`, `Created` and `Dropped` are an
    `AllBlocksCleared`: what a router knew of this worker is wrong, or may be.

    Args:
        events: in order; the batch has the time of the last one.
        data_parallel_rank: the rank of the cache, among several; None: there is only one.
        arrays: whether to write events as vLLM did up to 0.23.

    Returns:
        The bytes, or None without events.
    """
    told: list[Any] = [_told(event) for event in events]
    if arrays:
        told = [[*each.values()] for each in told]
    else:
        told = [{key: each[key] for key in each if key not in OPTIONAL or each[key] is not None} for each in told]
    return msgspec.msgpack.encode([events[-1].time, told, data_parallel_rank]) if told else None


def _told(event: Event) -> dict[str, Any]:
    """The name and all fields of vLLM's event, in the order of an array."""
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": MEDIUM, "group_idx": None}
    if not isinstance(event, Stored):
        return {"type": "AllBlocksCleared"}
    blocks, adapter = event.blocks, event.blocks.adapter
    salt = salt_of(blocks.salt, blocks.tenant) if blocks.start == 0 else None
    return {
        "type": "BlockStored",
        "block_hashes": blocks.hashes,
        "parent_block_hash": blocks.parent,
        "token_ids": blocks.ids.tolist(),
        "block_size": blocks.size,
        "lora_id": adapter if isinstance(adapter, int) else None,
        "medium": MEDIUM,
        "lora_name": None if adapter is None else str(adapter),  # all that routers tell adapters by
        "extra_keys": None if salt is None else [[salt], *[None] * (len(blocks.hashes) - 1)],
        "group_idx": None,
        "kv_cache_spec_kind": None,
        "kv_cache_spec_sliding_window": None,
    }
