"""K and V that attention writes: models hand them to a cache before, as they do since transformers 5.24, and attention
is told of it by a keyword of its own. Until 5.23 that was `cache`, and models did not know it."""

from __future__ import annotations

from typing import Any

import torch

CACHE = "vmmkv_cache"
"""The keyword. Layers that read the K and V of earlier ones hand nothing to a cache, and hand this on."""


class LeftToAttention:
    """In the place of a cache."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a layer as they are."""
        return key, value
