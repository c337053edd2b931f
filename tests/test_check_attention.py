"""The checker for attention kernels: each planted fault is found and named, and a right kernel has no finding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import planted
import pytest
import torch
from conftest import DEVICE, PATIENCE
from test_cli import invoke, run_vmmkv

from vmmkv.errors import ArgumentError, DeviceError, DtypeError
from vmmkv.testing import Report, Verdict, check_attention
from vmmkv.testing.answers import TOLERANCES, Answer, Case, compare, reference
from vmmkv.testing.checking import Child, judge
from vmmkv.testing.probes import Request

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 16, "tokens": 33}


def small_case() -> Case:
    fp32 = torch.float32
    return Case("cpu", fp32, *(SMALL[name] for name in ("heads", "kv_heads", "head_dim")), 1, 33, TOLERANCES[fp32], 7)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One process for all kernels: to start takes longer than to check."""
    with closing(Child(PATIENCE)) as child:
        child.ask(Request("planted:right", small_case(), "plain"))
        yield child


FINDINGS = {
    "right": [],
    "exits": ["fails on ordinary rows"],
    "ignores_lengths": ["fails on ragged lengths"],
    "divides_zero_by_zero": ["fails on lengths of 0"],
    "multiplies_by_zero": [
        "lets NaN behind lengths through",
        "reads past the end by up to 7 tokens: overread=7",
    ],
    "fetches_one_more": ["reads past the end by up to 1 token: overread=1"],
    "reads_the_whole_row": ["reads past the end by more than 1,024 tokens"],
    "takes_tokens_for_dense": ["ignores strides of tokens"],
    "takes_strides_of_k_for_v": ["ignores strides of V"],
    "takes_rows_for_dense": ["ignores strides of rows"],
    "wraps_bytes": ["wraps tokens at 32 bits: beyond 2^31 bytes", "wraps rows at 32 bits: beyond 2^31 bytes"],
    "wraps_rows": ["wraps rows at 32 bits: beyond 2^33 bytes or 2^31 elements"],
    "scales_k_in_place": ["writes to K or V"],
    "keeps_lengths": ["keeps lengths of an earlier call"],
    "refuses_far_tokens": [],
}
"""By kernel, how each finding begins; there are no others."""


@pytest.mark.parametrize("name", FINDINGS)
def test_each_planted_fault_is_found_and_named(name: str, child: Child) -> None:
    report = judge(child, f"planted:{name}", small_case())
    expected = FINDINGS[name]
    assert len(report.faults) == len(expected), report.faults
    for found, begins in zip(report.faults, expected):
        assert found.startswith(begins)
    assert report.right == (not expected)
    assert (report.overread or 0) == next((int(each.split("=")[1]) for each in expected if "=" in each), 0)


def test_a_refusal_is_no_finding(child: Child) -> None:
    report = judge(child, "planted:refuses_far_tokens", small_case())
    far = next(each for each in report.findings if each.probe == "far_tokens")
    assert (far.verdict, far.note) == (Verdict.REFUSES, "ValueError: K spans more than 2**31 elements")
    assert far.note in str(report)
    report = judge(child, "planted:forgets_the_scale", small_case())
    assert {each.verdict for each in report.findings[1:]} == {Verdict.NOT_RUN}, "wrong already"


def test_the_plain_kernel_has_no_finding() -> None:
    """On host memory in Numba's simulator."""
    sizes = {"heads": 2, "kv_heads": 1, "tokens": 9} if DEVICE == "cpu" else {"heads": 8, "kv_heads": 2}
    report = check_attention("vmmkv-plain", device=DEVICE, **sizes)
    assert report.faults == [], str(report)
    assert {each.verdict for each in report.findings} == {Verdict.RIGHT}
    assert report.overread == 0


@pytest.mark.gpu
def test_our_decode_has_no_finding_on_a_gpu() -> None:
    report = check_attention("vmmkv", device="cuda", heads=8, kv_heads=2)
    assert {each.verdict for each in report.findings} == {Verdict.RIGHT}, str(report)


def test_the_reference_is_attention() -> None:
    q = torch.randn(3, 2, 6, 8)
    k, v = torch.randn(2, 3, 11, 2, 8)
    lengths = [11, 0, 4]
    found = reference(q, k, v, lengths)
    assert found[1].abs().max() == 0
    for row in (0, 2):
        sides = (each[None, : lengths[row]].double().transpose(1, 2) for each in (k[row], v[row]))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[row][None].double().transpose(1, 2), *sides, enable_gqa=True
        )
        torch.testing.assert_close(found[row], expected[0].transpose(0, 1))
    noise = torch.zeros_like(found)
    noise[2, 0, 0, 0] = 0.5 * found.abs().max()
    answer = compare(found + noise, found, lengths, 0.1)
    assert answer == Answer(Verdict.WRONG, pytest.approx(0.5), "at lengths 4")


@pytest.fixture(scope="module")
def report() -> Report:
    return check_attention(planted.reads_whole_tiles, device="cpu", seed=3, **SMALL)


def test_a_function_is_found_by_its_module(report: Report) -> None:
    assert (report.kernel, report.overread, report.case.seed) == ("planted:reads_whole_tiles", 15, 3)
    assert report.as_dict()["findings"][4]["verdict"] == "faults"
    json.dumps(report.as_dict(), allow_nan=False)


def test_what_cannot_be_checked_is_refused() -> None:
    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return q

    for kernel in (inside, lambda *_: None, Child(1.0).ask):
        with pytest.raises(ArgumentError, match="top level of a module"):
            check_attention(kernel, device="cpu")
    for numbers in ({"heads": 3, "kv_heads": 2}, {"tokens": 3}, {"head_dim": 0}, {"heads": 64}):
        with pytest.raises(ArgumentError):
            check_attention(planted.right, device="cpu", **numbers)
    with pytest.raises(DtypeError, match="int8"):
        check_attention(planted.right, device="cpu", dtype=torch.int8)


def test_what_cannot_be_loaded_is_refused(child: Child) -> None:
    for name, says in {
        "sdpa": "sdpa-math",
        "planted:nothing": "planted has no function nothing",
        "nowhere.at_all:f": "ModuleNotFoundError",
        "missing.py:f": "FileNotFoundError",
    }.items():
        with pytest.raises(ArgumentError, match=says):
            child.ask(Request(name, small_case(), "plain"))
    with pytest.raises(DeviceError):
        child.ask(Request("planted:right", small_case()._replace(device="meta"), "plain"))


def test_the_command_prints_json_alone_and_fails_where_it_finds_something(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    path = Path(planted.__file__)
    done = run_vmmkv("check-kernel", f"{path}:says_something", "--device", "cpu", "--json", *sizes)
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "words of a kernel" in done.stderr
    assert result["case"] | {"dtype": "float32", "device": "cpu"} | SMALL == result["case"]
    monkeypatch.setenv("COLUMNS", "80")
    found = invoke("check-kernel", f"{path}:fetches_one_more", "--device", "cpu", *sizes)
    assert found.exit_code == 1, found.output
    assert max(map(len, found.stdout.splitlines())) <= 80
    for part in ("overread=1", "NaN behind every length", "reads past the end"):
        assert part in found.stdout


def test_a_kernel_that_does_not_return_is_ended(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the process, which is why this test comes last."""
    child.ask(Request("planted:right", small_case(), "plain"))  # it has started
    monkeypatch.setattr(child, "time_limit", 0.2)
    answer = child.ask(Request("planted:never_returns", small_case(), "plain"))
    assert answer == Answer(Verdict.HANGS, note="more than 0.2 s")
