"""Scales of whole sequences: what each row has beside its pages, in plain memory of torch."""

from __future__ import annotations

import torch

from .driver.driver import Driver
from .driver.fence import Fence
from .errors import DriverOutOfMemoryError
from .layout import KVLayout


class SequenceScales:
    """Scales of each row: ones for a new sequence; from then on they go where its tokens go.

    Args:
        driver: the memory system.
        layout: layers that have fewer KV heads than others use the first ones.
        num_rows: rows.
    """

    def __init__(self, driver: Driver, layout: KVLayout, num_rows: int) -> None:
        self._driver, self._ones = driver, num_rows
        shape = num_rows + 1, 2, layout.num_layers, max(layer.num_kv_heads for layer in layout.layers)
        try:
            with torch.inference_mode(False):
                self._all = torch.ones(shape, dtype=torch.float32, device=driver.device)
        except (MemoryError, RuntimeError) as error:  # torch raises either
            detail = f"{shape} scales beside the cache"
            raise DriverOutOfMemoryError("torch.ones", type(error).__name__, detail) from error
        Fence.after(driver, [driver.current_stream()]).wait()  # sequences on other streams begin with these
        self.rows = self._all[:num_rows]
        """fp32 `[num_rows, K and V, num_layers, num_kv_heads]`."""

    def check_not_captured(self) -> None:
        """Raises `StreamCaptureError` while a CUDA graph is being captured: each replay would copy scales again."""
        if self._driver.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise self._driver.captured("copy", self._driver.current_stream())

    def reset(self, row: int) -> None:
        """Makes those of a row ones, in the order of the current stream."""
        self.copy({row: self._ones})

    def copy(self, moves: dict[int, int]) -> None:
        """Gives rows those of others, by row, in the order of the current stream. Raises what `Driver.copy` raises."""
        nbytes = self._all[0].nbytes
        held = self._all[list(moves.values())] if len(moves) > 1 else None  # a row may be a source and change, too
        for index, (row, source) in enumerate(moves.items()):
            origin = self._all[source].data_ptr() if held is None else held[index].data_ptr()
            self._driver.copy(self._all[row].data_ptr(), origin, nbytes)
