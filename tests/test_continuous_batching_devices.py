"""Continuous batching on rows of a model whose layers are on several devices: the tokens of `generate`, and a cache on
each device, though one of them has less memory, forgets, or is refused memory.

Host memory goes by the names of several devices here; with two GPUs it is theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from conftest import open_drivers_with
from faulty import FaultyDriver
from test_continuous_batching import PAGE_SIZE, Served, answers, pool
from tiny_models import tiny_model
from transformers import PreTrainedModel

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching.model import Probe, Weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

Place = tuple[str, list[int]]
"""A model, and the devices of its layers."""
PLACES: list[Place] = [("llama-gqa", [0, 0, 1, 1]), ("gemma3", [0, 1, 2, 2])]


class Devices:
    """By number: their drivers."""

    def __init__(self) -> None:
        self.drivers: dict[int, FaultyDriver] = {}

    def open(self, device: Any, page_size: int | None) -> FaultyDriver:
        number = torch.device(device).index or 0
        if number not in self.drivers:
            self.drivers[number] = FaultyDriver(open_driver("cpu", PAGE_SIZE))
            self.drivers[number].device = torch.device("cpu", number)
        return self.drivers[number]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    open_drivers_with(monkeypatch, devices.open)
    return devices


class FromTheLastLayer(torch.Tensor):
    """Cannot be indexed by tensors, which are on another device, before it is brought there."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, tuple) and any(isinstance(each, torch.Tensor) for each in index):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
        return self.as_subclass(torch.Tensor)[index]

    def to(self, device: torch.device) -> torch.Tensor:  # type: ignore[override]
        assert device == torch.device("cpu")  # where the model's inputs are
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def model(
    request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PreTrainedModel]:
    """A model whose layers say that they are on these devices, with the hooks of accelerate."""
    name, places = getattr(request, "param", PLACES[0])
    model, attend = copy.deepcopy(tiny_model(name, "eager", "cpu")), Probe.attend

    def attend_there(
        probe: Probe, layer: int, query: torch.Tensor, key: torch.Tensor, *given: Any, **options: Any
    ) -> torch.Tensor:
        kind = type("Elsewhere", (torch.Tensor,), {"device": torch.device("cpu", places[layer])})
        return attend(probe, layer, query, key.as_subclass(kind), *given, **options)

    monkeypatch.setattr(Probe, "attend", attend_there)
    model.model.norm.register_forward_hook(lambda _module, _given, output: output.as_subclass(FromTheLastLayer))
    monkeypatch.setattr(Weights, "devices", property(lambda _: set(places), lambda *_: None), raising=False)
    yield dispatch_model(model, {"": "cpu"}, force_hooks=True)
    rows.disable(model)


def check_books(served: Served, devices: int, pages: int) -> None:
    """Each device has caches of its own, on which nothing is left, and none has taken more than it may."""
    caches = served.manager.batch_processor.cache.kv_caches
    assert {cache.device.index for cache in caches} == set(range(devices))
    assert sum(cache.layout.num_layers for cache in caches) == served.manager.model.config.num_hidden_layers
    for cache in caches:
        cache.check()
        assert cache.stats().tokens == 0
        assert cache.pool.stats().physical_bytes <= pages * PAGE_SIZE


@pytest.mark.parametrize("model", PLACES, indirect=True, ids=str)
def test_more_requests_than_one_device_has_memory_for(model: PreTrainedModel, devices: Devices) -> None:
    """Who gives way there gives way on all; where drivers refuse what the limit allows, too."""
    random, pages = Random(), 16
    expected, host = answers(model, random, 6, most=60), random.choice((0.0, 0.001))
    rows.enable(model, max_bytes=pages * PAGE_SIZE, max_seq_len=100)
    devices.open("cpu:1", None).fail("create", skip=12, out_of_memory=True, lasting=True)
    with Served(model, cpu_offload_space=host, safety_margin=0.0) as served:
        served.check(expected)
        check_books(served, len(devices.drivers), pages)


def test_known_tokens_are_those_that_all_devices_know(model: PreTrainedModel, devices: Devices) -> None:
    random = Random()
    begin = [random.randrange(2, 97) for _ in range(64)]
    expected = answers(model, random, 4, begin=begin)
    rows.enable(model, max_bytes=200 * PAGE_SIZE, max_seq_len=200)
    with Served(model) as served:
        served.check(expected)
        first, second = served.manager.batch_processor.cache.kv_caches
        before = first.stats().cached_tokens
        served.check(expected)
        assert first.stats().cached_tokens - before >= 4 * 64
        second.trim()
        served.check(expected)
        check_books(served, 2, 200)


def test_one_pool_and_compiled_forward_passes_are_refused(model: PreTrainedModel) -> None:
    rows.enable(model, pool=pool(10))
    with pytest.raises(vmmkv.DeviceError, match=r"layers on cpu:0, cpu:1. Give a pool .* max_bytes"):
        Served(model)
    rows.enable(model)
    with pytest.raises(vmmkv.UnsupportedError, match="compiled forward passes of a model on several devices"):
        Served(model, default_compile_level=1)
    assert model.config._attn_implementation == "eager"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("place", [("llama-gqa-wide", [0, 1]), ("llama-gqa-wide", [0, 0]), ("gemma3", [0, 0, 1, 1])])
def test_a_model_on_two_gpus(place: Place) -> None:
    """Also where all that attends is on one of them, and something else is not: no CUDA graph can hold that."""
    name, places = place
    model = copy.deepcopy(tiny_model(name, "sdpa", "cpu")).to("cuda:0")
    expected = answers(model, Random(), 8, most=60)
    layers = {f"model.layers.{layer}": device for layer, device in enumerate(places)}
    rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "lm_head"), 0) | {"model.norm": 1}
    model = dispatch_model(model, layers | rest, main_device=0)
    rows.enable(model, max_bytes="256MiB", max_seq_len=100)
    with Served(model, safety_margin=0.0) as served:
        for _ in range(2):
            served.check(expected)
        caches = served.manager.batch_processor.cache.kv_caches
        assert {cache.device for cache in caches} == {torch.device("cuda", device) for device in places}
    rows.disable(model)
