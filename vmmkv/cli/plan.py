"""The command `vmmkv plan`: how much of a model's KV cache fits into some memory, by each scheme."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..arguments import check_length, check_size
from ..budget import parse_bytes
from ..core.addresses import check_address_space
from ..driver.driver import DEFAULT_PAGE_SIZE, open_driver
from ..errors import BudgetError, LayoutError
from ..layout import KVLayout, dtype_from_name, kv_dtype_from_name
from ..model_config import MAX_SEQ_LEN, layout_from_config, text_config
from ..schemes import SCHEMES, allocated_bytes
from .output import JsonOutput, console, format_bytes, make_table, print_json

DEFAULT_SEQ_LEN = 8192
"""Tokens of the longest sequence, if the config names none."""


def plan(
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "--config",
            exists=True,
            help="A model's config.json, or its folder, instead of its sizes; several for models on one card.",
        ),
    ] = None,
    reserved: Annotated[
        list[str] | None,
        typer.Option(help="Once for each of several models: 10GiB, or a share of --memory, that it can always have."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers that keep K and V.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads per layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Width of a K head.")] = None,
    v_head_dim: Annotated[int | None, typer.Option(min=0, help="Width of a V head; that of K by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float16, float8_e4m3fn, ...; the config's, else bfloat16.")] = None,
    scales: Annotated[
        str | None,
        typer.Option(help="float8_e4m3fn and int8: token_head (in the token record) or sequence_head (outside)."),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="fp8 or int8: K and V as VmmCache(kv_dtype=...) has them, scales included.")
    ] = None,
    memory: Annotated[str, typer.Option(help="80GiB, or a share of what is free on this machine's device.")] = "80%",
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="The config's by default, else 8192.")] = None,
    mean_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean live tokens of a sequence; a quarter of max-seq-len by default.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --tokens: the exact size of this cache.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each of its sequences.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Say how much of a model's KV cache fits into some memory.

    Compares a static reservation of max-seq-len, a block table with blocks of 16 tokens, a range of 2 MiB pages for
    K and V of each layer, and vmmkv, whose pages hold all layers of a token. Their waste is that of sequences of all
    lengths around the mean, as many shorter as longer.

    For a config, transformers (pip install "vmmkv[hf]") runs the model without weights, and the command counts what the
    layers cache. A layer with an attention window counts as one that keeps all tokens. Models whose layers cache
    something else than K and V are refused.

    With several --model it compares one pool, of which each has what the others leave, with equal shares of the memory:
    what fits of each at all times, as --reserved says, while the others are idle, and of all at once.
    """
    if (batch is None) != (tokens is None):
        raise typer.BadParameter("--batch and --tokens go together")
    if kept := kv_dtype_from_name(kv_dtype):
        if dtype or scales:
            raise typer.BadParameter("give --kv-dtype, or --dtype and --scales")
        dtype, scales = str(kept).removeprefix("torch."), "token_head"
    models = model or []
    if bool(models) == any(size is not None for size in (layers, kv_heads, head_dim, v_head_dim)):
        raise typer.BadParameter("give --model, or --layers, --kv-heads and --head-dim")
    if len(models) > 1 and batch:
        raise typer.BadParameter("--batch goes with one model")
    if len(models) < 2 and reserved:
        raise typer.BadParameter("--reserved goes with several --model; one model has all of the memory")
    if reserved and len(reserved) != len(models):
        raise typer.BadParameter("give --reserved once for each --model, in their order; 0 reserves nothing")
    described = [_read_model(path, dtype, scales) for path in models]
    if layers and kv_heads and head_dim:
        described = [(KVLayout(layers, kv_heads, head_dim, dtype_from_name(dtype), v_head_dim, scales=scales), None)]
    elif not models:
        raise typer.BadParameter("give --model, or --layers, --kv-heads and --head-dim")
    nbytes = parse_bytes(memory, free=open_driver().memory_info()[0])
    if nbytes < DEFAULT_PAGE_SIZE * len(described):
        raise BudgetError(
            f"asked for --memory {memory}, which is less than a page of {DEFAULT_PAGE_SIZE} bytes for each model"
        )
    lengths = [max_seq_len or longest or DEFAULT_SEQ_LEN for _, longest in described]
    plans = [
        partial(_plan, layout, max_seq_len=length, mean_tokens=mean_tokens or -(-length // 4))
        for (layout, _), length in zip(described, lengths)
    ]
    if len(plans) > 1:
        result = _plan_pool([str(path) for path in models], plans, reserved or ["0"] * len(models), nbytes)
    else:
        result = plans[0](nbytes)
        if batch and tokens:
            taken = batch * tokens * result["token_bytes"]
            result["cache"] = {"batch": batch, "tokens": tokens, "bytes": taken}
    if json_output:
        print_json(result)
    else:
        (_print_pool if "models" in result else _print)(result)


def _read_model(path: Path, dtype: str | None, scales: str | None) -> tuple[KVLayout, int | None]:
    """The layout of a model by its config.json or the folder of it, and the longest sequence that the config names."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise typer.BadParameter(f"--model {path}: there is no config.json in this folder")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise LayoutError(f"{file} holds a JSON {type(config).__name__}; a config.json holds an object")
    text = text_config(config)
    key = next((key for key in MAX_SEQ_LEN if text.get(key)), None)
    longest = check_size(key, text[key]) if key else None
    return layout_from_config(config, dtype=dtype_from_name(dtype) if dtype else None, scales=scales), longest


def _plan_pool(
    models: list[str], plans: Sequence[Callable[[int], dict[str, Any]]], reserved: list[str], memory: int
) -> dict[str, Any]:
    """Several models on one pool, with so much reserved for each, and with an equal share of the memory each."""
    page_size = DEFAULT_PAGE_SIZE
    promised = [parse_bytes(size, free=memory) // page_size * page_size for size in reserved]
    if sum(promised) > memory:
        raise BudgetError(f"asked to reserve {sum(promised)} bytes in all, of {memory}; reserve less")
    share = memory // len(models) // page_size * page_size
    rows, costs = [], []
    for model, own, plan_in in zip(models, promised, plans):
        sizes = {"pool": memory - sum(promised) + own, "share": share, "reserved": own}
        found = {what: plan_in(size) for what, size in sizes.items()}
        fits = {
            what: {"total_tokens": plan["total_tokens"], "sequences": plan["schemes"]["vmmkv"]["sequences"]}
            for what, plan in found.items()
        }
        about = {name: found["pool"][name] for name in ("token_bytes", "max_seq_len", "mean_tokens")}
        rows.append({"model": model} | about | {"reserved_bytes": own} | fits)
        costs.append(found["pool"]["schemes"]["vmmkv"]["bytes_per_sequence"])
    return {
        "memory_bytes": memory,
        "share_bytes": share,
        "page_size": page_size,
        "sequences_of_each": _of_each(costs, promised, memory),
        "models": rows,
    }


def _of_each(costs: list[float], promised: list[int], memory: int) -> int:
    """How many sequences of every model fit at once: what is reserved for one is not there for others."""

    def taken(count: int) -> int:
        return math.ceil(sum(max(own, count * cost) for own, cost in zip(promised, costs)))

    return bisect_right(range(int(memory // sum(costs)) + 1), memory, key=taken) - 1


def _print_pool(result: dict[str, Any]) -> None:
    memory, models = format_bytes(result["memory_bytes"]), result["models"]
    columns = "model", "K and V of a token", "mean tokens", "sequences, fixed share", "reserved", "others idle"
    rows = [
        (
            Path(of["model"]).name,
            format_bytes(of["token_bytes"]),
            f"{of['mean_tokens']:,}",
            *(f"{of[what]['sequences']:,}" for what in ("share", "reserved", "pool")),
        )
        for of in models
    ]
    console.print(make_table(f"{len(models)} models in {memory}", columns, rows))
    console.print(
        f"A fixed share is {format_bytes(result['share_bytes'])}. On one pool (vmmkv.FramePool) a model has whatever "
        "the others neither use nor have reserved, and never less than it has reserved itself. While all are busy "
        f"they divide the same memory: {result['sequences_of_each']:,} sequences of each fit at once."
    )


def _plan(layout: KVLayout, memory: int, max_seq_len: int, mean_tokens: int) -> dict[str, Any]:
    check_length(mean_tokens, max_seq_len)
    page_size = DEFAULT_PAGE_SIZE
    row_bytes = layout.pages(max_seq_len, page_size) * page_size
    check_address_space(row_bytes, f"a row of max_seq_len={max_seq_len} tokens")
    # One length would flatter whatever it is a multiple of.
    spread = min(mean_tokens - 1, max_seq_len - mean_tokens)
    step = (spread >> 20) * 2 + 1  # a million lengths say as much as all of them
    lengths = mean_tokens + step * np.arange(-(spread // step), spread // step + 1)
    schemes = {}
    for scheme in SCHEMES:
        nbytes = float(allocated_bytes(scheme, layout, lengths, max_seq_len).mean())
        schemes[scheme] = {
            "bytes_per_sequence": nbytes,
            "sequences": int(memory // nbytes),
            "waste": 1 - mean_tokens * layout.token_bytes / nbytes,
        }
    return {
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "v_head_dim": layout.head_dim if layout.v_head_dim is None else layout.v_head_dim,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "scales": layout.scales,
        "token_bytes": layout.token_bytes,
        "layer_bytes": layout.token_bytes / layout.num_layers,
        "page_size": page_size,
        "tokens_per_page": page_size / layout.token_bytes,
        "max_seq_len": max_seq_len,
        "row_bytes": row_bytes,
        "int32_token_limit": layout.int32_token_limit,
        "memory_bytes": memory,
        "total_tokens": memory // page_size * page_size // layout.token_bytes,
        "mean_tokens": mean_tokens,
        "schemes": schemes,
    }


def _print(result: dict[str, Any]) -> None:
    limit, max_seq_len = result["int32_token_limit"], result["max_seq_len"]
    rows = [
        ("K and V of a token", format_bytes(result["token_bytes"])),
        ("of a token and layer", format_bytes(result["layer_bytes"])),
        (f"tokens in a page of {format_bytes(result['page_size'])}", f"{result['tokens_per_page']:.4g}"),
        (f"addresses of a row of {max_seq_len:,} tokens", format_bytes(result["row_bytes"])),
        ("tokens that 32-bit strides reach", f"{limit:,}" + (" (less than a row)" if limit < max_seq_len else "")),
        (f"tokens in {format_bytes(result['memory_bytes'])}", f"{result['total_tokens']:,}"),
    ]
    if cache := result.get("cache"):
        what = f"{cache['batch']:,} sequences of {cache['tokens']:,} tokens"
        rows.append((what, f"{format_bytes(cache['bytes'])} ({cache['bytes']:,} bytes)"))
    heads, width = _sizes(result["num_kv_heads"]), _sizes(result["head_dim"])
    layout = f"{result['num_layers']} layers, {heads} KV heads, head_dim {width}, {result['dtype']}"
    if result["scales"]:
        layout += f", scales by {result['scales']}"
    console.print(make_table(layout, ("what", "how much"), rows))
    console.print(
        make_table(
            f"Sequences of {result['mean_tokens']:,} tokens on average in {format_bytes(result['memory_bytes'])}",
            ("scheme", "bytes of one", "fit", "waste"),
            [
                (name, format_bytes(of["bytes_per_sequence"]), f"{of['sequences']:,}", f"{of['waste']:.1%}")
                for name, of in result["schemes"].items()
            ],
        )
    )


def _sizes(sizes: int | Sequence[int]) -> str:
    return " or ".join(map(str, sorted(set(sizes)))) if isinstance(sizes, Sequence) else str(sizes)
