"""Rows of preempted sequences go to the host and come back, where that costs less than to compute them anew.

Both cost so much a token: copies its bytes twice at the speed of the link, computing its share of a prompt's time. To
map pages again is not counted. It is not the same in both: what comes back needs all of its pages at once, so that more
of them are mapped in need, for which the host waits (`serve_pressure_h200.json`).
"""

from __future__ import annotations

from typing import Any

from vmmkv import OutOfHostMemoryError, OutOfPagesError

from .vmm import VmmKV

LINK_BYTES_PER_S = 55e9
"""Of one pinned copy between an H200 and its host, in one direction."""
PREFILL_TOKENS_PER_S = {"llama-3.1-8b": 30_851.0, "qwen3-0.6b": 148_699.0, "tiny": 5000.0}
"""Of prompts of 16,384 tokens on an H200, our kernel on rows (`serve_h200.json`, `serve_qwen3_h200.json`); of the tiny
model, which is for machines without a GPU, about what a CPU does."""


def costs(token_bytes: int, tokens_per_s: float) -> dict[str, float | bool]:
    """Microseconds a token by each way, and whether copies cost less."""
    copies, computing = 2e6 * token_bytes / LINK_BYTES_PER_S, 1e6 / tokens_per_s
    return {"copies_us_per_token": copies, "computing_us_per_token": computing, "suspends": copies < computing}


class SuspendingVmmKV(VmmKV):
    """A `SuspendingKV`.

    Args:
        host_bytes: for suspended sequences.
        tokens_per_s: of prompts that are computed.
    """

    def __init__(self, *args: Any, host_bytes: int, tokens_per_s: float, **options: Any) -> None:
        super().__init__(*args, host_bytes=host_bytes, **options)
        self.pays = bool(costs(self.cache.layout.token_bytes, tokens_per_s)["suspends"])

    def suspend(self, row: int) -> bool:
        if not self.pays:
            return False
        try:
            self.sequences[row].suspend()
        except OutOfHostMemoryError:
            return False
        return True

    def resume(self, row: int, tokens: int, spare: int | None) -> bool:
        if spare is not None and not self.has_room(tokens + spare):
            return False
        try:
            self.sequences[row].resume()
        except OutOfPagesError:
            return False
        return True
