"""The command `vmmkv serve`: transformers' server, on rows."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import UnsupportedError


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="The model: a folder, or a repository on the hub such as org/name, org/name@revision or "
            "org/name:file.gguf; without one each request names its own. And any options of transformers serve.",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(help="The most that K and V may take: 20GiB, or 80% of what is free.")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest request, new ones included: addresses only.")
    ] = None,
    idle_seconds: Annotated[
        float, typer.Option(min=0, help="After so long without a request memory goes back to the system.")
    ] = 10.0,
    kv_dtype: Annotated[
        str | None, typer.Option(help="fp8 or int8: K and V in 8 bits; without it in the model's dtype.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Share the budget of this name with other processes; `vmmkv pool` shows it.")
    ] = None,
    reserved: Annotated[
        str | None, typer.Option(help="With --pool: memory that this server can have at any time, 8GiB or 20%.")
    ] = None,
) -> object:
    """Serve a model as `transformers serve` does, with K and V of all requests in rows.

    All other options are those of `transformers serve`, which lists them with `--help`; continuous batching is on.
    `/metrics` is for Prometheus, and `vmmkv top` shows the server. Needs the extra `vmmkv[serve]`.
    """
    try:
        from ..integrations.serving import serve as serve_on_rows
    except ImportError as error:  # nothing there, or another version of it
        raise UnsupportedError(
            f'asked for a server, and found none that is known here ({error}); run: pip install "vmmkv[serve]"'
        ) from error
    return serve_on_rows(
        arguments or [],
        max_bytes=max_bytes,
        max_seq_len=max_seq_len,
        idle_seconds=idle_seconds,
        kv_dtype=kv_dtype,
        pool=pool,
        reserved=reserved or 0,
    )
