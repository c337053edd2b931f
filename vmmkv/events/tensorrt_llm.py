"""Events in TensorRT-LLM's words: the dictionaries that its `get_kv_cache_events` returns, which Dynamo reads.

`KVCacheEventSerializer` in TensorRT-LLM's `tensorrt_llm/_utils.py` is the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .kinds import Cleared, Created, Dropped, Event, Removed, Stored
from .naming import salt_of

HASH_ALGORITHM = "vmmkv_sha256_64"
"""None of TensorRT-LLM's: a router that computes hashes itself, and compares, has to know this one."""


class Encoder:
    """Makes dictionaries, and numbers them: ids are missing where events were dropped.

    TensorRT-LLM has no event for a cleared cache: all blocks that this encoder has reported are removed.
    """

    def __init__(self, window_size: int, attention_dp_rank: int | None = None) -> None:
        """Begins at id 0.

        Args:
            window_size: how many tokens attention looks back: `max_seq_len` without a window.
            attention_dp_rank: the rank of the cache, where attention runs in several; None: it runs in one.
        """
        self._common: dict[str, Any] = {"window_size": window_size, "hash_algo": HASH_ALGORITHM}
        if attention_dp_rank is not None:
            self._common["attention_dp_rank"] = attention_dp_rank
        self._next_id = 0
        self._known: set[int] = set()
        """The hashes of blocks that were reported and not removed."""

    def encode(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Makes dictionaries of events, in order. `Cleared` and `Dropped` remove all that is known: some of it may be
        gone."""
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
                yield {"type": "created", "num_blocks_per_cache_level": [event.device_blocks]}
            case Stored():
                self._known.update(event.blocks.hashes)
                yield _stored(event)
            case Removed():
                self._known.difference_update(event.hashes)
                yield {"type": "removed", "block_hashes": list(event.hashes)}
            case Cleared() | Dropped():
                if self._known:
                    yield {"type": "removed", "block_hashes": list(self._known)}
                self._known = set()


def _stored(event: Stored) -> dict[str, Any]:
    blocks = event.blocks
    salt, listed = salt_of(blocks.salt, blocks.tenant), []
    for block_hash, ids in zip(blocks.hashes, blocks.ids.reshape(-1, blocks.size).tolist()):
        tokens = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in ids]
        listed.append(
            {
                "type": "stored_block",
                "block_hash": block_hash,
                "tokens": tokens,
                "cache_level": 0,  # the device
                "priority": event.priority,
                "mm_keys": [],
                "cache_salt": salt,
            }
        )
    stored = {"type": "stored", "parent_hash": blocks.parent, "blocks": listed}
    # TensorRT-LLM itself does not say it; Dynamo reads it from here.
    return stored if blocks.adapter is None else stored | {"lora_name": str(blocks.adapter)}
