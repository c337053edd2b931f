"""The benchmark of tensor parallelism, on the host with its tiny model: who interrupts it has what was measured."""

from __future__ import annotations

import json
import os

import pytest
import torch
from conftest import ROOT, run_python
from typer import Typer
from typer.testing import CliRunner

from benchmarks import batching_ranks
from benchmarks.batching_tables import compare_ranks

APP = Typer()
APP.command()(batching_ranks.main)
FORKED = f"""
    import gc, multiprocessing, os, signal, threading
    sys.path.insert(0, {str(ROOT)!r})
    from benchmarks import processes
    processes.get_context = lambda _: multiprocessing.get_context("fork")  # what is imported here is there

    def hang(rank, *_):
        threading.Event().wait()
"""


def test_an_interrupted_run_has_what_was_measured_before() -> None:
    code = """
    import typer
    from benchmarks import batching_ranks
    run_processes, turns = processes.run_processes, []

    def run(ranks, work, *args):
        turns.append(ranks)
        if len(turns) == 3:
            work = hang
            processes.wait = lambda _: os.kill(os.getpid(), signal.SIGINT)
        run_processes(ranks, work, *args)

    batching_ranks.run_processes = run
    gc.freeze()  # processes need not look through what was imported for garbage, as each would in the end
    try:
        typer.run(batching_ranks.main)
    finally:
        assert turns == [2, 1, 2]
    """
    alone = os.environ | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_python(FORKED + code, "--requests", "4", "--rounds", "2", "--memory", "8MiB", "--json", env=alone)
    assert done.returncode, done.stderr
    result = json.loads(done.stdout)
    assert result["missed"] == ["2 ranks, round 2", "1 rank, round 2"]
    one, two = result["served"]
    assert (one["ranks"], two["ranks"], len(one["driver_s"]), len(two["driver_s"])) == (1, 2, 1, 2)
    for row in (one, two):
        assert row["finished"] == 4
        assert row["steps"] > 2
        assert min(row["driver_s"]) > 0  # it begins without memory, though it is warm
        assert 0 <= row["delay_of_step"]["p50"] <= row["delay_of_step"]["p99"] <= row["delay_of_step"]["most"]
        assert 0 < row["delayed"] <= row["steps"]  # on the host nothing is mapped while a step computes
    assert two["compared"] == 4
    assert compare_ranks(result) == result["comparisons"]
    for name in ("2 ranks, round 1", "1 rank, round 1"):
        told = [line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith(name)]
        assert told[:4] == ["imported", "model made", "started", "warmed up"]
        assert told[4].startswith("4 of 4 requests in ")


def test_processes_end_with_the_first_that_fails() -> None:
    code = """
    def fail(rank):
        if rank == 0:
            hang(rank)
        raise SystemExit(3)

    try:
        processes.run_processes(2, fail)
    except RuntimeError as error:
        assert "[None, 3]" in str(error)
        print("ended")
    """
    done = run_python(FORKED + code)
    assert done.stdout == "ended\n", done.stderr


def test_what_there_is_no_time_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(APP, ["--rounds", "1", "--budget-seconds", "0", "--json"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "2 ranks, round 1, 1 rank, round 1" in " ".join(done.stderr.split())


def test_later_rounds_begin_only_if_there_is_time_for_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, turns = [100.0], []

    def serve(ranks: int, *_: object) -> None:
        now[0] += 10 * ranks
        turns.append(ranks)

    monkeypatch.setattr(batching_ranks, "perf_counter", lambda: now[0])
    monkeypatch.setattr(batching_ranks, "run_processes", serve)
    asked = batching_ranks.Asked(False, "", "tiny", None, None, 1, 1, 1.0)
    for deadline, expected in ((100.0, []), (101.0, [2]), (141.0, [2, 1]), (151.0, [2, 1, 2]), (171.0, [2, 1, 2, 1])):
        now[0] = 100.0
        turns.clear()
        batching_ranks.measure({}, asked, 2, deadline)
        assert turns == expected


def test_the_slowest_rank_counts_in_each_step() -> None:
    """Of what the driver took before a launch, of the time that the step took; nothing if the device was busy."""
    one = batching_ranks.delays(
        [batching_ranks.Launch(0.5, True, 1.0, 3.0), batching_ranks.Launch(0.5, False, 3.0, 4.0)]
    )
    other = batching_ranks.delays(
        [batching_ranks.Launch(0.0, True, 1.0, 3.0), batching_ranks.Launch(0.25, True, 3.0, 4.0)]
    )
    assert (one, other) == ([0.25, 0.0], [0.0, 0.25])
    row = {"round": 0, "seconds": 4.0, "tokens_per_s": 1.0}
    written = [{"row": row, "answers": {}, "driver_s": 0.5, "delays": delays} for delays in (one, other)]
    found = {(0, len(each)): batching_ranks.together(each) for each in (written, written[:1])}
    rows = batching_ranks.rows_of(found)
    assert [(row["delayed"], row["delay_of_step"]["p50"]) for row in rows] == [(1, 0.125), (2, 0.25)]
    told = {row["what"]: row for row in compare_ranks({"served": rows})}
    most = told["of a step, by which the driver delayed it on two, of the GPU where it was more, most"]
    assert most["value"] == 0.25
    assert "99th percentile" in " ".join(told)
