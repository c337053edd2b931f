"""Events in TensorRT-LLM's words: the dictionaries that its `get_kv_cache_events` returns, which Dynamo reads.

`KVCacheEventSerializer` in TensorRT-LLM's `tensorrt_llm/_utils.py` is the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from .chain import Blocks
from .kinds import Cleared, Created, Dropped, Event, Removed, Stored, Tier, Updated
from .naming import salt_of

CACHE_LEVEL: dict[Tier, int] = {"device": 0, "host": 1}
HASH_ALGORITHM = "vmmkv_sha256_64"
"""None of TensorRT-LLM's: who computes hashes, and compares, has to know this one."""


class Encoder:
    """Makes dictionaries, and numbers them: ids are missing where events were dropped.

    In TensorRT-LLM a block lies in one place. So a block that lies on the device and on the host is reported on the
    device only.

    TensorRT-LLM has no event for a cleared cache: all blocks that this encoder has reported are removed.
    """

    def __init__(self, window_size: int, attention_dp_rank: int | None = None) -> None:
        """Begins at id 0.

        Args:
            window_size: how many tokens attention looks back: `max_seq_len` without a window.
            attention_dp_rank: whose events they are, where attention runs in several ranks; None: it runs in one.
        """
        self._common: dict[str, Any] = {"window_size": window_size, "hash_algo": HASH_ALGORITHM}
        if attention_dp_rank is not None:
            self._common["attention_dp_rank"] = attention_dp_rank
        self._next_id = 0
        self._known: dict[int, set[Tier]] = {}
        """Where blocks lie that were told of, by hash."""

    def encode(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Makes dictionaries of events, in order. `Updated` becomes one for each block; `Cleared` and `Dropped` remove
        all that is known: of what was dropped nobody knows whether it is still there."""
        encoded = []
        for event in events:
            if isinstance(event, Dropped):
                self._next_id += event.count
            for data in self._data(event):
                encoded.append({"event_id": self._next_id, "data": data} | self._common)
                self._next_id += 1
        return encoded

    def _data(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Created():
                yield {"type": "created", "num_blocks_per_cache_level": [event.device_blocks, event.host_blocks]}
            case Stored():
                yield from self._stored(event)
            case Removed():
                yield from self._removed(event)
            case Updated():
                if event.tier:
                    self._known.update((each, {event.tier[1]}) for each in event.blocks.hashes)
                levels = event.tier and (CACHE_LEVEL[event.tier[0]], CACHE_LEVEL[event.tier[1]])
                for block_hash in event.blocks.hashes:
                    yield _updated(block_hash, levels, event.priority)
            case Cleared() | Dropped():
                if self._known:
                    yield _removed(self._known)
                self._known = {}

    def _stored(self, event: Stored) -> Iterator[dict[str, Any]]:
        """What is new, and what has come to the device. Blocks that are known have all before them known."""
        hashes = event.blocks.hashes
        known = next((at for at, each in enumerate(hashes) if each not in self._known), len(hashes))
        for block_hash in hashes[:known]:
            if "device" not in self._known[block_hash] and event.tier == "device":
                yield _updated(block_hash, (CACHE_LEVEL["host"], CACHE_LEVEL["device"]), None)
        for block_hash in hashes:
            self._known.setdefault(block_hash, set()).add(event.tier)
        if known < len(hashes):
            yield _stored(event, known)

    def _removed(self, event: Removed) -> Iterator[dict[str, Any]]:
        """What is gone, and what is on the host only."""
        gone = []
        for block_hash in event.hashes:
            tiers = self._known.get(block_hash, set())
            if len(tiers) < 2:
                self._known.pop(block_hash, None)
                gone.append(block_hash)
                continue
            tiers.discard(event.tier)
            if event.tier == "device":
                yield _updated(block_hash, (CACHE_LEVEL["device"], CACHE_LEVEL["host"]), None)
        if gone:
            yield _removed(gone)


def _removed(hashes: Iterable[int]) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def _updated(block_hash: int, levels: tuple[int, int] | None, priority: tuple[int, int] | None) -> dict[str, Any]:
    return {
        "type": "updated",
        "block_hash": block_hash,
        "cache_level": _difference(levels),
        "priority": _difference(priority),
    }


def _stored(event: Stored, first: int) -> dict[str, Any]:
    """Of the blocks from one on."""
    blocks = event.blocks
    salt = salt_of(blocks.salt, blocks.tenant)
    stored = {
        "type": "stored",
        "parent_hash": blocks.hashes[first - 1] if first else blocks.parent,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": block_hash,
                "tokens": tokens,
                "cache_level": CACHE_LEVEL[event.tier],
                "priority": event.priority,
                "mm_keys": [],
                "cache_salt": salt,
            }
            for block_hash, tokens in islice(zip(blocks.hashes, _tokens(blocks)), first, None)
        ],
    }
    # TensorRT-LLM itself does not say it; Dynamo reads it from here.
    return stored if blocks.adapter is None else stored | {"lora_name": str(blocks.adapter)}


def _tokens(blocks: Blocks) -> Iterator[list[dict[str, Any]]]:
    for ids in blocks.ids.reshape(-1, blocks.size).tolist():
        yield [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in ids]


def _difference(values: tuple[int, int] | None) -> dict[str, Any] | None:
    return values and {"type": "event_diff", "old_value": values[0], "new_value": values[1]}
