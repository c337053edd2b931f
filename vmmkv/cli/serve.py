"""The command `vmmkv serve`: transformers' server, on rows."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import UnsupportedError


def serve(
    context: typer.Context,
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
) -> object:
    """Serve models as `transformers serve` does, with K and V of all requests in rows.

    The model, and all other options, are those of `transformers serve`, which lists them with `--help`; continuous
    batching is on. `/metrics` is for Prometheus, and `vmmkv top` shows the server. Needs the extra `vmmkv[serve]`.
    """
    try:
        from ..integrations.serving import serve as serve_on_rows
    except ImportError as error:  # nothing there, or another version of it
        raise UnsupportedError(
            f'asked for a server, and found none that is known here ({error}); run: pip install "vmmkv[serve]"'
        ) from error
    return serve_on_rows(
        context.args, max_bytes=max_bytes, max_seq_len=max_seq_len, idle_seconds=idle_seconds, kv_dtype=kv_dtype
    )
