"""K and V as transformers has them: checked, and written into rows, by the append kernel where it can.

One launch, whatever the strides: torch's `copy_` counts in 32 bits, and cuts a write to rows that are gigabytes apart
into one launch per row, for K and for V. K and V are `[batch_size, num_kv_heads, tokens, head_dim]` here, rows
`[rows, max_seq_len, num_kv_heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import AutogradError, DtypeError, ShapeError, StreamCaptureError
from ..kernels import append
from ..kernels.checks import ALIGNMENT
from ..kernels.row_append import append_behind, bind_append
from ..layout import DTYPES


class RowWriter:
    """Writes K and V to the rows of one layer. A decode step that looks like the last one needs no checks.

    Args:
        k_rows, v_rows: of all sequences.
        row_numbers: int32, of as many sequences as there may be.
        scales: none, or those of K and of V, as in `append`, where rows are of 8 bits.
    """

    def __init__(self, k_rows: Tensor, v_rows: Tensor, row_numbers: Tensor, *scales: Tensor) -> None:
        self._places, self._scales = (k_rows, v_rows, row_numbers), scales
        self._looks: tuple[object, ...] = ()
        self._append: Callable[[int, int, int], None]

    def write(self, keys: Tensor, values: Tensor, starts: Tensor) -> bool:
        """Writes K and V, and returns True; False where the kernel cannot read them as they lie.

        Args:
            keys, values: of the dtype of the rows, unless those are of 8 bits, and on their device.
            starts: int32, the position of the first new token in each row, of as many sequences as there may be.
        """
        looks = keys.shape, keys.stride(), values.shape, values.stride()
        if looks != self._looks:
            fill_vectors = not (keys.shape[3] | values.shape[3]) % ALIGNMENT  # also in 8 bits
            if not can_append(keys, values) or (self._scales and not fill_vectors):
                return False
            k_rows, v_rows, row_numbers = self._places
            row_numbers = row_numbers[: keys.shape[0]]
            k, v, cu_seqlens = _one_after_another(keys, values)
            if cu_seqlens is not None:
                k_scales, v_scales = self._scales or (None, None)
                starts = starts[: keys.shape[0]]
                append(k, v, k_rows, v_rows, row_numbers, starts, cu_seqlens, k_scales=k_scales, v_scales=v_scales)
                return True
            self._append = bind_append(k, v, k_rows, v_rows, row_numbers, *self._scales)
            self._looks = looks
        k_address, v_address = keys.data_ptr(), values.data_ptr()
        if (k_address | v_address) % ALIGNMENT:
            return False
        self._append(k_address, v_address, starts.data_ptr())
        return True


def can_append(keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes K and V like these: on a GPU, in whole vectors."""
    k, v = keys.stride(), values.stride()
    # A bit that any of these has is a bit of what they are or-ed to: one division instead of eight.
    sizes = k[0] | k[1] | k[2] | v[0] | v[1] | v[2] | keys.shape[3] | values.shape[3]
    addresses = keys.data_ptr() | values.data_ptr()
    return keys.is_cuda and k[3] == v[3] == 1 and not (sizes * keys.itemsize | addresses) % ALIGNMENT


def write_rows(
    keys: Tensor, values: Tensor, k_rows: Tensor, v_rows: Tensor, row_numbers: Tensor, lengths: Tensor, limit: Tensor
) -> None:
    """Writes K and V behind the `lengths` tokens of each row, int32 `[batch_size]`, and counts them there. A token
    behind `limit`, int32 `[1]`, is an error on the CPU; on a GPU the device stops."""
    if can_append(keys, values):
        k, v, cu_seqlens = _one_after_another(keys, values)
        append_behind(k, v, k_rows, v_rows, row_numbers, lengths, limit, cu_seqlens)
        return
    token = lengths[:1] + torch.arange(keys.shape[2], device=keys.device)
    fits = (token < limit).all()
    if not (fits.is_cuda or fits):
        raise StreamCaptureError(
            f"a compiled forward pass would write up to token {int(token[-1])}; rows have {int(limit)}"
        )
    torch._assert_async(fits, "there is no room for the tokens of this forward pass")
    k_rows.index_copy_(1, token, keys.transpose(1, 2))
    v_rows.index_copy_(1, token, values.transpose(1, 2))
    lengths += keys.shape[2]


# One operation that writes into rows: compilers would take copies apart, and copy whole rows.
torch.library.custom_op("vmmkv::write_rows", write_rows, mutates_args=("k_rows", "v_rows", "lengths"))


def _one_after_another(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """K and V, `[tokens, num_kv_heads, head_dim]`, and where each sequence's begin, unless they have one each."""
    batch_size, num_kv_heads, tokens, head_dim = keys.shape
    if tokens == 1:
        return keys.squeeze(2), values.squeeze(2), None
    k = keys.transpose(1, 2).reshape(-1, num_kv_heads, head_dim)
    v = values.transpose(1, 2).reshape(-1, num_kv_heads, values.shape[3])
    return k, v, even_cu_seqlens(batch_size, tokens, keys.device)


def even_cu_seqlens(batch_size: int, tokens: int, device: torch.device) -> Tensor:
    """Where equally long sequences begin, int32 `[batch_size + 1]`."""
    return torch.arange(0, batch_size * tokens + 1, tokens, dtype=torch.int32, device=device)


def check_kv(layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Raises `ShapeError` unless K and V of a layer are of the same tokens of the same sequences."""
    shapes = [[*each.shape] if isinstance(each, Tensor) else type(each).__name__ for each in (keys, values)]
    if not all(len(shape) == 4 and shape[:3] == shapes[0][:3] and isinstance(shape, list) for shape in shapes):
        raise ShapeError(
            f"got K {shapes[0]} and V {shapes[1]} for layer {layer_idx}; both are tensors "
            "[batch_size, num_kv_heads, tokens, head_dim], and only head_dim may differ"
        )


def check_autograd(keys: Tensor, values: Tensor) -> None:
    """Raises `AutogradError` where autograd would record what is written."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        raise AutogradError(
            "K and V require gradients, and a cache that is written in place keeps no graph. Run the model under "
            "torch.no_grad() or torch.inference_mode(); to train through a cache use DynamicCache"
        )


def common_dtype(keys: Tensor, values: Tensor, held: torch.dtype | None) -> torch.dtype:
    """The narrowest dtype that holds K, V and the dtype `held` exactly; raises `DtypeError` if there is none."""
    with suppress(RuntimeError):
        if {keys.dtype, values.dtype} <= set(DTYPES):  # other integers would be rounded
            return torch.promote_types(torch.promote_types(keys.dtype, values.dtype), held or keys.dtype)
    there = f", and the cache holds {held}" if held else ""
    raise DtypeError(
        f"got K as {keys.dtype} and V as {values.dtype}{there}; vmmkv has no dtype that holds all of it. Run the "
        "model in one of its dtypes, or all forward passes under autocast"
    )
