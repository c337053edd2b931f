"""Moves requests to the host, and has them started anew where there is no room."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

from .cache import RowCache


class RowOffloading(OffloadingManager):
    """See above."""

    cache: RowCache

    def __init__(self, cpu_offload_space_gib: float | None, **kwargs: Any) -> None:
        super().__init__(cpu_offload_space_gib=0.0, **kwargs)  # rows have a place of their own there

    def _compute_num_cpu_sectors(self, *args: Any) -> int:
        return 0

    def _offload_to_cpu(self, victims: list[RequestState], victim_block_tables: dict[str, Any]) -> set[str]:
        moved = {state.request_id for state in victims if self.cache.requests.is_away(state.request_id)}
        for state in victims:
            state.is_cpu_offloaded = state.request_id in moved
        return moved

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        for future_state in requests_in_batch:
            future_state.state.is_cpu_offloaded = False  # its tokens came back when it was given room

    def free_request_cpu_cache(self, state: RequestState) -> None:
        self.cache.admission.end_away(state.request_id)
        state.is_cpu_offloaded = False
