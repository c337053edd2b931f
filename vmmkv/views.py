"""Rows that hold tokens, as tensors: K and V of every layer over all rows, and their scales."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import one_of
from .core.cache import Cache
from .core.pool import Pool
from .driver.driver import Driver, fork_error
from .driver.fence import Fence
from .errors import DriverOutOfMemoryError, UnsupportedError, UseAfterFreeError
from .layout import KVLayout
from .tensors import ScaledKV, export_range

Pair = tuple[torch.Tensor, torch.Tensor]


class SequenceScales:
    """Scales of whole sequences, beside their pages in plain memory of torch: ones for a new sequence; from then on
    they go where its tokens go.

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


class TokenCache(Cache):
    """A cache of tokens of a layout, and zero-copy tensors over its ranges."""

    scales: SequenceScales | None = None
    """Those of whole sequences, if the layout has them."""
    is_open = True  # of the class: a constructor that is interrupted behind `Cache`'s leaves a cache to be closed

    def __init__(self, pool: Pool, layout: KVLayout, max_sequences: int, max_seq_len: int, **options: Any) -> None:
        super().__init__(pool, layout.record_bytes, max_sequences, max_seq_len, **options)
        self.layout = layout
        with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
            self._ranges = [self._export(part) for part in self.ranges]
            self._kv = [self._values_of(number) for number in range(layout.num_layers)]
            if layout.scales == "sequence_head":
                self.scales = SequenceScales(pool.driver, layout, max_sequences)
            self._scales = [self._scales_of(number) for number in range(layout.num_layers)] if layout.scales else []

    def _export(self, part: Any) -> torch.Tensor:
        nbytes = self.max_sequences * int(part["row_pages"]) * self.page_size
        return export_range(int(part["address"]), nbytes, self.device, owner=self.owner()).view(self.layout.dtype)

    def _values_of(self, number: int) -> Pair:
        layer = self.layout.layers[number]
        k, v = (
            self._over_rows(number, self.layout.dtype, offset, (layer.num_kv_heads, width), (width, 1))
            for offset, width in ((layer.k_offset, layer.k_head_dim), (layer.v_offset, layer.v_head_dim))
        )
        return k, v

    def _scales_of(self, number: int) -> Pair:
        """The scales of a layer over all rows; those of whole sequences with a stride of 0 over tokens."""
        layer = self.layout.layers[number]
        if self.scales:
            rows = self.scales.rows[:, :, number, None, : layer.num_kv_heads]
            k, v = rows.expand(-1, -1, self.max_seq_len, -1).unbind(1)
            return k, v
        assert layer.scales_offset is not None
        begins = layer.scales_offset, layer.scales_offset + 1
        k, v = (self._over_rows(number, torch.float32, begin, (layer.num_kv_heads,), (2,)) for begin in begins)
        return k, v

    def _over_rows(
        self, number: int, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """A part of a layer's token record, of such a shape and strides, in all tokens of all rows."""
        part = self.layout.layers[number].range
        flat = self._ranges[part].view(dtype)
        row, token = flat.numel() // self.max_sequences, self.layout.record_bytes[part] // dtype.itemsize
        return flat.as_strided((self.max_sequences, self.max_seq_len, *shape), (row, token, *strides), offset)

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self.pool.driver.device

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        return self.pool.driver.page_size

    def check_usable(self) -> None:
        """Raises `UseAfterFreeError` if it was closed, and `ForkError` if it belongs to another process."""
        if self.pool.word("dead"):
            raise fork_error()
        if not self.is_open:
            raise UseAfterFreeError("this KVCache was closed; make a new one")

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer over all rows: the whole virtual tensor. A negative number counts layers from the last.

        Only tokens of live sequences may be touched: an access elsewhere is a fault, which ends the process or the
        GPU's context. So do not print, compare or copy these as a whole, nor more of a row than it has tokens. The
        storage of any of these views is the whole range: printing or reading that ends the process, too. To copy, save
        or share a view, `clone()` it first. `Sequence.k` and `v` are as long as their sequence.

        Returns:
            K `[max_sequences, max_seq_len, num_kv_heads, head_dim]` and V likewise with its own width, of the layout's
            dtype; strided, zero-copy, at addresses that never change.

        Raises:
            OutOfRangeError, ArgumentError: there is no such layer.
            UnsupportedError: the layout has scales, without which these numbers mean nothing: see `scaled_kv`.
        """
        self.check_usable()
        if self.layout.scales is not None:
            raise UnsupportedError(
                f"asked for K and V of a layout with scales={self.layout.scales!r} without their scales; scaled_kv() "
                "gives both, and kernels that take both read and write them"
            )
        return one_of(self._kv, layer, "layer")

    def scaled_kv(self, layer: int) -> ScaledKV:
        """K and V of one layer over all rows, as `kv`, and their scales: of a layout that has scales. `vmmkv.kernels`
        take them as `k`, `v`, `k_scales` and `v_scales`. The same cautions hold as for the views of `kv`.

        Returns:
            K and V as `kv` would, of the layout's dtype, and the scales of each, fp32 `[max_sequences, max_seq_len,
            num_kv_heads]`; those of whole sequences are the same memory for all tokens, which is written to by way of
            `sequence_scales` only.

        Raises:
            OutOfRangeError, ArgumentError, UnsupportedError: there is no such layer, or the layout has no scales.
        """
        self.check_usable()
        if self.layout.scales is None:
            raise UnsupportedError(
                "asked for the scales of a layout that has none; make it with KVLayout(scales='token_head')"
            )
        return ScaledKV(*one_of(self._kv, layer, "layer"), *self._scales[layer])

    def sequence_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of whole sequences of one layer, by row: of a layout with `scales="sequence_head"`.

        They are yours to write, before a sequence has tokens: what was rounded with others would be other numbers.
        `vmmkv.kernels.sequence_scales` makes them of a prompt; `vmmkv.kernels.append` takes them as `k_scales` and
        `v_scales`, and leaves them as they are. Those of a batch, `[rows]`, are what FlashAttention-3 takes as
        `k_descale` and `v_descale`.

        A new sequence has scales of 1. Forks begin with those of their parent; sequences that are reordered, suspended
        or sent to another process take theirs along. All of a cache's are `max_sequences * num_layers` times 8 bytes
        for each KV head, in plain memory of torch, which is no part of its budget, and which `stats` does not count.

        Returns:
            Those of K and V, each fp32 `[max_sequences, num_kv_heads]`, strided, at addresses that never change.

        Raises:
            OutOfRangeError, ArgumentError, UnsupportedError: there is no such layer, or the layout has no such scales.
        """
        self.check_usable()
        if self.layout.scales != "sequence_head":
            raise UnsupportedError(
                f"asked for the scales of sequences of a layout with scales={self.layout.scales!r}; make it with "
                "KVLayout(scales='sequence_head')"
            )
        k_scales, v_scales = one_of(self._scales, layer, "layer")
        return k_scales[:, 0], v_scales[:, 0]

    def range(self, index: int) -> torch.Tensor:
        """One range of the layout, all rows of it: `[elements]` of its dtype, of which K and V of its layers are views.
        For compilers, which handle one tensor that is written in place better than many that share its memory. Do not
        print it. Raises `OutOfRangeError` or `ArgumentError`."""
        self.check_usable()
        return one_of(self._ranges, index, "range")

    def drop_views(self) -> None:
        """Drops the tensors over the ranges: users may have views of them."""
        self._kv, self._scales, self._ranges = [], [], []

    def __del__(self) -> None:
        self.drop_views()
        super().__del__()
