"""Each benchmark on the host, with its smallest arguments: figures add up, wrong answers are found, tables are made;
and the command that runs all of them goes on past one that fails."""

from __future__ import annotations

import json
import resource
import shlex
from collections.abc import Callable
from concurrent.futures import Executor, Future
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, run_python
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner, Result

import vmmkv
from benchmarks import all as every
from benchmarks import (
    core,
    eight_bits,
    fragmentation,
    mapper,
    pools,
    prefix_tree,
    prefixes,
    rollouts,
    sharing,
    swap,
    tables,
    transfer,
)
from benchmarks.all import Benchmark, Kind
from benchmarks.geometry import SMALL
from benchmarks.report import PLOTS
from benchmarks.tables import TABLES
from vmmkv.workload import Request

SIZE = 16 * SMALL.token_bytes
CPU = torch.device("cpu")


def invoke(module: ModuleType, *args: str) -> Result:
    app = Typer()
    app.command()(module.main)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, args)


def measured(module: ModuleType, arguments: str, *names: str) -> Any:
    """The result of a benchmark; of each table that is named, the number of its lines is that of the rows."""
    done = invoke(module, *arguments.split(), "--json")
    assert done.exit_code == 0, done.output
    return tabled(done.stdout, *names)


FORKED = """
    import multiprocessing
    from functools import partial
    from importlib import import_module
    import torch.multiprocessing
    import typer
    from conftest import ROOT

    sys.path.append(str(ROOT))
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork
    torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    from benchmarks import pools
    from benchmarks.serve import measure

    measure.WARM_UPS, pools.IDLE_TURNS = 1, 10
    module = import_module(f"benchmarks.{sys.argv[1]}")
    sys.argv[1:] = sys.argv[2:]
    typer.run(module.main)
"""


def forked(module: ModuleType, arguments: str, *names: str) -> Any:
    """The same of a benchmark that starts processes, which are forked: to import takes longer than all that they do."""
    if torch.cuda.is_available():
        return measured(module, arguments, *names)
    done = run_python(FORKED, module.__name__.rpartition(".")[2], *arguments.split(), "--json")
    assert done.returncode == 0, done.stderr
    return tabled(done.stdout, *names)


def tabled(output: str, *names: str) -> Any:
    result = json.loads(output)
    for name in names:
        columns, rows = tables.TABLES[name].write(result)
        assert rows
        assert all(len(row) == len(columns) for row in rows)
    return result


def test_core() -> None:
    result = measured(core, "--device null --rounds 2 --parked 100", "core", "core-null")
    for case in result["cases"]:
        assert all(0 < side["p10_us"] <= side["us"] <= side["p90_us"] for side in case["sides"].values())
    assert sum("by hand" in case["sides"] for case in result["cases"]) == 8


def test_mapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapper, "PROMPT_ROUNDS", 1)
    monkeypatch.setattr(mapper, "RESTLESS_SECONDS", 0.05)
    sizes = "--device cpu --steps 40 --sequences 8 --rounds 2"
    result = measured(mapper, sizes, "mapper-decode", "mapper-launches", "mapper-prompts")
    before, ahead, need = result["decode"]
    assert [row["way"] for row in result["decode"]] == [mapper.MAPPED, mapper.AHEAD, mapper.IN_NEED]
    assert (before["of_mapped_before"], before["extends_with_a_call"], before["steps_with_a_call"]) == (1, 0, 0)
    # Steps take no time on the host: it is up to the machine whether the mapper comes to anything in between.
    assert before["pages_ahead"] == need["pages_ahead"] == 0 <= ahead["pages_ahead"]
    assert need["extends_with_a_call"] == pytest.approx(1 / 16, rel=0.5)  # a page holds 16 tokens
    assert result["restless"]["pages_per_s"]["min"] > 0
    assert result["missed"] == []
    missed = measured(mapper, f"{sizes} --budget-seconds 0")["missed"]
    assert {name.split(",")[0] for name in missed} >= {"prompts", "decoding", "decoding without a mapper"}


def test_sharing() -> None:
    result = measured(sharing, "--device cpu --tokens 520 --samples 3 --new-tokens 20", "samples")
    assert [row["tokens"] for row in result["sampling"]] == [520, 513] * 2
    for row in result["sampling"]:
        assert row["pages_separate"] == 3 * SMALL.pages(row["tokens"] + 20, SIZE)
        assert row["pages_shared"] <= row["tokens"] * SMALL.token_bytes // SIZE
        assert row["pages_once_and_own"] <= row["pages"] <= row["pages_separate"]


