"""The benchmark of sequences that go to another process, on host memory: the same bytes in all ways, and figures."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from pair import together
from typer import Typer
from typer.testing import CliRunner

from benchmarks import tables, transfer
from benchmarks.geometry import SMALL
from vmmkv import KVCache

APP = Typer()
APP.command()(transfer.main)


class Nothing(transfer.Plain):
    """A way that brings nothing."""

    def go(self) -> None: ...


def time_ways(rank: int, seed: int) -> None:
    layout, device, tokens = SMALL, torch.device("cpu"), 64
    nbytes = tokens * layout.token_bytes
    content = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    with KVCache(layout, 3, tokens, max_bytes="64MiB", device=device) as cache:
        ways: list[Any] = [
            transfer.Plain(rank, nbytes, device),
            transfer.Rows(rank, cache, tokens),
            transfer.Sequences(rank, cache, tokens),
            transfer.NewPages(rank, cache, tokens),
            transfer.Pieces(rank, nbytes, device),
        ]
        for way in ways:
            if rank == transfer.SENDER:
                way.bytes().copy_(transfer.laid(way, content))
            for _ in range(2):
                assert transfer.timed(rank, way, content) > 0
    nothing = Nothing(rank, nbytes, device)
    if rank == transfer.SENDER:
        nothing.bytes().copy_(content)
        transfer.meet(device)
    else:
        with pytest.raises(AssertionError):
            transfer.timed(rank, nothing, content)


def test_every_way_brings_all_bytes() -> None:
    together(time_ways, random.randrange(1 << 32))


def test_figures() -> None:
    times = {transfer.PLAIN: [1.0, 2.0, 3.0], "other": [3.0, 4.0, 8.0]}
    plain, other = transfer.figures(times, 8 * 10**9)
    assert (plain["ms"], plain["gb_per_s"], plain["ratio"]) == (2000, 4, 1)
    assert (other["ms"], other["gb_per_s"], other["ratio"]) == (4000, 2, 0.5)
    assert other["gb_per_s_p10"] < 2 < other["gb_per_s_p90"]


def test_it_measures_all_of_it() -> None:
    done = CliRunner().invoke(APP, ["--device", "cpu", "--tokens", "70", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["backend"], result["tokens"], len(result["ways"])) == ("gloo", 64, 5)
    assert all(row["gb_per_s"] > 0 for row in result["ways"])
    transfer.show(result)
    assert tables.TABLES["handing-over"].write(result).count("\n") == 6
