"""A result of `generate` as tables."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.output import Lines, Row
from vmmkv.cli.output import format_bytes

LLAMA = "Llama-3.1-8B"
Shape = tuple[int, int]
"""Sequences, and tokens of each prompt."""
SHAPES = (1, 512), (1, 8192), (1, 32_768), (8, 512), (8, 32_768), (32, 8192)
"""Of the table in the docs."""


def measured(cell: Row) -> bool:
    return bool(cell["status"] == "measured")


def step_ms(cell: Row) -> str:
    return f"{cell['step_ms']:.1f}"


def peak(cell: Row) -> str:
    return "-" if cell["kv_peak_bytes"] is None else f"{cell['kv_peak_bytes'] / cell['live_bytes']:.3f}"


def copied(cell: Row) -> str:
    return "-" if cell["copied_bytes"] is None else format_bytes(cell["copied_bytes"])


def table(
    what: str, figure: Callable[[Row], str], model: str = LLAMA, shapes: tuple[Shape, ...] = ()
) -> Callable[[Row], Lines]:
    """A function from a result to a figure by batch size and prompt, of some or of all that were measured: a line for
    each way to decode, ours in bold."""

    def write(result: Row) -> Lines:
        cells = [cell for cell in result["cells"] if cell["model"] == model]
        columns = shapes or sorted({shape(cell) for cell in cells if measured(cell)})
        lines = []
        for name in dict.fromkeys(cell["contender"] for cell in cells):
            of = {shape(cell): cell for cell in cells if cell["contender"] == name}
            texts = (figure(of[each]) if measured(of[each]) else of[each]["status"] for each in columns)
            lines.append((f"**{name}**" if name.startswith("VmmCache") else name, *texts))
        return (what, *(f"{batch} x {prompt:,}" for batch, prompt in columns)), lines

    return write


def shape(cell: Row) -> Shape:
    return cell["batch"], cell["prompt"]


def tables(model: str) -> dict[str, Callable[[Row], Lines]]:
    """The tables of a model, by title."""
    figures = {
        "ms a decode step": step_ms,
        "ms to the first token": lambda cell: "-" if cell["ttft_ms"] is None else f"{cell['ttft_ms']:.1f}",
        "peak of K and V over live K and V": peak,
        "bytes copied in a step": copied,
        "error of logits": lambda cell: f"{cell['logits_error']:.1e}",
    }
    return {f"{model}: {what}": table(what, figure, model) for what, figure in figures.items()}


def headline(result: Row) -> dict[str, float]:
    """By cache, milliseconds of the fastest decode step of 8 prompts of 32,768 tokens."""
    cells = [cell for cell in result["cells"] if (cell["model"], *shape(cell)) == (LLAMA, 8, 32_768)]
    return {
        cache: min(cell["step_ms"] for cell in cells if cell["contender"].startswith(cache) and measured(cell))
        for cache in ("VmmCache", "StaticCache", "DynamicCache")
    }