def test_prefixes() -> None:
    result = measured(prefixes, "--device cpu --tokens 512 --rounds 2", "beginnings")
    for large, rows in zip((True, False), (result["starts"][:4], result["starts"][4:])):
        hit, turn, listed, without = rows
        assert {row["large_frames"] for row in rows} == {large}
        assert hit["cached_tokens"] == turn["cached_tokens"] == listed["cached_tokens"] == 512
        assert without["cached_tokens"] == 0
        assert hit["calls"]["map"] == (2 if large else 32) + 1, "the known pages, and a page behind them"
        assert turn["calls"] == listed["calls"] == {}
        assert without["calls"]["create"] == without["calls"]["map"]


def test_prefix_tree() -> None:
    result = measured(prefix_tree, "--pages 1000 --tokens 2500 --repeats 20", "prefix-matches")
    assert result["pages"] >= 1000
    assert [row["found_tokens"] for row in result["matches"]] == [2499, 2500 - 1024, 512, 0]
    for row in result["matches"]:
        assert row["mb_per_s"] == row["found_tokens"] * 8 / row["us"]["median"]


@pytest.mark.parametrize("kind", [swap.Plain, swap.Gathered])
def test_swap(kind: type[swap.Plain]) -> None:
    """Also a way that brings nothing back is found out."""
    result = measured(swap, "--device cpu --tokens 70 --rounds 1", "swapping")
    assert (result["tokens"], len(result["out"])) == (64, 4)
    assert [row["way"] for row in result["out"]] == [row["way"] for row in result["back"]]
    way = kind(4 * swap.PIECE, CPU)
    way.back = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        swap.measure({swap.PLAIN: way}, CPU, rounds=1)


def test_transfer() -> None:
    result = forked(transfer, "--device cpu --tokens 70 --rounds 1", "handing-over")
    assert (result["backend"], result["tokens"], len(result["ways"])) == ("gloo", 64, 5)
    plain, other = transfer.figures({transfer.PLAIN: [1.0, 2.0, 3.0], "other": [3.0, 4.0, 8.0]}, 8 * 10**9)
    assert (plain["ms"], plain["gb_per_s"], plain["ratio"]) == (2000, 4, 1)
    assert (other["ms"], other["gb_per_s"], other["ratio"]) == (4000, 2, 0.5)
    assert other["gb_per_s_p10"] < 2 < other["gb_per_s_p90"]


def test_pools() -> None:
    result = forked(pools, "--device cpu --requests 6 --rounds 1", "pools", "pool-moves")
    assert [row["mode"] for row in result["runs"]] == list(pools.MODES)
    assert result["missed"] == []
    for row in result["runs"]:
        assert row["tokens_per_s"] == sum(burst["tokens"] for burst in row["bursts"]) / row["seconds"]
        limit = result["memory_bytes"] // (2 if row["mode"] == pools.HALVES else 1)
        assert all(0 < burst["peak_bytes"] <= limit for burst in row["bursts"])
        assert 0 <= row["tokens_in_time_per_s"] <= row["tokens_per_s"]
    assert [(row["processes"], row["to"]) for row in result["moves"]] == [(1, 0), (1, 1)] * 6 + [(2, 0), (2, 1)] * 3
    assert len({row["bytes"] for row in result["moves"]}) == 1
    for row in result["moves"]:
        assert row["ms_per_10_gib"] == pytest.approx(row["ms"] * 10 * 2**30 / row["bytes"])
    assert min(side["us"] for side in result["idle_ledger"].values()) > 0
    missed = forked(pools, "--device cpu --rounds 1 --requests 9 --budget-seconds 0")["missed"]
    assert missed == [f"bursts of 9, {mode}, round 1" for mode in pools.MODES]


def test_rollouts() -> None:
    sizes = "--side rows-kept --side blocks-40% --generations 2 --cycles 21 --budget-seconds 600"
    result = forked(rollouts, sizes, "rollouts")
    on_rows, in_blocks = result["sides"]
    assert result["missed"] == []
    for row in result["sides"]:
        assert [step["generations"] for step in row["steps"]] == [2] * rollouts.STEPS + [row["most"]]
        for step in row["steps"]:
            assert (step["error"], step["kv_bytes_before_backward"]) == ("", 0)
            assert 0 < step["first_token_s"] < step["rollout_s"]
            assert 0 < step["peak_kv_bytes"] <= step["budget_bytes"]
    assert in_blocks["naps"] == {}
    assert on_rows["naps"]["freed_bytes"] > 0
    assert on_rows["naps"]["taken_bytes"]["most"] == 0
    assert "sides are" in invoke(rollouts, "--side", "nowhere").output


@pytest.mark.parametrize("scheme", fragmentation.SCHEMES)
def test_each_scheme_admits_what_fits_and_takes_no_memory(scheme: str) -> None:
    layout = fragmentation.MODELS["Llama-2-7B"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = fragmentation.make_allocator(scheme, layout, 80 << 30, 8192, max_sequences=100)
    sequences = [cache.sequence(8192) for _ in range(20)]
    assert fragmentation.used_bytes(cache, layout) == 80 << 30
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.sequence(1)
    cache.free(sequences)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


class Here(Executor):
    """Does the work of processes at once, in this one."""

    def __init__(self, **_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **options))
        return done


