"""The command `vmmkv check-kernel`: what an attention kernel does on awkward rows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from ..layout import dtype_from_name
from .output import Device, JsonOutput, console, make_table, print_json


def check_kernel(
    kernel: Annotated[str, typer.Argument(help="package.module:function, file.py:function, or a name below.")],
    device: Device = None,
    dtype: Annotated[str | None, typer.Option(help="Of Q, K and V; bfloat16 on a GPU, else float32.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="As many as heads.", show_default=False)] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    queries: Annotated[int, typer.Option(min=1, help="Of each sequence.")] = 1,
    tokens: Annotated[int, typer.Option(min=4, help="Of the longest sequence.")] = 257,
    seed: Annotated[int | None, typer.Option(help="Of all numbers; a new one.", show_default=False)] = None,
    json_output: JsonOutput = False,
) -> None:
    """Call an attention kernel on rows of every awkward kind, in a process of its own, and say what it does with them.

    It is called as `kernel(q, k, v, lengths) -> out`; `vmmkv.testing.check_attention` says what these are. These have
    names: sdpa-math, sdpa-flash, sdpa-efficient, sdpa-cudnn, the same with -masked, fa3, flashinfer, flashinfer-single,
    vmmkv, vmmkv-plain.

    The exit status is 1 if the kernel answers wrong or faults on any rows, or refuses ordinary ones.
    """
    from ..testing import check_attention

    report = check_attention(
        kernel,
        device=device,
        dtype=dtype_from_name(dtype) if dtype else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        queries=queries,
        tokens=tokens,
        seed=seed,
    )
    if json_output:
        print_json(report.as_dict())
    else:
        cells = [map(escape, line) for line in report.lines()]
        table = make_table(f"{escape(kernel)} on {report.case.device}", ("rows", "answer", "finding"), cells)
        table.columns[2].justify = "left"
        console.print(table)
        if report.overread:
            console.print(f"KVCache(overread={report.overread}) keeps memory there; with scrub=True it holds numbers.")
    raise typer.Exit(int(not report.right))
