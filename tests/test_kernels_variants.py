"""How many kernels are compiled for all arguments of one shape of heads: what costs nothing is a run-time argument."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from conftest import DEVICE, int32

from vmmkv.kernels import row_append, row_copy, row_decode, row_prefill
from vmmkv.kernels.checks import keys

MOST = 12


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)


def random_calls(random: Random) -> list[Any]:
    """What calls with random arguments would launch: attention of 32 heads of 128 numbers, 8 of K and V; and copies."""
    some: Any = random.choice
    batch, q_len, block = some([1, 2, 5]), random.randint(1, 8), some([0, 0, 16, 32, 64, 80])
    window, softcap, causal = some([0, 0, 1, 100]), some([0.0, 0.0, 20.0]), some([True, False])
    kv, table = tensor(8, block or 256, 8, 128), int32([[0] * 4] * batch) if block else None
    each, cu_seqlens = int32([9] * batch), int32([0] * (batch + 1))
    sinks = torch.zeros(32, device=DEVICE) if some([True, False]) else None
    rows, starts = some([None, each]), some([None, each])
    many, few = tensor(70, 32, 128), tensor(batch, q_len, 32, 128)
    ragged = keys((many, kv, kv, many, cu_seqlens, each, rows, starts, table, sinks, None, None))
    even = few, kv, kv, few, None, each, rows
    grouped = keys((*even, None, table, sinks, None, None, cu_seqlens[:2], each[:1]))
    calls = [
        row_decode.prepare_decode(None, window, softcap, "auto", keys((*even, starts, table, sinks, None, None))),
        row_decode.prepare_decode(None, window, softcap, "plain", keys((*even, starts, table, sinks, None, None))),
        row_prefill._prepare(causal, None, window if causal else 0, softcap, "auto", ragged),
        *row_prefill._prepare_mixed(None, window, softcap, "auto", None, ragged),
    ]
    cascade: Any = row_prefill._prepare_cascade(None, softcap, "auto", grouped)
    calls += [cascade.prefix, cascade.own] if isinstance(cascade, row_prefill.Calls) else [cascade]
    new, limit = tensor(batch, 8, 128), some([None, each[:1]]) if table is None else None
    q, angles = tensor(batch, 32, 128), tensor(batch, some([64, 96, 128]))
    turned = (q, q, angles, angles) if limit is None and some([True, False]) else row_append.NO_ROTATION
    places = each, each, some([None, cu_seqlens]), table, limit, None, None
    launches = row_append._prepare_call(keys((new, new, kv, kv, *places, *turned)))
    return [call.launch for call in calls] + [launches, row_copy._prepare(9, keys((kv, kv, *[each] * 5)))]


@pytest.mark.simulator
def test_few_kernels_do_for_all_arguments() -> None:
    random = Random()
    kernels = {str(launch.kernel) for _ in range(300) for launch in random_calls(random)}
    assert len(kernels) <= MOST, "\n".join(sorted(kernels))