def test_fragmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "ProcessPoolExecutor", Here)
    trace = tmp_path / "trace.csv"
    rows = [(prompt, 50) for prompt in np.random.default_rng().integers(500, 2000, 60)] + [(9000, 1)]
    trace.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{prompt},{output}\n" for prompt, output in rows))
    names = "static-reservation", "fragmentation-waste", "fragmentation-batch"
    result = measured(fragmentation, f"--trace {trace}", *names)
    assert (result["requests"], result["left_out"], result["trace"]) == (60, 1, "trace.csv")
    waste = {row["scheme"]: row["waste"] for row in result["runs"] if row["model"] == "Llama-3.1-8B"}
    assert waste["token-major"] == waste["block 16"] < waste["block 64"] < waste["block 256"] < waste["per layer"]
    assert waste["per layer"] < waste["static"]
    monkeypatch.setattr(fragmentation, "GIB", 1)
    row = fragmentation.simulate("Llama-2-7B", "static", [Request(10, 10)], 4096)
    assert (row["sequences"], "4096 tokens" in row["error"]) == (0, True)


def test_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "OUTLIERS", (1, 10))
    monkeypatch.setattr(eight_bits, "version_of", lambda package: None)  # they take seconds to import
    result = measured(eight_bits, "--lengths 20 --batch 1 --steps 3 --layers 1", "eight-bits")
    distances = {(row["cache"], row["outliers"]): row["distance"] for row in result["logits"]}
    for outliers in (1, 10):
        assert 0 < distances["bf16", outliers] < distances["vmmkv int8", outliers] < 1
        assert distances["vmmkv int8", outliers] < distances["vmmkv fp8", outliers] < 1


APP = Typer()
APP.command()(every.main)


def run_all(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--kind", "host", *words])


def test_it_makes_all_that_the_report_reads() -> None:
    read = {source for table in TABLES.values() for source in table.sources} | {source for source, _ in PLOTS.values()}
    made = {f"{name}{'' if each.kind == Kind.HOST else '_gpu'}.json" for name, each in every.BENCHMARKS.items()}
    assert made == read
    for kind in Kind:
        assert sum(benchmark.minutes for benchmark in every.BENCHMARKS.values() if benchmark.kind == kind) <= 30


@pytest.mark.parametrize("name", every.BENCHMARKS)
def test_its_commands_are_understood(name: str, tmp_path: Path) -> None:
    places = {key: str(tmp_path / file) for key, file in every.TRACES.items()} | {"vllm": str(tmp_path)}
    for key in every.TRACES:
        Path(places[key]).touch()
    words = shlex.split(f"{every.BENCHMARKS[name].command} {every.BENCHMARKS[name].beside}")
    module, *words = (word.format(json=tmp_path / "json", seconds="60", **places) for word in words)
    package = (ROOT / "benchmarks" / module).is_dir()
    tool = Typer()
    tool.command()(import_module(f"benchmarks.{module}{'.__main__' if package else ''}").main)
    with get_command(tool).make_context(name, words):
        pass


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results of some benchmarks, in which one result is there already."""
    folder = tmp_path / every.RESULTS
    folder.mkdir(parents=True)
    (folder / "fails.json").write_text("old")
    codes = {
        "fails": "print(1); raise SystemExit('no')",
        "stubborn": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)",
        "lies": "print({})",
        "lacks": "pass",
        "prints": "import json, sys; print(json.dumps({'environment': sys.argv[1:]}))",
        "writes": "import sys; open(sys.argv[1], 'w').write('{\"environment\": 2}')",
    }
    (tmp_path / "benchmarks" / "__init__.py").touch()
    for name, code in codes.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(code)
    arguments = {"lacks": " {conv}", "writes": " {json}", "prints": " {seconds}"}
    made = {name: Benchmark(Kind.HOST, 10, name + arguments.get(name, "")) for name in codes}
    made["stubborn"] = made["stubborn"]._replace(minutes=0.01)
    monkeypatch.setattr(every, "BENCHMARKS", made)
    monkeypatch.setattr(every, "ROOT", tmp_path)
    return folder


def test_it_goes_on_past_those_that_fail_and_names_them(results: Path, tmp_path: Path) -> None:
    done = run_all("--traces", str(tmp_path))
    assert done.exit_code == 1
    for words in ("it ended with 1", "stopped after 0.02 minutes", "does not say how", "there is no azure"):
        assert words in done.stdout
    found = {path.stem: path.read_text() for path in results.iterdir()}
    assert found.keys() == {"fails", "prints", "writes"}
    assert found["fails"] == "old"
    assert json.loads(found["writes"]) == {"environment": 2}
