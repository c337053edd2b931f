"""Bandwidth to send a sequence to another process, beside plain tensors and beside blocks.

    python -m benchmarks.transfer [--device cuda] [--tokens 32768] [--rounds 20] [--json]

Two processes, on two GPUs over NCCL, or on host memory over gloo. The same bytes go in five ways, in turns: from a
plain tensor to a plain tensor; from a row to a row, with one send and one receive of torch; by `Sequence.send` and
`KVCache.receive`, with all that they say to each other before, onto a row that is adopted and onto new pages; and as a
cache of blocks has to, from scattered pieces that are gathered into a buffer, sent, and scattered there. A time is from
when both processes begin until both have done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch.multiprocessing import spawn

from vmmkv import KVCache
from vmmkv.cli.output import Device, JsonOutput, format_bytes
from vmmkv.driver.driver import open_driver

from .environment import environment
from .geometry import layout_on, synchronize
from .output import Lines, Row, deliver

SENDER, RECEIVER = 0, 1
PIECE = 32 << 10
"""Bytes that lie side by side in a cache of blocks: K of 16 tokens of a layer of Llama-3.1-8B."""
WARM_UP = 3
"""Rounds that are not counted: NCCL connects, the receiver's row gets its pages."""
PLAIN, SENT, SENT_NEW = "plain tensors", "send() and receive()", "send() and receive(), onto new pages"


def move(rank: int, message: torch.Tensor) -> None:
    """One message from the sender to the receiver."""
    if rank == SENDER:
        dist.send(message, RECEIVER)
    else:
        dist.recv(message, SENDER)


class Plain:
    """From a tensor of torch's allocator to another.

    Both processes have each way: `go()` is timed, `bytes()` are those that are sent or were received, and `forget()`
    overwrites the receiver's.
    """

    def __init__(self, rank: int, nbytes: int, device: torch.device) -> None:
        self.rank, self.tensor = rank, torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def go(self) -> None:
        move(self.rank, self.tensor)

    def bytes(self) -> torch.Tensor:
        return self.tensor

    def forget(self) -> None:
        self.tensor.zero_()


class Rows:
    """From a row to a row that has pages."""

    def __init__(self, rank: int, cache: KVCache, tokens: int) -> None:
        self.rank, self.cache = rank, cache
        self.sequence = cache.sequence(tokens)

    def go(self) -> None:
        move(self.rank, self.bytes())

    def bytes(self) -> torch.Tensor:
        row = self.cache.range(0).view(torch.uint8).view(self.cache.max_sequences, -1)[self.sequence.row]
        return row[: self.sequence.length * self.cache.layout.token_bytes]

    def forget(self) -> None:
        self.bytes().zero_()


class Sequences(Rows):
    """From a sequence to a new one, on a row whose pages are still mapped."""

    def go(self) -> None:
        if self.rank == SENDER:
            self.sequence.send(RECEIVER)
        else:
            self.sequence = self.cache.receive(SENDER)

    def forget(self) -> None:
        self.bytes().zero_()
        self.sequence.free()


class NewPages(Sequences):
    """From a sequence to a new one, whose pages have to be made and mapped."""

    def forget(self) -> None:
        super().forget()
        self.cache.trim()


