"""What kernels refuse before any launch, and change nothing: any argument of another kind than it should be, and what
does not go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DEVICE, int32

from vmmkv.kernels import RotateHalf, append, cascade, copy_tokens, decode, mixed, prefill, quantize

bf16, e4m3, int8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
Arguments = dict[str, Any]
ROTARY = "query", "rotated", "cos", "sin"


def random(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def valid() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Calls that are right, by name."""
    q, k, v, rows = random(3, 1, 4, 64), random(3, 64, 2, 64), random(3, 64, 2, 64), int32([2, 0, 1])
    numbers, scales = quantize(k, int8)
    starts, cu_seqlens, latents = int32([0, 0, 0]), int32([0, 1, 2, 3]), random(3, 64, 1, 576)
    one = {"q": q, "k": k, "v": v, "seq_lens": int32([5, 64, 33]), "rows": rows, "out": torch.zeros_like(q)}
    one["sinks"] = torch.randn(4, device=DEVICE)
    grouped = one | {"cu_groups": int32([0, 3]), "prefix_lens": int32([4])}
    one["starts"] = starts
    many = one | {"q": q[:, 0], "cu_seqlens": cu_seqlens, "out": torch.zeros_like(q[:, 0])}
    blocks, table = random(12, 16, 2, 64), {"block_table": int32(range(12)).view(3, 4)}
    eight = {"k": numbers, "v": numbers.clone(), "k_scales": scales, "v_scales": scales.clone()}
    latent = {"q": random(3, 1, 16, 576), "k": latents, "v": latents[..., :512], "scale": 0.07, "sinks": None}
    latent["out"] = torch.zeros(3, 1, 16, 512, device=DEVICE, dtype=bf16)
    new = {"k": random(3, 2, 64), "v": random(3, 2, 64), "k_cache": k, "v_cache": v, "rows": rows, "starts": starts}
    new_8 = new | {"k_cache": eight["k"], "v_cache": eight["v"]}
    whole = {"k_scales": scales[:, 0].clone(), "v_scales": scales[:, 0].clone()}
    rotary = {name: random(3, *([4] if name in ROTARY[:2] else []), 64) for name in ROTARY}
    ranges = {f"{side}_{what}": int32([0]) for side in ("source", "target") for what in ("rows", "starts")}
    return {
        "decode": (decode, one),
        "decode, blocks": (decode, one | {"k": blocks, "v": blocks.clone()} | table),
        "decode, 8 bits": (decode, one | eight),
        "decode, latents": (decode, one | latent),
        "prefill": (prefill, many),
        "prefill, 8 bits": (prefill, many | eight),
        "mixed": (mixed, many),
        "cascade": (cascade, grouped),
        "append": (append, new | {"cu_seqlens": cu_seqlens}),
        "append, blocks": (append, new | {"k_cache": blocks, "v_cache": blocks.clone()} | table),
        "append, 8 bits": (append, new_8 | {"k_scales": scales, "v_scales": eight["v_scales"]}),
        "append, scales of sequences": (append, new_8 | whole),
        "append, rotary": (append, new | rotary),
        "copy_tokens": (copy_tokens, {"source": k, "target": v, "lengths": int32([1]), "max_length": 1} | ranges),
    }


def call(function: Callable[..., Any], arguments: Arguments) -> None:
    given = dict(arguments)
    if "query" in given:
        given["rotary"] = RotateHalf(*(given.pop(name) for name in ROTARY))
    function(**given)


def refusal(function: Callable[..., Any], arguments: Arguments) -> Exception | None:
    try:
        call(function, arguments)
    except (ValueError, TypeError) as error:
        return error
    return None


