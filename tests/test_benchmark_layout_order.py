"""The benchmark of the order of a page: its arithmetic, and that kernels find the same numbers in each order."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from conftest import DEVICE, run_module_here

from benchmarks import tables
from benchmarks.attention.timing import Timing
from benchmarks.layout_order import speed
from benchmarks.layout_order.orders import BLOCK_STEP, MODELS, PAGE_BYTES, Model, tokens_of_page
from benchmarks.layout_order.speed import DECODE_BYTES, ERROR_BOUND, PARTS, TOKENS, Shape, make_orders, shape_of
from benchmarks.layout_order.waste import ORDERS, run_waste
from vmmkv.workload import Request


def test_pages_hold_what_is_counted_in_them() -> None:
    """Against a walk over the tokens of a random model, of which a page holds a block at least."""
    model = Model(random.randint(4, 9), 4, random.randint(1, 28), 128)
    for layers in model.ranges().values():
        layout, tokens = model.layout(layers), random.randint(1, 3000)
        for pages, step in ORDERS.values():
            count, runs_on = 0, pages is ORDERS["tokens first"][0]
            for record in layout.record_bytes:
                holds = tokens_of_page(record, step)
                assert holds * record <= PAGE_BYTES
                places = (token * record // PAGE_BYTES if runs_on else token // holds for token in (0, tokens - 1))
                first, last = places
                count += last - first + 1
                count += runs_on and (tokens * record - 1) // PAGE_BYTES - last  # the last record goes on
            assert pages(layout, tokens) == count


def test_the_tail_of_a_page_is_wasted_where_heads_come_first() -> None:
    requests = [Request(random.randint(1, 3000), random.randint(1, 500)) for _ in range(50)]
    found = {(row["model"], row["layers_per_range"], row["order"]): row for row in run_waste(requests)}
    for model in MODELS:
        for layers in ("all", "half", "4", "1"):
            first, *others = (found[model, layers, order] for order in ORDERS)
            assert 0 < first["waste"] < 1
            for row in others:
                assert row["waste"] is None or row["waste"] >= first["waste"]
            assert (others[1]["waste"] is None) == (others[1]["tokens_of_page"] == 0)
        assert found[model, "all", "tokens first"]["waste"] < found[model, "1", "tokens first"]["waste"]


SHAPES = {
    "a tail": Shape(Model(5, 4, 2, 64), 5, 2, 37, 16, 5 * 2 * 2 * 64 * 16 + 128),
    "one layer": Shape(Model(5, 2, 2, 64), 1, 2, 33, 32, 2 * 2 * 64 * 32),
    "no block": Shape(Model(3, 2, 1, 64), 2, 1, 20, 0, 64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_views_of_an_order_are_apart_and_in_its_order(name: str) -> None:
    shape = SHAPES[name]
    for order in make_orders(shape, torch.arange(shape.elements)):
        found = [torch.stack(order.sequence(index, shape.tokens)) for index in range(shape.sequences)]
        places = torch.stack(found)  # [sequences, K and V, tokens, heads, dim]
        assert len(places.unique()) == places.numel()
        assert (places.diff(dim=-1) == 1).all()
        if order.name == "blocks, heads first":
            assert (places[:, :, 1 : shape.block].diff(dim=2) == shape.model.head_dim).all()
        else:
            assert (places.diff(dim=3) == shape.model.head_dim).all()


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_kernels_find_the_same_in_each_order(part: int) -> None:
    name = random.choice([*SHAPES])
    shape = SHAPES[name]
    made = PARTS[part](shape, torch.device(DEVICE))
    numbers = torch.randn(shape.elements, device=DEVICE).bfloat16()
    for order in make_orders(shape, numbers):
        out = made.make(order)()
        assert made.error(order, out) < ERROR_BOUND
        if made.name != "append":
            assert not made.error(order, torch.zeros_like(out)) < ERROR_BOUND


def test_what_is_measured_fits_a_gpu() -> None:
    for model in MODELS.values():
        for layers in model.ranges().values():
            shape = shape_of(model, layers)
            assert shape.elements * 2 < 40 << 30
            assert shape.block % BLOCK_STEP == 0
            assert shape.sequences * TOKENS * 2 * model.kv_heads * model.head_dim * 2 == DECODE_BYTES


def test_it_says_what_each_order_wastes(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_module_here("benchmarks.layout_order", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert tables.TABLES["layout-order-waste"].write(result).count("\n") == 1 + 4 * len(MODELS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_module_here("benchmarks.layout_order", "--speed")
    assert (done.returncode, done.stdout) == (1, "")


def test_the_table_of_times() -> None:
    row = {"model": "a", "layers_per_range": "4", "order": "rows, tokens first"}
    result = {"speed": [row | {"part": part, "of_contiguous": random.uniform(1, 2)} for part in ("decode", "append")]}
    text = tables.TABLES["layout-order-speed"].write(result)
    for each in result["speed"]:
        assert f"{each['of_contiguous']:.2f}" in text


def test_rows_of_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all parts and orders, one after another on the same memory; a clock alone is missing without a GPU."""
    times = iter(range(1, 100))

    def timed(calls: list) -> list[Timing]:
        return [Timing(next(times), call(), captured=True) for call in calls]

    monkeypatch.setattr(speed, "measure", timed)
    rows = speed.run_shape(replace(SHAPES["one layer"], sequences=1), torch.device(DEVICE))
    assert [row["microseconds"] for row in rows] == [*range(1, 13)]
    assert all(row["error"] < ERROR_BOUND for row in rows)
    for row in rows:
        assert row["of_contiguous"] == row["microseconds"] / (row["microseconds"] - (row["microseconds"] - 1) % 4)
    kv_bytes = 2 * 33 * 2 * 64 * 2
    assert rows[1]["gb_per_s"] == pytest.approx(kv_bytes / 2 / 1e3)
    assert rows[-1]["gb_per_s"] == pytest.approx(2 * kv_bytes / 12 / 1e3)
    assert rows[4]["tflops"] == pytest.approx((33 * 34 / 2) * 4 * 2 * 64 / 5 / 1e6)
