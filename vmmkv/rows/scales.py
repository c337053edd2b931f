"""Scales of whole sequences: what each row has beside its pages, in plain memory.

A row that is picked for a sequence has ones. From then on its scales go where its tokens go: whoever copies or shares
these (`vmmkv.rows.sharing`, `vmmkv.rows.reordering`) copies those, on the same stream and behind the same fences.
"""

from __future__ import annotations

import torch

from ..driver.driver import Driver
from ..driver.fence import Fence
from ..errors import DriverOutOfMemoryError
from ..layout import KVLayout


class SequenceScales:
    """See above.

    Args:
        driver: whose memory it copies.
        layout: of layers that have fewer KV heads than others the first so many scales are used.
        num_rows: how many.

    Raises:
        DriverOutOfMemoryError: there is no memory for them.
        StreamCaptureError: a CUDA graph is being captured.
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
        self.row_bytes = self._all[0].nbytes
        """Of a row."""

    def address_of(self, row: int) -> int:
        """Where a row's are."""
        return self._all.data_ptr() + row * self.row_bytes

    def reset(self, row: int) -> None:
        """Makes those of a row ones, in the order of the current stream. Raises what `Driver.copy` raises."""
        self.copy(self._ones, row)

    def copy(self, source: int, row: int) -> None:
        """Gives a row those of another, in the order of the current stream. Raises what `Driver.copy` raises."""
        self._driver.copy(self.address_of(row), self.address_of(source), self.row_bytes)
