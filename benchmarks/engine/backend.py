"""What the engine asks of a KV cache."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.int64]


class KVBackend(Protocol):
    """Where K and V of sequences lie. A sequence is known by its row, of the tensors or of the block table.

    `fits`, `admit`, `extend` and `free` are the cache manager: their host time is what `Schedule` counts.
    """

    block_table: torch.Tensor | None
    """int32 `[max_sequences, max_blocks]` on the device, or None."""

    def fits(self, tokens: int, spare: int = 0) -> bool:
        """Whether there is a row and room for one more sequence of `tokens`, and for `spare` tokens of any."""

    def admit(self, tokens: int) -> int:
        """Starts a sequence that will have so many tokens, and promises no room yet; returns its row."""

    def extend(self, rows: Rows, counts: Rows | int) -> bool:
        """Makes room for so many more tokens in each of these rows; False: not in all, and nothing changed.

        The device's block table follows on the current stream.
        """

    def free(self, rows: list[int]) -> None:
        """Ends sequences. What the device still reads stays as it is until it has."""

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, `[rows, max_seq_len, num_kv_heads, head_dim]`, or in blocks."""

    def physical_bytes(self) -> int:
        """Device memory that it takes now."""

    def driver_seconds(self) -> float:
        """Time in driver calls so far; a part of the cache manager's."""

    def give_back(self) -> None:
        """Gives memory that no sequence uses back to the system, where it can."""

    def close(self) -> None:
        """Gives all memory back."""


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to the device without waiting; torch keeps its memory until it is copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
