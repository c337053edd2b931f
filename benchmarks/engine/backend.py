"""The interface of a KV cache to the engine."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]
Rows = Numbers
Ids = Numbers
"""Token ids, `[tokens]`."""


class KVBackend(Protocol):
    """Where K and V of sequences lie. A sequence is known by its row, of the tensors or of the block table.

    `fits`, `admit`, `extend` and `free` are the cache manager: their host time is what `Schedule` counts.
    """

    block_table: torch.Tensor | None
    """int32 `[max_sequences, max_blocks]` on the device, or None."""

    def fits(self, tokens: int, spare: int = 0) -> bool:
        """Whether there is a row and room for one more sequence of `tokens`, and for `spare` tokens of any."""

    def admit(self, tokens: int) -> int:
        """Start a sequence that will have so many tokens, and promise no room yet; return its row."""

    def extend(self, rows: Rows, counts: Rows | int) -> bool:
        """Make room for so many more tokens in each of these rows; False: not in all, and nothing changed.

        The device's block table follows on the current stream.
        """

    def free(self, rows: list[int]) -> None:
        """End sequences. Memory that the device still reads stays as it is until the reads are done."""

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, `[rows, max_seq_len, num_kv_heads, head_dim]`, or in blocks."""

    def physical_bytes(self) -> int:
        """Device memory in use."""

    def work(self) -> dict[str, float]:
        """Seconds so far in driver calls of the engine's thread, `driver`, and of the mapper's, `mapper`, and pages
        mapped `ahead` of need and `in need`; empty where there are none."""

    def give_back(self) -> None:
        """Give memory that no sequence uses back to the system."""

    def close(self) -> None:
        """Give all memory back."""

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        """Start a sequence of these ids, which will have `tokens` tokens, with the known K and V of them; return its
        row, and how many are known, never the last one. None: there is no room for it and for `spare` tokens of any;
        without `spare` it runs alone, and takes all memory there is. No room is promised. Only with reuse."""

    def commit(self, row: int, ids: Ids) -> None:
        """Make the first tokens of a sequence, whose K and V are written, known under their ids. Only with reuse."""


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to the device without waiting; torch keeps its memory until it is copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