def others(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    """What an argument must not be instead. Of a block table any part will do, and a cache may have fewer rows."""
    yield "on another device", tensor.to("meta")
    yield "of another dtype", tensor.double() if tensor.is_floating_point() else tensor.long()
    yield "without a dimension", tensor[0]
    yield "with one more", tensor[None]
    yield "no tensor", tensor.tolist()
    if name != "block_table":
        yield "empty", tensor[..., :0]
        yield "narrower", tensor[..., :-1]
    if name not in ("block_table", "k_cache", "v_cache", "source", "target"):
        yield "of fewer rows", tensor[:-1]


@pytest.mark.parametrize("name", valid())
def test_no_argument_may_be_of_another_kind(name: str) -> None:
    function, arguments = valid()[name]
    call(function, arguments)
    before = {key: each.clone() for key, each in arguments.items() if isinstance(each, torch.Tensor)}
    for key in before:
        for what, other in others(key, arguments[key]):
            assert refusal(function, arguments | {key: other}), f"took {key} that is {what}"
    for key, each in before.items():
        assert torch.equal(each.contiguous().view(torch.uint8), arguments[key].contiguous().view(torch.uint8)), key


BEYOND = torch.zeros(65_537, dtype=torch.int32, device=DEVICE)
TINY, HUGE = 1e-39, 1e39
"""Which fp32 does not hold."""


def heads(width: slice, *names: str) -> Callable[[Arguments], Arguments]:
    """Parts of heads, of several arguments alike."""
    return lambda of: {name: of[name][..., width] for name in names}


def no_heads(*names: str) -> Callable[[Arguments], Arguments]:
    return lambda of: {name: of[name][..., :0, :] for name in names}


NEW = "k", "v", "k_cache", "v_cache"
Wrong = tuple[str, type[Exception], str, Callable[[Arguments], Arguments]]
WRONG: list[Wrong] = [
    ("decode", ValueError, "must", heads(slice(48), "q", "k", "v", "out")),
    ("decode", ValueError, "must", lambda of: {"q": of["q"][:, :, :3], "out": None, "sinks": None}),
    ("decode", ValueError, "must", lambda of: {"q": of["q"].expand(-1, 9, -1, -1), "out": None}),
    ("decode", TypeError, "must", lambda of: {"k": of["k"].half(), "v": of["v"].half()}),
    ("decode", ValueError, "must", lambda of: {"out": of["out"][:1].expand(3, -1, -1, -1)}),
    ("decode", ValueError, "must be one of", lambda of: {"kernel": "fast"}),
    ("decode", ValueError, "must be one of auto, plain", lambda of: {"kernel": "mma", "out": None}
     | {name: of[name].float() for name in "qkv"}),
    ("decode, blocks", ValueError, "must", lambda of: {name: of[name][:, :8] for name in "kv"}),
    ("prefill", ValueError, "without", lambda of: {"causal": False, "window": 8}),
    ("prefill", ValueError, "blocks of threads", lambda of: {"cu_seqlens": BEYOND, "seq_lens": BEYOND[1:],
     "rows": BEYOND[1:], "starts": None, "kernel": "mma"}),
    ("prefill", ValueError, "must", lambda of: {name: of[name][:end] for name, end in (
        ("cu_seqlens", 1), ("seq_lens", 0), ("rows", 0), ("starts", 0))}),
    ("mixed", ValueError, "must", lambda of: {"max_prompts": -1}),
    ("mixed", TypeError, "must", lambda of: {"max_prompts": 3.0, "kernel": "plain"}),
    *((name, error, "must|fp32|at most", lambda of, wrong=wrong: wrong)
      for name in ("decode", "prefill") for error, wrong in (
        (ValueError, {"softcap": -1.0}), (ValueError, {"softcap": float("nan")}), (ValueError, {"scale": 0.0}),
        (ValueError, {"window": -4}), (ValueError, {"window": 1 << 63}), (TypeError, {"window": np.float64(2)}),
        *((ValueError, wrong | {"kernel": kernel}) for kernel in ("mma", "plain") for wrong in (
            {"scale": HUGE}, {"scale": TINY}, {"softcap": TINY}, {"softcap": HUGE}, {"softcap": 1.3e4},
            {"scale": 1e30, "softcap": 1e-9}, {"scale": 1e-35, "softcap": 1e4},
        )),
    )),
    *((name, TypeError, "[kv]_scales|same", lambda of, wrong=wrong: wrong(of))
      for name in ("decode, 8 bits", "prefill, 8 bits") for wrong in (
        lambda of: {"k_scales": None, "v_scales": None},
        lambda of: {"v_scales": None},
        lambda of: {"k": of["k"].to(bf16)},
        lambda of: {"k": of["k"].to(bf16), "v": of["v"].to(bf16)},
        lambda of: {"v": of["v"].view(e4m3)},
        lambda of: {"v_scales": of["v_scales"].half()},
    )),
    ("decode, 8 bits", TypeError, "got q of", lambda of: {"q": of["q"].to(e4m3)}),
    ("prefill, 8 bits", ValueError, "must be one of auto, mma, plain", lambda of: {"kernel": "wgmma"}),
    ("decode, latents", ValueError, "no scale for latents", lambda of: {"scale": None}),
    *(("decode, latents", ValueError, "must be their view", lambda of, v=v: {"v": v(of["k"])}) for v in (
        lambda k: k, lambda k: k[..., :512].contiguous(), lambda k: k.clone()[..., :512], lambda k: k[..., 64:],
        lambda k: k[..., 8:520],
    )),
    ("decode, latents", ValueError, "latents k", lambda of: {"k": random(3, 64, 1, 640)}),
    ("decode, latents", ValueError, "latents k", lambda of: {name: of[name].expand(-1, -1, 2, -1) for name in "kv"}),
    ("decode, latents", ValueError, "not of 8 bits", lambda of: {"k": (k := of["k"].to(e4m3)), "v": k[..., :512]}
     | dict.fromkeys(("k_scales", "v_scales"), torch.ones(3, 64, 1, device=DEVICE))),
    ("decode, latents", ValueError, "must be one of auto, mma, plain", lambda of: {"kernel": "wgmma"}),
    ("decode, latents", ValueError, "must be one of auto, plain", lambda of: {"kernel": "mma", "out": None}
     | {"q": of["q"][:, :, :3]}),
    ("decode, latents", ValueError, "576 of latents", lambda of: {"q": of["q"][..., :512], "k": of["v"]}),
    ("cascade", ValueError, "cascade takes none", lambda of: {"q": random(3, 1, 16, 576), "scale": 0.07}
     | {"k": (k := random(3, 64, 1, 576)), "v": k[..., :512], "out": random(3, 1, 16, 512), "sinks": None}),
    ("cascade", ValueError, r"cu_groups \[2\]; it must be contiguous \[3\]", lambda of: {"prefix_lens": int32([4, 4])}),
    ("cascade", ValueError, "must be one of auto, wgmma, mma, plain", lambda of: {"kernel": "fast"}),
    ("cascade", ValueError, "scale must be positive", lambda of: {"scale": 0.0}),
    ("cascade", TypeError, "window", lambda of: {"window": 8}),
    ("cascade", TypeError, "starts", lambda of: {"starts": of["rows"]}),
    ("cascade", ValueError, "1 to 8, num_heads", lambda of: {"q": of["q"].repeat(1, 9, 1, 1), "out": None}),
    ("append", ValueError, "must", heads(slice(None, None, 2), *NEW)),
    ("append", ValueError, "must", heads(slice(1, 57), *NEW)),
    ("append", ValueError, "must", heads(slice(60), *NEW)),
    ("append", ValueError, "must", heads(slice(0), "k", "k_cache")),
    ("append", ValueError, "must", no_heads(*NEW)),
    ("append, rotary", ValueError, "must", heads(slice(32), "query", "rotated")),
    ("append, rotary", ValueError, "must", lambda of: {"rotated": of["query"][:, :1].expand(-1, 4, -1)}),
    ("append, rotary", ValueError, "must", heads(slice(24), "cos", "sin")),
    ("append, rotary", ValueError, "must", heads(slice(1, 33), "cos", "sin")),
    ("append, rotary", ValueError, "must", lambda of: {name: of[name].repeat(1, 2) for name in ("cos", "sin")}),
    ("append, rotary", TypeError, "must", lambda of: {name: of[name].float() for name in ("query", "rotated")}),
    ("append, rotary", TypeError, "must", lambda of: {name: of[name].to(e4m3) for name in NEW}),
    ("append, 8 bits", TypeError, "_scales", lambda of: {"k_scales": None, "v_scales": None}),
    ("append, 8 bits", TypeError, "_scales", lambda of: {"v_scales": None}),
    ("append, 8 bits", ValueError, "_scales", lambda of: {"v_scales": of["v_scales"][:, :1].expand(-1, 64, -1)}),
    ("append, 8 bits", ValueError, "_scales", lambda of: {"v_scales": of["v_scales"][:, 0]}),
    ("append, 8 bits", TypeError, "must", lambda of: dict.fromkeys(NEW[2:], random(3, 64, 2, 64))),
    ("append, 8 bits", TypeError, "must", lambda of: {"k_cache": of["k_cache"].view(torch.float8_e5m2)}),
    ("append, 8 bits", TypeError, "must", lambda of: {"v_cache": of["v_cache"].view(e4m3)}),
    ("append, blocks", ValueError, r"k_scales \[12, 2\]; it must be \[3, 2\]", lambda of: {
        name: of[name].to(int8) for name in NEW[2:]
    } | dict.fromkeys(("k_scales", "v_scales"), torch.ones(12, 2, device=DEVICE))),
    ("copy_tokens", ValueError, r"\[3, 64, 2, 0\]", heads(slice(0), "source", "target")),
    ("copy_tokens", ValueError, r"\[3, 64, 0, 64\]", no_heads("source", "target")),
    ("copy_tokens", TypeError, "lengths None", lambda of: {"lengths": None}),
    ("copy_tokens", TypeError, "max_length 1.5", lambda of: {"max_length": 1.5}),
    ("copy_tokens", TypeError, "max_length None", lambda of: {"max_length": None}),
    ("copy_tokens", ValueError, "max_length -1", lambda of: {"max_length": -1}),
    ("copy_tokens", ValueError, "blocks of threads", lambda of: {"max_length": 1 << 40}),
    ("copy_tokens", ValueError, "65,536 ranges", lambda of: {
        name: each.repeat(65_536) for name, each in of.items() if name not in ("source", "target", "max_length")
    }),
]  # fmt: skip


@pytest.mark.parametrize("name", valid())
def test_what_does_not_go_together_is_refused_before_any_launch(name: str) -> None:
    function, arguments = valid()[name]
    written = [each for key, each in arguments.items() if key in ("out", "k_cache", "v_cache", "target", "rotated")]
    before = [each.clone() for each in written]
    for number, (of, error, match, changes) in enumerate(WRONG):
        if of == name:
            refused = refusal(function, arguments | changes(arguments))
            assert isinstance(refused, error), (number, refused)
            assert re.search(match, str(refused)), (number, refused)
    assert all(map(torch.equal, written, before))
