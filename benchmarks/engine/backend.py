"""What the engine asks of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]
Rows = Numbers
Ids = Numbers
"""Token ids, `[tokens]`."""
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Work:
    """What a backend, and its mapper, have had the driver do so far.

    Attributes:
        driver_seconds: in calls on the engine's thread, by name; a part of the cache manager's time.
        mapper_seconds: in calls on the mapper's, by name, and `mapper_calls`, how many.
        pages_mapped: ahead of need, and in need.
    """

    driver_seconds: Mapping[str, float] = field(default_factory=dict)
    mapper_seconds: Mapping[str, float] = field(default_factory=dict)
    mapper_calls: Mapping[str, int] = field(default_factory=dict)
    pages_mapped: Mapping[str, int] = field(default_factory=dict)

    def __sub__(self, before: Self) -> Work:
        """What was done since."""
        return Work(
            since(self.driver_seconds, before.driver_seconds),
            since(self.mapper_seconds, before.mapper_seconds),
            since(self.mapper_calls, before.mapper_calls),
            since(self.pages_mapped, before.pages_mapped),
        )


def since(now: Mapping[str, Number], before: Mapping[str, Number]) -> dict[str, Number]:
    """By how much each value has grown."""
    return {name: value - before.get(name, 0) for name, value in now.items()}


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

    def work(self) -> Work:
        """What the driver has done for it so far."""

    def give_back(self) -> None:
        """Gives memory that no sequence uses back to the system, where it can."""

    def close(self) -> None:
        """Gives all memory back."""


class ReusingKV(KVBackend, Protocol):
    """A backend whose sequences begin with K and V that others have computed of the same token ids. What it knows stays
    when a sequence is freed, as far as nobody else needs the memory, and goes with `give_back`."""

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        """Starts a sequence of these ids, which will have so many tokens, with what is there of it; None: there is no
        room for it and for `spare` tokens of any. No room is promised.

        Args:
            spare: None: it is alone, and takes what there is.

        Returns:
            Its row, and how many of its tokens are there: never the last one.
        """

    def commit(self, row: int, ids: Ids) -> None:
        """Makes the first tokens of a sequence, whose K and V are written, known under their ids."""


class SuspendingKV(KVBackend, Protocol):
    """A backend whose sequences can go to the host and come back, to the row that they had."""

    def suspend(self, row: int) -> bool:
        """Moves a sequence to the host; False: it stays, as that costs more than to compute it anew, or the host has no
        room. Suspended ones can be freed as others."""

    def resume(self, row: int, tokens: int, spare: int | None) -> bool:
        """Moves a sequence back, which will have so many tokens; False: there is no room for them, see `ReusingKV`."""


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to the device without waiting; torch keeps its memory until it is copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
