"""Attention of a model's layers on rows: each writes K and V of a batch's new tokens into the rows of its layer group,
and attends to all tokens of their sequences."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch

from ..cache import KVCache
from ..errors import UnsupportedAttentionError
from .packed_attention import Packed, attend, can_rotate, kept_in, write
from .rotation import as_rotated, rotation_of
from .row_groups import Group


class RowAttention:
    """See above.

    Args:
        groups: the layer groups of the model.
        caches: of each group its rows.
    """

    def __init__(self, groups: Many[Group], caches: Many[KVCache]) -> None:
        self._places = {
            layer: (index, group, kept_in(caches[index], number))
            for index, group in enumerate(groups)
            for number, layer in enumerate(group.layers)
        }
        """By layer: its group, and what is kept in rows."""
        self._batches: dict[int, Packed] = {}
        """By group: where the tokens of the current forward pass are."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: Callable[[int], Packed],
        *,
        window: int | None,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a layer. All are `[1, heads, tokens, head_dim]`; queries and keys may be `Unrotated`.

        Args:
            packed: says where the tokens of a forward pass are, in a group by its number; asked by its first layer.

        Raises:
            UnsupportedAttentionError: it attends to another window than its group.
        """
        index, group, kept = self._places[layer]
        if window is not None and window != group.window:
            raise UnsupportedAttentionError(
                f"layer {layer} attends to {window} tokens, and its config says {group.window or 'all'} of them"
            )
        if layer == group.layers[0]:
            self._batches[index] = packed(index)
        batch, rotation, angles = self._batches[index], rotation_of(query, key), None
        if rotation is not None and can_rotate(rotation, value):
            query, key, angles = rotation.query, rotation.key, (rotation.cos.squeeze(0), rotation.sin.squeeze(0))
        query, key, value = (as_rotated(each).squeeze(0).transpose(0, 1) for each in (query, key, value))
        query = write(query, key, value, kept, batch, angles)
        output = attend(query, kept, batch, scale=scale, window=group.window, softcap=softcap, sinks=sinks)
        return output.unsqueeze(0)
