"""Continuous batching on rows by two processes, each with half of the heads: the tokens of `generate` in one process,
and no hang, though one of them has less memory, forgets, is refused memory, or fails.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import join, on_driver
from faulty import FaultyDriver
from pair import together
from test_continuous_batching import PAGE_SIZE, Served, answers
from tiny_models import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching.requests import Ranks

HANG = 240.0
"""Seconds after which a process that is not done says where it is, and ends."""
MANY, FEW = 400, 12
"""Pages that hold all requests, and two of them."""


def split(model: PreTrainedModel) -> PreTrainedModel:
    """A model of which this process keeps half of the heads, as `from_pretrained(distributed_config=...)` makes it."""
    if model.config.tie_word_embeddings:  # what is there already can only be cut once
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    parallel, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=2), device_map=None)
    return type(model).maybe_distribute_model(model, parallel, mesh)


class Half:
    """One of two processes that run a model, and what both are asked for."""

    def __init__(self, rank: int, name: str, seed: int) -> None:
        self.rank, self.random = rank, Random(seed)
        whole = tiny_model(name, "eager", "cpu")
        self.expected = answers(whole, self.random, 2, most=15, begin=self.prompt(40))
        for _ in range(4):
            self.expected += answers(whole, self.random, 1, begin=self.prompt(20))
        self.model = split(whole)
        self.group = dist.new_group()
        self.had_more = 0
        """How often there was more room here than in the other process."""

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(2, VOCABULARY) for _ in range(tokens)]

    @contextmanager
    def serve(self, pages: int, driver: FaultyDriver | None = None, **options: Any) -> Iterator[Served]:
        """Requests on so many pages, on which nothing is left in the end."""
        pool = on_driver(driver or open_driver("cpu", PAGE_SIZE), vmmkv.FramePool, pages * PAGE_SIZE)
        rows.enable(self.model, pool=pool, max_seq_len=100)
        self.had_more = 0
        with self.watched(), Served(self.model, safety_margin=0.0, **options) as served:
            yield served
            for cache in served.manager.batch_processor.cache.kv_caches:
                while cache.stats().tokens and served.manager.is_running():  # the other process may be a step ahead
                    sleep(0.01)
                cache.check()

    @contextmanager
    def watched(self) -> Iterator[None]:
        attempt = Ranks.attempt

        def count(ranks: Ranks, action: Callable[[], float]) -> tuple[float, float]:
            here, least = attempt(ranks, action)
            self.had_more += here > least
            return here, least

        with mock.patch.object(Ranks, "attempt", count):
            yield

    def dies_of(self, served: Served) -> type[Exception]:
        """What a manager ends with; nobody who waits for an answer waits on."""
        join(served.manager._generation_thread)
        return type(served.manager.background_thread_status.fatal_error)


# ---------------------------------------------------------------------- what becomes of requests


def less_memory_in_one(half: Half) -> None:
    """What gives way there gives way in both, to the host in both."""
    with half.serve((MANY, FEW)[half.rank], cpu_offload_space=0.001) as served:
        served.check(half.expected)
    assert half.had_more > 0 or half.rank == 1


def one_forgets(half: Half) -> None:
    """What it has kept of earlier requests; before that nobody disagrees."""
    with half.serve(MANY) as served:
        served.check(half.expected)
        assert set(served.cache.layout.num_kv_heads) == {1}
        assert half.had_more == 0
        if half.rank == 1:
            served.cache.trim()
        dist.barrier(half.group)
        served.check(half.expected)
    assert half.had_more > 0 or half.rank == 1


def one_is_refused_memory(half: Half) -> None:
    """By its driver, though the limit allows it: now and then, and from some page on. It has no room on the host,
    either: what gives way is computed anew in both."""
    driver = FaultyDriver(open_driver("cpu", PAGE_SIZE))
    if half.rank == 1:
        driver.fail("create", skip=half.random.randrange(FEW), out_of_memory=True)
        driver.fail("create", skip=FEW, out_of_memory=True, lasting=True)
    with half.serve(MANY, driver, cpu_offload_space=(0.001, 0.0)[half.rank]) as served:
        served.check(half.expected)
    assert half.had_more > 0 or half.rank == 1


def all_sleep(half: Half) -> None:
    """In both processes requests begin anew."""
    with half.serve(MANY) as served:
        names = served.ask(half.expected)
        for _ in range(3):
            rows.sleep(half.model, offload=True)
            rows.wake(half.model)
        if half.rank == 0:
            done = served.results(len(names))
            for name in names:
                assert done[name].generated_tokens == served.asked[name].tokens
        dist.barrier(half.group)


def loaded_with_a_plan(half: Half) -> None:
    """By `from_pretrained(tp_plan="auto")`, in processes that know each other as `torchrun` tells them."""
    told = {"RANK": str(half.rank), "LOCAL_RANK": str(half.rank), "WORLD_SIZE": "2"}
    with TemporaryDirectory() as own, mock.patch.dict(os.environ, told):
        dist.broadcast_object_list(folder := [own], group=half.group)
        tiny_model.__wrapped__("llama-gqa", "eager", "cpu").save_pretrained(folder[0])  # by the first alone
        dist.barrier(half.group)
        half.model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", attn_implementation="eager")
        dist.barrier(half.group)
    with half.serve(MANY) as served:
        served.check(half.expected)
        assert set(served.cache.layout.num_kv_heads) == {1}


# ---------------------------------------------------------------------- what ends in both


def one_fails(half: Half) -> None:
    driver = FaultyDriver(open_driver("cpu", PAGE_SIZE))
    if half.rank == 1:
        driver.fail("map", skip=half.random.randrange(FEW))
    with half.serve(MANY, driver) as served:
        served.ask(half.expected)
        assert half.dies_of(served) is (vmmkv.RankFailedError, vmmkv.DriverError)[half.rank]


def one_cannot_begin(half: Half) -> None:
    rows.enable(half.model, max_bytes=("64MiB", 1)[half.rank])
    with Served(half.model) as served:
        assert half.dies_of(served) is (vmmkv.RankFailedError, vmmkv.BudgetError)[half.rank]


def one_sleeps_alone(half: Half) -> None:
    """It is told so in time; the other goes on to its own end once it sleeps, too."""
    rows.enable(half.model, max_bytes="64MiB", max_seq_len=100)
    with Served(half.model, cpu_group_timeout=2.0) as served:
        if half.rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)time"):
                rows.sleep(half.model)
        dist.barrier(half.group)
        if half.rank == 1:
            with suppress(RuntimeError):
                rows.sleep(half.model)
        join(served.manager._generation_thread)


def not_all_are_told_the_same(half: Half) -> None:
    """Each says which of its options it is."""
    told = {"max_seq_len": (100, 101), "kv_dtype": ("int8", "fp8")}
    batching = {"max_requests_per_batch": (16, 8), "safety_margin": (0.0, 0.5), "allow_block_sharing": (True, False)}
    for name, values in (told | batching).items():
        mine = {name: values[half.rank]}
        rows.enable(half.model, max_bytes="64MiB", **({"max_seq_len": 100} | mine if name in told else {}))
        with Served(half.model, **(mine if name in batching else {})) as served:
            assert half.dies_of(served) is vmmkv.UnsupportedError
            said = str(served.manager.background_thread_status.fatal_error)
            assert said.startswith(f"{name} is "), said
            assert f" in process {half.rank} of 2" in said


SCENARIOS: dict[str, list[Callable[[Half], None]]] = {
    "gemma3": [less_memory_in_one],
    "llama-gqa": [
        one_forgets,
        one_is_refused_memory,
        all_sleep,
        one_fails,
        one_cannot_begin,
        one_sleeps_alone,
        not_all_are_told_the_same,
        loaded_with_a_plan,
    ],
}


def serve(rank: int, seed: int) -> None:
    faulthandler.dump_traceback_later(HANG, exit=True)
    for name, scenarios in SCENARIOS.items():
        half = Half(rank, name, seed)
        for scenario in scenarios:
            scenario(half)
    faulthandler.cancel_dump_traceback_later()


def test_two_processes_do_what_one_does(seed: int) -> None:
    """One after the other: most of the time would go to importing transformers."""
    together(serve, seed)
