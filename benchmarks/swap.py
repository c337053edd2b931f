"""Bandwidth to suspend a sequence and to resume it, beside one pinned copy, and beside blocks.

    python -m benchmarks.swap [--device cuda] [--tokens 32768] [--rounds 10] [--json]

The same bytes go to the host and back in several ways, in turns: from a plain tensor to pinned memory in one copy; by
`Sequence.suspend` and `Sequence.resume`, onto pages that are still there and onto new ones; and as a cache of blocks
has to, in pieces, which are gathered into a buffer and scattered from there. A time ends when the device has done.
"""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.progress import track

from vmmkv import KVCache, Sequence
from vmmkv.cli.output import Device, JsonOutput, errors, format_bytes
from vmmkv.driver.driver import open_driver

from .environment import environment
from .geometry import layout_on, synchronize
from .output import Lines, Row, deliver
from .transfer import PIECE, PLAIN, WARM_UP, figures, in_turn

GATHERED = f"pieces of {format_bytes(PIECE)}, gathered"
SUSPENDED, SUSPENDED_NEW = "suspend() and resume()", "suspend() and resume(), onto new pages"


class Plain:
    """A tensor, and one copy.

    A way has `content`, which must be there again, `out()`, which brings it to the host, `forget()`, which leaves
    nothing of it on the device, `back()`, which brings it back, and `here()`, which returns what is there now.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.content = self.memory.clone()

    def out(self) -> None:
        self.host.copy_(self.memory, non_blocking=True)

    def forget(self) -> None:
        self.memory.zero_()

    def back(self) -> None:
        self.memory.copy_(self.host, non_blocking=True)

    def here(self) -> torch.Tensor:
        return self.memory


class Gathered(Plain):
    """Pieces that lie anywhere: a kernel puts them side by side."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, device)
        self.pieces = self.memory.view(-1, PIECE)
        self.places = torch.randperm(len(self.pieces), device=device)
        self.buffer = torch.empty_like(self.pieces)

    def out(self) -> None:
        torch.index_select(self.pieces, 0, self.places, out=self.buffer)
        self.host.view(-1, PIECE).copy_(self.buffer, non_blocking=True)

    def back(self) -> None:
        self.buffer.copy_(self.host.view(-1, PIECE), non_blocking=True)
        self.pieces.index_copy_(0, self.places, self.buffer)


class Suspended:
    """A sequence.

    Args:
        takes_pages: whether it has to have new pages when it comes back.
    """

    def __init__(self, cache: KVCache, tokens: int, takes_pages: bool) -> None:
        self.cache, self.sequence, self.takes_pages = cache, cache.sequence(tokens), takes_pages
        for states in self.states():
            states.copy_(torch.randn(states.shape, device=states.device))
        self.content = self.here()

    def states(self) -> list[torch.Tensor]:
        sequence: Sequence = self.sequence
        return [sequence.k(0), sequence.v(self.cache.layout.num_layers - 1)]

    def out(self) -> None:
        self.sequence.suspend()

    def forget(self) -> None:
        if self.takes_pages:
            self.cache.trim()

    def back(self) -> None:
        self.sequence.resume()

    def here(self) -> torch.Tensor:
        return torch.stack(self.states())


Way = Plain | Suspended


def measure(ways: dict[str, Way], device: torch.device, rounds: int) -> tuple[dict[str, list[float]], ...]:
    """By way, the seconds of each round: to the host, and back."""
    out: dict[str, list[float]] = {name: [] for name in ways}
    back: dict[str, list[float]] = {name: [] for name in ways}
    steps = range(WARM_UP + rounds)
    for number in track(steps, "Copying", console=errors, disable=not errors.is_terminal):
        for name in in_turn(ways, number):
            way = ways[name]
            for seconds, move in ((out, way.out), (back, way.back)):
                if move == way.back:
                    way.forget()
                synchronize(device)
                start = perf_counter()
                move()
                synchronize(device)
                if number >= WARM_UP:
                    seconds[name].append(perf_counter() - start)
            assert torch.equal(way.here(), way.content)
    return out, back


def main(
    device: Device = None,
    tokens: Annotated[int | None, typer.Option(min=16, help="Of the sequence: 32,768, or 512 on a CPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 10,
    json_output: JsonOutput = False,
) -> None:
    """Measure suspending and resuming."""
    place = open_driver(device).device
    facts = environment(place)
    on_gpu = place.type == "cuda"
    layout = layout_on(on_gpu)
    tokens = (tokens or (32_768 if on_gpu else 512)) // 16 * 16  # which fill pieces
    nbytes = tokens * layout.token_bytes
    budget = 2 * nbytes + (256 << 20)
    with KVCache(layout, 2, tokens, max_bytes=budget, device=place, lookahead=0, host_bytes=budget) as cache:
        ways: dict[str, Way] = {
            PLAIN: Plain(nbytes, place),
            SUSPENDED: Suspended(cache, tokens, takes_pages=False),
            SUSPENDED_NEW: Suspended(cache, tokens, takes_pages=True),
            GATHERED: Gathered(nbytes, place),
        }
        out, back = measure(ways, place, rounds)
    result: Row = {
        "environment": facts,
        "tokens": tokens,
        "token_bytes": layout.token_bytes,
        "rounds": rounds,
        "out": figures(out, nbytes),
        "back": figures(back, nbytes),
    }
    deliver(result, json_output, {f"{format_bytes(nbytes)} to the host and back, {place}": table})


def table(result: Row) -> Lines:
    """A line for each way."""
    return ("", "to the host, GB/s", "of one copy", "back, GB/s", "of one copy"), [
        (out["way"], *cells(out), *cells(back)) for out, back in zip(result["out"], result["back"])
    ]


def cells(row: Row) -> tuple[str, str]:
    speed = f"{row['gb_per_s']:.1f} ({row['gb_per_s_p10']:.1f} to {row['gb_per_s_p90']:.1f})"
    return speed, f"{row['ratio']:.2f}"


if __name__ == "__main__":
    typer.run(main)
