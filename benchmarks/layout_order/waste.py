"""What each order wastes: pages of requests' last tokens, by arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vmmkv import KVLayout
from vmmkv.workload import Request

from .orders import BLOCK_STEP, MODELS, PAGE_BYTES, Model, tokens_of_page

Pages = Callable[[KVLayout, int], int]
"""How many a sequence of so many tokens takes."""


def tokens_first(layout: KVLayout, tokens: int) -> int:
    return layout.pages(tokens, PAGE_BYTES)


def heads_first(layout: KVLayout, tokens: int, step: int = 1) -> int:
    """Each page holds whole tokens of its range."""
    return sum(-(-tokens // tokens_of_page(record, step)) for record in layout.record_bytes)


ORDERS: dict[str, tuple[Pages, int]] = {
    "tokens first": (tokens_first, 1),
    "heads first": (heads_first, 1),
    f"heads first, {BLOCK_STEP}": (lambda layout, tokens: heads_first(layout, tokens, BLOCK_STEP), BLOCK_STEP),
}
"""And the number of tokens of which a page holds a multiple: the last is what the kernels can look up."""


def run_waste(requests: list[Request], models: dict[str, Model] = MODELS) -> list[dict[str, Any]]:
    """For each model, layers of a range and order: the part of pages that holds no token, and its bytes a sequence,
    when each request has its last token. Both are None where a page is too small."""
    lengths = Counter(request.total for request in requests)
    rows = []
    for name, model in models.items():
        for called, layers in model.ranges().items():
            layout = model.layout(layers)
            for order, (pages, step) in ORDERS.items():
                tokens = tokens_of_page(max(layout.record_bytes), step)
                row = {"model": name, "layers_per_range": called, "order": order, "tokens_of_page": tokens}
                fits = tokens or order == "tokens first"
                rows.append(row | (wasted(layout, lengths, pages) if fits else {"waste": None, "unused_bytes": None}))
    return rows


def wasted(layout: KVLayout, lengths: Counter[int], pages: Pages) -> dict[str, float]:
    used = PAGE_BYTES * sum(count * pages(layout, tokens) for tokens, count in lengths.items())
    live = layout.token_bytes * sum(count * tokens for tokens, count in lengths.items())
    return {"waste": 1 - live / used, "unused_bytes": (used - live) / lengths.total()}