class Pieces:
    """From pieces in any order, by a buffer and a buffer, to pieces in any order."""

    def __init__(self, rank: int, nbytes: int, device: torch.device) -> None:
        self.rank = rank
        self.pieces = torch.zeros(nbytes // PIECE, PIECE, dtype=torch.uint8, device=device)
        self.buffer = torch.empty_like(self.pieces)
        self.order = torch.randperm(len(self.pieces), device=device)

    def go(self) -> None:
        if self.rank == SENDER:
            torch.index_select(self.pieces, 0, self.order, out=self.buffer)
        move(self.rank, self.buffer)
        if self.rank == RECEIVER:
            self.pieces.index_copy_(0, self.order, self.buffer)

    def bytes(self) -> torch.Tensor:
        return self.pieces.view(-1)

    def forget(self) -> None:
        self.pieces.zero_()

    def arranged(self, content: torch.Tensor) -> torch.Tensor:
        """Bytes as they lie in these pieces, of which the i-th is at `order[i]`."""
        return torch.empty_like(self.pieces).index_copy_(0, self.order, content.view_as(self.pieces)).view(-1)


Way = Plain | Rows | Pieces


def work(rank: int, folder: str, on_gpus: bool, tokens: int, rounds: int) -> None:
    """What each process does; the sender writes what was found."""
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    bound = {"device_id": device} if on_gpus else {}
    backend, meet = "nccl" if on_gpus else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=2, timeout=timedelta(minutes=10), **bound)
    layout = layout_on(on_gpus)
    nbytes = tokens * layout.token_bytes
    with KVCache(layout, 3, tokens, max_bytes=3 * nbytes + (256 << 20), device=device, lookahead=0) as cache:
        ways: dict[str, Way] = {
            PLAIN: Plain(rank, nbytes, device),
            "rows, K and V alone": Rows(rank, cache, tokens),
            SENT: Sequences(rank, cache, tokens),
            SENT_NEW: NewPages(rank, cache, tokens),
            f"pieces of {format_bytes(PIECE)}": Pieces(rank, nbytes, device),
        }
        random = torch.Generator(device).manual_seed(0)  # in both processes the same
        content = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device, generator=random)
        if rank == SENDER:
            for way in ways.values():
                way.bytes().copy_(laid(way, content))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(WARM_UP + rounds):
            for name in in_turn(ways, number):
                took = timed(rank, ways[name], content)
                if number >= WARM_UP:
                    seconds[name].append(took)
        if rank == SENDER:
            (Path(folder) / "result.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def in_turn(ways: dict[str, Way], number: int) -> Iterator[str]:
    """All ways, another one first in each round."""
    names, first = list(ways), number % len(ways)
    yield from names[first:] + names[:first]


def laid(way: Way, content: torch.Tensor) -> torch.Tensor:
    """Bytes as they lie where a way takes them from, and brings them to."""
    return way.arranged(content) if isinstance(way, Pieces) else content


def timed(rank: int, way: Way, content: torch.Tensor) -> float:
    """Seconds until both processes have done; the receiver has forgotten the bytes before, and has them afterwards."""
    if rank == RECEIVER:
        way.forget()
    meet(content.device)
    start = perf_counter()
    way.go()
    synchronize(content.device)
    took = torch.tensor([perf_counter() - start], dtype=torch.float64, device=content.device)
    assert torch.equal(way.bytes(), laid(way, content))
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def meet(device: torch.device) -> None:
    """Has both processes go on at the same time, with nothing left to do."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def main(
    device: Device = None,
    tokens: Annotated[int | None, typer.Option(min=16, help="Of the sequence: 32,768, or 512 on a CPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 20,
    json_output: JsonOutput = False,
) -> None:
    """Measure what it takes to send a sequence."""
    place = open_driver(device).device
    on_gpus = place.type == "cuda"
    if on_gpus and torch.cuda.device_count() < 2:
        raise typer.BadParameter("two GPUs are needed, or --device cpu")
    tokens = (tokens or (32_768 if on_gpus else 512)) // 16 * 16  # which fill pieces
    token_bytes, facts = layout_on(on_gpus).token_bytes, environment(place)
    with TemporaryDirectory() as folder:
        spawn(work, (folder, on_gpus, tokens, rounds), nprocs=2)
        seconds = json.loads((Path(folder) / "result.json").read_text())
    result: Row = {
        "environment": facts,
        "backend": f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if on_gpus else "gloo",
        "tokens": tokens,
        "token_bytes": token_bytes,
        "rounds": rounds,
        "ways": figures(seconds, tokens * token_bytes),
    }
    deliver(result, json_output, {f"{format_bytes(tokens * token_bytes)} to another process, {place}": table})


def figures(seconds: dict[str, list[float]], nbytes: int) -> list[Row]:
    """Of each way the median, and where four of five rounds lie; bandwidth as a share of plain tensors'."""
    rows: list[Row] = []
    for name, each in seconds.items():
        slow, fast = np.percentile(each, (90, 10)).tolist()
        rows.append(
            {
                "way": name,
                "ms": median(each) * 1e3,
                "gb_per_s": nbytes / median(each) / 1e9,
                "gb_per_s_p10": nbytes / slow / 1e9,
                "gb_per_s_p90": nbytes / fast / 1e9,
                "ratio": median(seconds[PLAIN]) / median(each),
            }
        )
    return rows


def table(result: Row) -> Lines:
    """A line for each way."""
    return ("", "ms", "GB/s", "of plain tensors"), [
        (
            row["way"],
            f"{row['ms']:,.2f}",
            f"{row['gb_per_s']:,.1f} ({row['gb_per_s_p10']:,.1f} to {row['gb_per_s_p90']:,.1f})",
            f"{row['ratio']:.1%}",
        )
        for row in result["ways"]
    ]


if __name__ == "__main__":
    typer.run(main)
