"""The longest sequence reserved for each: as many slots as the budget has room for."""

from __future__ import annotations

import torch

from vmmkv import KVLayout

from .backend import Rows, Work


class StaticKV:
    """A `KVBackend`."""

    block_table = None

    def __init__(
        self, layout: KVLayout, max_sequences: int, max_seq_len: int, max_bytes: int, device: torch.device
    ) -> None:
        slots = min(max_bytes // (max_seq_len * layout.token_bytes), max_sequences)
        shape = layout.num_layers, 2, slots, max_seq_len, layout.num_kv_heads, layout.head_dim
        self.slots = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.max_seq_len = max_seq_len
        self.free_rows = list(range(slots))

    def fits(self, tokens: int, spare: int = 0) -> bool:
        return tokens <= self.max_seq_len and bool(self.free_rows)

    def admit(self, tokens: int) -> int:
        return self.free_rows.pop()

    def extend(self, rows: Rows, counts: Rows | int) -> bool:
        return True

    def free(self, rows: list[int]) -> None:
        self.free_rows += rows

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.slots[layer]
        return k, v

    def physical_bytes(self) -> int:
        return self.slots.nbytes

    def work(self) -> Work:
        return Work()

    def give_back(self) -> None:
        """Nothing: the slots are one tensor."""

    def close(self) -> None:
        del self.slots
