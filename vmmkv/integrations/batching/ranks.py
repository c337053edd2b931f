"""The processes of a tensor parallel group, as transformers knows them."""

from __future__ import annotations

import torch
from transformers.generation.continuous_batching.distributed import DistributedHelper

from ..row_ranks import Ranks


def ranks_of(helper: DistributedHelper) -> Ranks:
    """Those of the group of a manager."""

    def minimum(value: float) -> float:
        return float(helper.tp_all_reduce_min(torch.tensor(value, dtype=torch.float64), on_cpu=True))

    return Ranks(helper.tp_size, helper.tp_local_rank, minimum)
