"""What is refused of MLA's latents, and how they are appended; attention over them is tested beside that of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DEVICE, int32
from test_kernels_attention import LATENT as WIDTH
from test_kernels_attention import LATENT_V as V_WIDTH
from test_kernels_attention import bf16

from vmmkv.kernels import append, cascade, decode, prefill

SCALE = 0.07


def test_what_does_not_fit_is_refused_before_any_launch() -> None:
    q, k = (torch.randn(2, *shape, WIDTH, device=DEVICE).to(bf16) for shape in ((1, 16), (64, 1)))
    lens = int32([33, 20])
    v = k[..., :V_WIDTH]
    wide, other = torch.zeros(2, 64, 1, WIDTH + 64, device=DEVICE, dtype=bf16), k.clone()
    eight = k.to(torch.float8_e4m3fn)
    scales = torch.ones(2, 64, 1, device=DEVICE)
    groups = int32([0, 2]), int32([16])
    out = torch.zeros(2, 1, 16, V_WIDTH, device=DEVICE, dtype=bf16)
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "no scale for latents", lambda: decode(q, k, v, lens, out=out)),
        (ValueError, "no scale for latents", lambda: prefill(q[:, 0], k, v, int32([0, 1, 2]), lens)),
        (ValueError, "must be their view", lambda: decode(q, k, k, lens, scale=SCALE)),
        (ValueError, "must be their view", lambda: decode(q, k, v.contiguous(), lens, scale=SCALE)),
        (ValueError, "must be their view", lambda: decode(q, k, other[..., :V_WIDTH], lens, scale=SCALE, out=out)),
        (ValueError, "must be their view", lambda: decode(q, k, k[..., 64:], lens, scale=SCALE, out=out)),
        (ValueError, "must be their view", lambda: decode(q, k, k[..., 8 : 8 + V_WIDTH], lens, scale=SCALE, out=out)),
        (ValueError, "latents k", lambda: decode(q, wide, v, lens, scale=SCALE, out=out)),
        (ValueError, "latents k", lambda: decode(
            q, k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1), lens, scale=SCALE, out=out
        )),
        (ValueError, "not of 8 bits", lambda: decode(
            q, eight, eight[..., :V_WIDTH], lens, scale=SCALE, k_scales=scales, v_scales=scales
        )),
        (ValueError, "it must be", lambda: decode(q, k, v, lens, scale=SCALE, out=torch.zeros_like(q))),
        (ValueError, "must be one of auto, mma, plain", lambda: decode(q, k, v, lens, scale=SCALE, kernel="wgmma")),
        (ValueError, "must be one of auto, plain", lambda: decode(
            q[:, :, :3], k, v, lens, scale=SCALE, kernel="mma"
        )),
        (ValueError, "cascade takes none", lambda: cascade(q, k, v, lens, *groups, scale=SCALE, out=out)),
        (ValueError, "576 of latents", lambda: decode(q[..., :V_WIDTH], v, v, lens)),
    ]  # fmt: skip
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert (out == 0).all()


def test_append_takes_latents_without_a_v() -> None:
    """Into rows and into blocks, whatever the strides of what is not there."""
    new = torch.randn(5, 1, WIDTH, device=DEVICE).to(bf16)
    blocks = torch.zeros(4, 16, 1, WIDTH, device=DEVICE, dtype=bf16)
    nothing = torch.empty(5, 1, 0, device=DEVICE, dtype=bf16)
    table, starts = int32([3, 1]).view(1, 2), int32([13])
    append(new, nothing, blocks, blocks[..., :0], int32([0]), starts, int32([0, 5]), table)
    assert torch.equal(torch.cat([blocks[3, 13:], blocks[1, :2]]), new)
    assert (blocks[[0, 2]] == 0).all()
