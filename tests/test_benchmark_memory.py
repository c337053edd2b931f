"""The benchmarks about memory: their allocators and figures, against arithmetic that goes token by token."""

from __future__ import annotations

import json
import pickle
import resource
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

import vmmkv
import vmmkv.torch
from benchmarks import fragmentation, idle, reuse, tables
from benchmarks.virtual import FRAMES, SCHEMES, BlockPool, BlockSequence, make_allocator, used_bytes
from vmmkv.schemes import allocated_bytes
from vmmkv.workload import Request

MAX_SEQ_LEN = 512


def arithmetic(scheme: str, layout: vmmkv.KVLayout, lengths: list[int]) -> int:
    """Bytes that these sequences take under a scheme of `benchmarks.virtual`."""
    if scheme.startswith("block "):
        block = int(scheme.split()[1])
        return sum(-(-length // block) * block for length in lengths) * layout.token_bytes
    name = {"static": "static", "per layer": "per_layer", FRAMES[0]: "vmmkv"}[scheme]
    return int(allocated_bytes(name, layout, np.array(lengths, np.int64), MAX_SEQ_LEN).sum())


def replay_step_by_step(scheme: str, model: str, budget: int, requests: list[Request]) -> dict[str, float]:
    """The same replay, one token and one sum over all sequences at a time."""
    layout = fragmentation.MODELS[model]
    waiting = deque((request.prompt, request.output) for request in requests)  # tokens now, and still to come
    running: list[tuple[int, int]] = []
    steps = preemptions = peak = 0
    samples = []

    def fits(lengths: list[int]) -> bool:
        return arithmetic(scheme, layout, lengths) <= budget

    while waiting or running:
        while waiting and fits([length for length, _ in running] + [waiting[0][0]]):
            running.append(waiting.popleft())
        peak = max(peak, len(running))
        if steps % fragmentation.SAMPLE_STEPS == 0 and (waiting or not samples):
            lengths = [length for length, _ in running]
            samples.append((len(running), sum(lengths), arithmetic(scheme, layout, lengths) / layout.token_bytes))
        while not fits([length + 1 for length, _ in running]):
            waiting.appendleft(running.pop())
            preemptions += 1
        running = [(length + 1, left - 1) for length, left in running if left > 1]
        steps += 1
    sequences, tokens, used = map(sum, zip(*samples))
    return {
        "steps": steps,
        "preemptions": preemptions,
        "peak_sequences": peak,
        "sequences": sequences / len(samples),
        "waste": 1 - tokens / used,
        "unused_tokens": (used - tokens) / sequences,
    }


@pytest.mark.parametrize("scheme", [*SCHEMES[:-1], FRAMES[0]])
@pytest.mark.parametrize("model", ["Llama-2-7B", "Llama-3.1-8B"])
def test_the_allocators_do_what_arithmetic_says(scheme: str, model: str) -> None:
    rng = np.random.default_rng()
    lengths = zip(rng.integers(1, 400, 60).tolist(), rng.integers(1, 113, 60).tolist())
    requests = [Request(prompt, output) for prompt, output in lengths]
    row = fragmentation.simulate(model, 1, scheme, requests, MAX_SEQ_LEN)
    expected = replay_step_by_step(scheme, model, 1 << 30, requests)
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert 0 < len(row["curve"]["waste"]) <= fragmentation.CURVE_POINTS


@given(data=st.data())
def test_a_pool_hands_each_block_out_once_and_all_or_nothing(data: st.DataObject) -> None:
    block = data.draw(st.integers(1, 5))
    pool = BlockPool(data.draw(st.integers(1, 12)), block)
    live = []
    for tokens in data.draw(st.lists(st.integers(0, 12), max_size=20)):
        chosen = [sequence for sequence in live if data.draw(st.booleans())]
        before = [(sequence.length, list(sequence.blocks)) for sequence in live]
        if tokens == 0:
            pool.free(chosen)
            live = [sequence for sequence in live if sequence not in chosen]
        else:
            growing = chosen or [BlockSequence(0, [])]
            missing = sum(-(-(of.length + tokens) // block) - len(of.blocks) for of in growing)
            if missing > len(pool.free_blocks):
                with pytest.raises(vmmkv.OutOfPagesError, match=f"asked for {missing} more blocks"):
                    pool.extend(growing, tokens)
                assert before == [(sequence.length, sequence.blocks) for sequence in live]
            elif chosen:
                pool.extend(chosen, tokens)
            else:
                live.append(pool.sequence(tokens))
        blocks = [number for sequence in live for number in sequence.blocks]
        assert sorted(blocks + pool.free_blocks) == list(range(pool.num_blocks))
        assert all(len(sequence.blocks) == -(-sequence.length // block) for sequence in live)


@pytest.mark.parametrize("scheme", ["token-major", "per layer"])
def test_80_gib_of_rows_take_no_memory(scheme: str) -> None:
    layout = fragmentation.MODELS["Llama-2-7B"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = make_allocator(scheme, layout, 80 << 30, 8192, max_sequences=100)
    sequences = [cache.sequence(8192) for _ in range(20)]
    assert used_bytes(cache, layout) == 80 << 30
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.sequence(1)
    cache.check()
    cache.free(sequences)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def run(main, *args: str):
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result


class Here(Executor):
    """In the place of processes that would import torch, which takes longer than their work: does it here and at once,
    with what can be sent to a process."""

    def __init__(self, **_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        sent, given, chosen = pickle.loads(pickle.dumps((work, args, options)))
        done.set_result(pickle.loads(pickle.dumps(sent(*given, **chosen))))
        return done


def test_fragmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "ProcessPoolExecutor", Here)
    trace = tmp_path / "trace.csv"
    rows = [(prompt, 50) for prompt in np.random.default_rng().integers(500, 2000, 60)] + [(9000, 1)]
    trace.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{prompt},{output}\n" for prompt, output in rows))
    output = run(fragmentation.main, "--trace", str(trace), "--json", "--plot", str(tmp_path / "waste.svg")).stdout
    result = json.loads(output)
    assert (result["requests"], result["left_out"], result["trace"]) == (60, 1, "trace.csv")
    assert len(result["runs"]) == len(fragmentation.MODELS) * len(fragmentation.BUDGETS) * len(SCHEMES)
    waste = {row["scheme"]: row["waste"] for row in result["runs"] if row["model"] == "Llama-3.1-8B"}
    assert waste["token-major"] == waste["block 16"] < waste["block 64"] < waste["block 256"] < waste["per layer"]
    assert waste["per layer"] < waste["static"]
    assert [row["max_seq_len"] for row in result["reservations"]] == list(fragmentation.RESERVATIONS)
    assert "<svg" in (tmp_path / "waste.svg").read_text()
    fragmentation.show(result)


def test_what_lies_under_rows_is_no_waste(tmp_path: Path) -> None:
    """Large frames waste little more than single pages; what is mapped ahead is counted, and others can have it."""
    trace = tmp_path / "trace.csv"
    rows = [(prompt, 30) for prompt in np.random.default_rng().integers(3000, 6000, 200)]
    trace.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{prompt},{output}\n" for prompt, output in rows))
    result = json.loads(run(fragmentation.main, "--trace", str(trace), "--ahead", "--json").stdout)
    single, large, ahead = result["frames"]
    assert [single["scheme"], large["scheme"], ahead["scheme"]] == list(FRAMES)
    for row in (large, ahead):
        assert row["waste"] == pytest.approx(single["waste"], abs=0.02)
        assert row["sequences"] == pytest.approx(single["sequences"], rel=0.02)
    assert single["waste"] <= single["waste_mapped"]
    assert large["waste"] <= large["waste_mapped"] <= ahead["waste_mapped"] < 1
    text = tables.TABLES["fragmentation-ahead"].write(result)
    assert text.count("\n") == 1 + len(FRAMES)


def test_what_does_not_fit_is_said() -> None:
    row = fragmentation.simulate("Llama-2-7B", 1, "static", [Request(10, 10)], 4096)
    assert row["sequences"] == 0
    assert "4096 tokens" in row["error"]


def slow_tenancies(maps: list[list[int]], times: list[tuple[int, int]]) -> tuple[list, list]:
    """Page by page, over the runs of observations in which a page has one state; one not there yet is vacant."""
    served, waited = [], []
    for page in range(len(maps[-1])):
        states = [pages[page] if page < len(pages) else vmmkv.VACANT_PAGE for pages in maps]
        since = None  # the page belongs to nobody
        owned = None  # the page belongs to a sequence
        for state, run in groupby(zip(states, times), key=lambda pair: pair[0]):
            step, seconds = next(run)[1]
            if owned:
                served.append((step - owned[0], seconds - owned[1]))
                since = step, seconds
            owned = (step, seconds) if state >= 0 else None
            if owned and since:
                waited.append((step - since[0], seconds - since[1]))
            since = None if owned or state == vmmkv.VACANT_PAGE else since or (step, seconds)
    return served, waited


@given(data=st.data())
def test_tenancies(data: st.DataObject) -> None:
    states = st.sampled_from([vmmkv.FREE_PAGE, vmmkv.SURPLUS_PAGE, vmmkv.VACANT_PAGE, 0, 1, 2])
    count = data.draw(st.integers(1, 10))
    sizes = sorted(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    maps = [data.draw(st.lists(states, min_size=size, max_size=size)) for size in sizes]
    times = [(4 * index, index**2) for index in range(1, count + 1)]
    tenancies = reuse.Tenancies()
    for pages, (step, seconds) in zip(maps, times):
        tenancies.observe(np.array(pages, np.int64), step, seconds)
    served, waited = slow_tenancies(maps, times)
    for found, expected in ((tenancies.served, served), (tenancies.waited, waited)):
        assert sorted(map(tuple, np.concatenate(found).tolist())) == sorted(expected)


def test_reuse(device: str, tmp_path: Path) -> None:
    plot = tmp_path / "reuse.svg"
    options = ("--device", device, "--requests", "60", "--sequences", "8", "--json", "--plot", str(plot))
    result = json.loads(run(reuse.main, *options).stdout)
    tight, roomy = result["cases"]
    for case in (tight, roomy):
        assert case["pages_created"] * case["page_size"] <= case["budget_bytes"]
        assert case["reuse_factor"] == case["page_uses"] / case["pages_created"] > 1
        assert 0 < case["adoption_rate"] < 1
        assert 0 < case["maps_a_use"] <= 1
        assert case["started"] == case["requests"] + case["preemptions"]
        assert case["driver_calls_a_request"] * 60 == pytest.approx(sum(case["driver_calls"].values()))
        assert case["served"]["steps"]["p10"] <= case["served"]["steps"]["p90"] <= case["steps"]
        assert case["curve"]["page_uses"] == sorted(case["curve"]["page_uses"])
    assert tight["reuse_factor"] > roomy["reuse_factor"]
    assert "<svg" in plot.read_text()
    reuse.show(result)


def test_idle(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(index: object) -> tuple[int, int]:
        """As if nobody else were on the GPU."""
        taken = torch.cuda.memory_reserved(index) + vmmkv.torch.memory_allocated("cuda")
        return 120 * 2**30 - taken, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", own)
    plot = tmp_path / "idle.svg"
    options = ("--device", device, "--sequences", "8", "--steps", "150", "--json", "--plot", str(plot))
    result = json.loads(run(idle.main, *options).stdout)
    trimmed, kept, pool = result["runs"]
    assert [row["mode"] for row in result["runs"]] == list(idle.MODES)
    slack = 32 << 20 if device == "cuda" else 0  # what CUDA takes for itself, for events say
    assert trimmed["quiet_bytes"] + slack < trimmed["busy_bytes"] <= kept["quiet_bytes"] + slack
    assert kept["quiet_bytes"] <= pool["quiet_bytes"] + slack
    assert pool["quiet_bytes"] == pool["busy_bytes"] == pool["mean_bytes"] >= pool["budget_bytes"]
    assert trimmed["trimmed_bytes"] > 0 == kept["trimmed_bytes"]
    assert trimmed["return_driver_calls"] > kept["return_driver_calls"] >= pool["return_driver_calls"] == 0
    assert all(row["return_sequences"] > 0 for row in result["runs"])
    assert "<svg" in plot.read_text()
    idle.show(result)
