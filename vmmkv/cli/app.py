"""The commands, and what becomes of an error in one of them."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from .. import __version__
from ..errors import VmmkvError
from .check_kernel import check_kernel
from .demo import demo
from .info import info
from .output import errors
from .plan import plan
from .pool import pool
from .serve import serve
from .top import top

app = typer.Typer(
    help="A KV cache that is one contiguous tensor, backed by memory only where tokens are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (info, plan, demo, top, pool, check_kernel):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True})(serve)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"vmmkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and end.")
    ] = False,
) -> None:
    """Options of the command line itself; the help of the commands is the app's."""


def run() -> None:
    """Runs the command line; an error that vmmkv raises on purpose is one line and exit status 2."""
    try:
        app()
    except VmmkvError as error:
        errors.print(f"vmmkv: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the interpreter does at its end would print tracebacks
