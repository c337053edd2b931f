"""K and V that attention writes: a cache that models hand them to before, as they do since transformers 5.24, tells
attention of itself."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedAttentionError


class LeftToAttention:
    """In the place of a cache. Until 5.23 transformers told attention of it, and models did not know it."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a layer as they are; `kwargs` is what the layer will tell attention, by keyword.

        Raises:
            UnsupportedAttentionError: there is no such thing, and attention would know of no batch.
        """
        if kwargs is None:
            raise UnsupportedAttentionError(
                f"layer {layer} hands K and V to its cache without what it tells attention: this version of "
                "transformers does not batch such a model continuously, on rows or without"
            )
        kwargs["cache"] = self
        return key, value
