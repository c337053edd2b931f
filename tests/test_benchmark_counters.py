"""Hardware counters: what Nsight Compute prints is read by name, whatever else it says and in whatever order, and told
of the call that launched it, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from conftest import DEVICE, int32, run_module_here

from benchmarks import counters_calls, counters_tables
from benchmarks.counters import COUNTERS, by_call, launches, parse
from benchmarks.counters_calls import CALLS
from benchmarks.tables import NOT_MEASURED, TABLES
from vmmkv.kernels import copy_tokens, decode, plans, row_decode, row_prefill

OLD = {"kernels": {"decode, mma, 64 x 4096": {"microseconds": 356.224, "registers": 192.0}}}
"""What results hold that know neither of other calls nor of what warps wait for."""


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_module_here("benchmarks.counters", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs an NVIDIA GPU" in done.stderr


def random_launches(chance: Random) -> dict[str, list[str]]:
    """Of each call one kernel or several, some of them the same."""
    kinds = "vmmkv_decode", "vmmkv_copy"
    return {name: chance.choices(kinds, k=chance.randint(1, 3)) for name in CALLS}


def printed_by_ncu(
    chance: Random, kernels: list[str], cell: Callable[[int, str], str | None], missing: tuple[str, ...] = ()
) -> str:
    """As ncu prints it: a line for each kernel, with a counter's cell for each by its place and the counter's name."""
    metrics = {counter.metric: name for name, counter in COUNTERS.items() if name not in missing}
    names = ["ID", *chance.sample(list(metrics), len(metrics)), "Kernel Name"]
    lines = [names, ["", *("unit" for _ in metrics), ""]]
    for place, kernel in enumerate(kernels):
        lines.append([str(place), *(str(cell(place, metrics[name])) for name in names[1:-1]), f"{kernel}(int, 1)"])
    table = [",".join(f'"{each}"' for each in line) for line in lines]
    return "\n".join(["==PROF== Connected", '==PROF== Profiling "vmmkv_x": 0%', *table, "==PROF== Disconnected"])


def test_counters_are_read_by_name() -> None:
    chance = Random()
    launched = random_launches(chance)
    kernels = [(call, kernel) for call, names in launched.items() for kernel in names]
    values = [{name: round(chance.uniform(1, 99_999), 2) for name in COUNTERS} for _ in kernels]
    printed = printed_by_ncu(chance, [kernel for _, kernel in kernels], lambda place, name: f"{values[place][name]:,}")
    found = by_call(parse(printed), launched)
    for (name, row), (call, kernel), expected in zip(found.items(), kernels, values, strict=True):
        assert row == pytest.approx({each: expected[each] * counter.scale for each, counter in COUNTERS.items()})
        assert name == call if len(launched[call]) == 1 else name.startswith(f"{call}, {kernel.removeprefix('vmmkv_')}")
    for columns, lines in (counters_tables.bounds({"kernels": found}), counters_tables.stalls({"kernels": found})):
        assert {len(line) for line in lines} == {len(columns)}
        assert len(lines) == len(kernels)


def test_what_ncu_does_not_tell_is_none() -> None:
    chance = Random()
    silent, nan, missing, told = chance.sample(list(COUNTERS), 4)
    cells = {silent: chance.choice(["n/a", "(!) n/a", ""]), nan: "nan"}
    printed = printed_by_ncu(chance, ["vmmkv_decode"], lambda _, name: cells.get(name, "2"), (missing,))
    ((kernel, row),) = parse(printed)
    assert kernel == "vmmkv_decode"
    assert (row[silent], row[nan], row[missing]) == (None, None, None)
    assert row[told] == 2 * COUNTERS[told].scale
    shown = [counters_tables.bounds({"kernels": {"": row}}), counters_tables.stalls({"kernels": {"": row}})]
    columns = {column.name for column in counters_tables.BOUNDS.values()} | {"cycles_per_instruction"}
    expected = sum(name in columns for name in (silent, nan, missing))  # what no table shows leaves no mark
    assert [cell for _, lines in shown for line in lines for cell in line].count("-") == expected


def test_what_no_kernel_waits_for_has_no_column() -> None:
    names = [name for name in COUNTERS if name.startswith(counters_tables.STALL)]
    waits = [{name: Random().choice([None, 0.0, 0.19, 0.21, 5.0]) for name in names} for _ in range(2)]
    (_, _, *titles), lines = counters_tables.stalls(
        {"kernels": {str(at): {"cycles_per_instruction": 9.0, **each} for at, each in enumerate(waits)}}
    )
    expected = [name for name in names if any((each[name] or 0) > 0.2 for each in waits)]
    assert sorted(titles) == sorted(each.removeprefix(counters_tables.STALL).replace("_", " ") for each in expected)
    assert {len(line) for line in lines} == {2 + len(expected)}


def left_out(chance: Random, kernels: list[str]) -> None:
    del kernels[chance.randrange(len(kernels))]


def once_more(chance: Random, kernels: list[str]) -> None:
    kernels.append(kernels[-1])


def another(chance: Random, kernels: list[str]) -> None:
    kernels[chance.randrange(len(kernels))] = "vmmkv_append"


@pytest.mark.parametrize("damage", [left_out, once_more, another, lambda _, kernels: kernels.clear()])
def test_other_kernels_than_were_launched_are_refused(damage: Callable[[Random, list[str]], None]) -> None:
    chance = Random()
    launched = random_launches(chance)
    kernels = [kernel for names in launched.values() for kernel in names]
    damage(chance, kernels)
    rows = parse(printed_by_ncu(chance, kernels, lambda *_: "1")) if kernels else parse("==WARNING== No kernels")
    with pytest.raises(ValueError, match="ncu has seen"):
        by_call(rows, launched)


@pytest.mark.parametrize("names", [[], None])
def test_calls_without_kernels_are_refused(names: list[str] | None) -> None:
    launched: dict[str, Any] = random_launches(Random())
    name = Random().choice(list(launched))
    launched[name] = names
    if names is None:
        del launched[name]
    with pytest.raises(ValueError, match=f"without a kernel of ours: {name}"):
        by_call([], launched)


def test_launches_are_noted_in_their_order() -> None:
    kv, ones = torch.randn(2, 16, 1, 64, device=DEVICE), int32([1])
    zeros, lengths = ones - 1, ones + 15

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        copy_tokens(kv, kv, source, zeros, target, zeros, lengths, 16)

    with launches() as names:
        copy(zeros, ones)
        decode(torch.randn(1, 1, 1, 64, device=DEVICE), kv, kv, lengths, kernel="plain")
        copy(ones, zeros)
    copy(ones, zeros)
    assert names == ["vmmkv_copy", "vmmkv_plain", "vmmkv_copy"]
    assert torch.equal(kv[0], kv[1])


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[plans.Call]:
    """Calls of attention, which are planned, of little data, and not launched; no kernel depends on how much there
    is."""
    batch, call, prompt = counters_calls.make_batch, counters_calls.make_call, counters_calls.make_prompt
    small: dict[str, Callable[..., object]] = {
        "make_batch": lambda case, *to: batch(replace(case, seq_lens=(16,), q_len=min(case.q_len, 16)), *to),
        "make_call": lambda shape, _, __, device: call(shape, 1, 16, device),
        "make_prompt": lambda shape, _, device: prompt(shape, 64, device),
    }
    for name, making in small.items():
        monkeypatch.setattr(counters_calls, name, making)
    calls: list[plans.Call] = []
    for module in (row_decode, row_prefill):
        monkeypatch.setattr(module, "launch", lambda call, *_: calls.append(call))
    return calls


@pytest.mark.skipif(DEVICE == "cuda", reason="plans are those of a Hopper without a GPU alone, which compiles nothing")
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("decode", "prefill"))])
def test_calls_launch_what_their_names_say(name: str, planned: list[plans.Call]) -> None:
    def said(what: str, otherwise: int) -> int:
        found = re.search(what, name)
        return int(found[1]) if found else otherwise

    with CALLS[name](torch.device(DEVICE)) as call:
        call()
    (kernel,) = (each.launch.kernel for each in planned)
    variant, latents = kernel.constants[0], "latents" in name
    part, how, *_ = name.split(", ")
    assert (kernel.name, "wgmma" if kernel.hopper else "mma") == (f"vmmkv_{part}", how)
    assert variant.head_dim == said(r"heads of (\d+)", 576 if latents else 128)
    assert variant.heads_per_kv == said(r"(\d+) heads", 4)
    assert variant.q_len == (said(r"(\d+) queries", 1) if part == "decode" else 0)
    assert variant.kv_dtype == (torch.float8_e4m3fn if "fp8" in name else None)
    assert variant.causal


def test_results_without_later_counters_have_tables() -> None:
    assert TABLES["kernel-stalls"].write(OLD) == NOT_MEASURED
    columns, lines = counters_tables.bounds(OLD)
    assert (columns, lines) == (("", "µs", "registers a thread"), [("decode, mma, 64 x 4,096", "356.2", "192")])


def test_tables_show_what_is_read() -> None:
    assert {column.name for column in counters_tables.BOUNDS.values()} < COUNTERS.keys()
    columns, _ = counters_tables.stalls({"kernels": {"": dict.fromkeys(COUNTERS, 1.0)}})
    assert {"cycles", "long scoreboard", "barrier", "mio throttle"} < set(columns)
