"""K and V as transformers has them, written into rows, by the append kernel where it can.

One launch, whatever the strides: torch's `copy_` counts in 32 bits, and cuts a write to rows that are gigabytes apart
into one launch per row, for K and for V.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import StreamCaptureError
from ..kernels import append
from ..kernels.checks import ALIGNMENT
from ..kernels.row_append import append_behind, bind_append


class RowWriter:
    """Writes K and V to the rows of one layer. Of decode steps, what does not differ between them is looked at once.

    Args:
        k_rows, v_rows: as in `append_rows`.
        row_numbers: likewise, of as many sequences as there may be.
        scales: none, or those of K and of V, as in `append`, where rows are of 8 bits.
    """

    def __init__(
        self, k_rows: torch.Tensor, v_rows: torch.Tensor, row_numbers: torch.Tensor, *scales: torch.Tensor
    ) -> None:
        self._places = k_rows, v_rows, row_numbers
        self._scales = scales
        self._looks: tuple[object, ...] = ()
        self._append: Callable[[int, int, int], None]

    def write(self, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor) -> bool:
        """Writes K and V, unless they lie as the kernel cannot read them.

        Args:
            keys, values: as in `append_rows`; of the dtype of the rows, unless those are of 8 bits, and their device.
            starts: as in `append_rows`, of as many sequences as there may be.

        Returns:
            whether they were written.
        """
        looks = keys.shape, keys.stride(), values.shape, values.stride()
        if looks != self._looks:
            if not can_append(keys, values) or (self._scales and not _fill_vectors(keys, values)):
                return False
            k_rows, v_rows, row_numbers = self._places
            rows, _, tokens, _ = keys.shape
            if tokens != 1:
                append_rows(keys, values, k_rows, v_rows, row_numbers[:rows], starts[:rows], *self._scales)
                return True
            k, v = keys.squeeze(2), values.squeeze(2)
            self._append = bind_append(k, v, k_rows, v_rows, row_numbers[:rows], *self._scales)
            self._looks = looks
        k_address, v_address = keys.data_ptr(), values.data_ptr()
        if (k_address | v_address) % ALIGNMENT:
            return False
        self._append(k_address, v_address, starts.data_ptr())
        return True


def can_append(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes K and V like these: on a GPU, in whole vectors."""
    k, v = keys.stride(), values.stride()
    # A bit that any of these has is a bit of what they are or-ed to: one division instead of eight.
    sizes = k[0] | k[1] | k[2] | v[0] | v[1] | v[2] | keys.shape[3] | values.shape[3]
    addresses = keys.data_ptr() | values.data_ptr()
    return keys.is_cuda and k[3] == v[3] == 1 and not (sizes * keys.itemsize | addresses) % ALIGNMENT


def _fill_vectors(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether heads are whole vectors also in 8 bits."""
    return not (keys.shape[3] | values.shape[3]) % ALIGNMENT


def append_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_numbers: torch.Tensor,
    starts: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Writes K and V, `[batch_size, num_kv_heads, tokens, head_dim]`, to rows.

    Args:
        k_rows, v_rows: `[rows, max_seq_len, num_kv_heads, head_dim]`.
        row_numbers: int32 `[batch_size]`.
        starts: int32 `[batch_size]`, where in its row each sequence's new tokens begin.
        k_scales, v_scales: as in `append`, of rows of 8 bits.
    """
    k, v, cu_seqlens = _one_after_another(keys, values)
    append(k, v, k_rows, v_rows, row_numbers, starts, cu_seqlens, k_scales=k_scales, v_scales=v_scales)


def write_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_numbers: torch.Tensor,
    lengths: torch.Tensor,
    limit: torch.Tensor,
) -> None:
    """Writes K and V likewise behind the `lengths` tokens of each row, int32 `[batch]`, and counts them there. None may
    come to lie behind `limit`, int32 `[1]`: on the CPU that is an error, on a GPU the device stops.
    """
    if can_append(keys, values):
        k, v, cu_seqlens = _one_after_another(keys, values)
        append_behind(k, v, k_rows, v_rows, row_numbers, lengths, limit, cu_seqlens)
        return
    token = lengths[:1] + torch.arange(keys.shape[2], device=keys.device)
    fits = (token < limit).all()
    if not (fits.is_cuda or fits):
        raise StreamCaptureError(
            f"a forward pass that was compiled by hand would write up to token {int(token[-1])}; there is room for "
            f"{int(limit)}: call cache.reserve(seq_len) with the length that sequences will reach"
        )
    torch._assert_async(fits, "there is no room for the tokens of this forward pass: cache.reserve(seq_len) makes it")
    k_rows.index_copy_(1, token, keys.transpose(1, 2))
    v_rows.index_copy_(1, token, values.transpose(1, 2))
    lengths += keys.shape[2]


# To compilers it is one operation that writes into rows: they would take the copies apart, and copy whole rows.
torch.library.custom_op("vmmkv::write_rows", write_rows, mutates_args=("k_rows", "v_rows", "lengths"))


def _one_after_another(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """K and V, `[tokens, num_kv_heads, head_dim]`, and where each sequence's begin, unless they have one each."""
    batch_size, num_kv_heads, tokens, head_dim = keys.shape
    if tokens == 1:
        return keys.squeeze(2), values.squeeze(2), None
    k = keys.transpose(1, 2).reshape(-1, num_kv_heads, head_dim)
    v = values.transpose(1, 2).reshape(-1, num_kv_heads, values.shape[3])
    return k, v, even_cu_seqlens(batch_size, tokens, keys.device)


def even_cu_seqlens(batch_size: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Where equally long sequences begin, int32 `[batch_size + 1]`."""
    return torch.arange(0, batch_size * tokens + 1, tokens, dtype=torch.int32, device=device)
