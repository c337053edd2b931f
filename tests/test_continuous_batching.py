"""transformers' continuous batching on rows, against `generate`: the same tokens, whatever becomes of requests.

Weights are random and large enough for attention to decide what comes; pages hold a few tokens.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import itertools
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import transformers
from conftest import PATIENCE, calls, join, on_driver
from faulty import FaultyDriver
from parity.batching import NEW, Answer, answer, config, without_kernels
from tiny_models import LEAST_MODELS, VOCABULARY, tiny_model
from transformers import GenerationConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.generation.continuous_batching import initialization, model_runner
from transformers.generation.continuous_batching.requests import RequestStatus, create_warmup_future_states
from transformers.modeling_layers import GradientCheckpointingLayer

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations import batching
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching import groups, packed, processor
from vmmkv.integrations.batching.attention import attend_rows
from vmmkv.integrations.batching.batches import SEQUENCES
from vmmkv.integrations.batching.cache import RowCache
from vmmkv.integrations.batching.config import decode_sizes
from vmmkv.integrations.batching.manager import RowManager
from vmmkv.integrations.batching.requests import Ranks, Requests
from vmmkv.integrations.batching.scheduler import CHILD, RowScheduler
from vmmkv.integrations.batching.weights import Weights, addresses
from vmmkv.integrations.batching.whole_layers import CACHE
from vmmkv.integrations.request_checks import BESIDE_TOKENS, AtMost, check_same
from vmmkv.integrations.scaled_states import ScaledStates

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAGE_SIZE = 4096
CHILDREN = [f"{CHILD}{number}" for number in range(2)]
"""In names of those that fork where a prompt is to have three answers."""
MODELS = [
    "llama-mha", "llama-gqa", "mistral", "qwen3", "gemma2", "gemma3", "gemma4", "gpt2", "gpt-oss", "deepseek-v3",
    *LEAST_MODELS,
]  # fmt: skip
NOT_THEIRS = ["deepseek-v3", "gemma4", *["gpt-neox"] * transformers.__version__.startswith("5.24.")]
"""Kinds that transformers' own continuous batching does not take: K is wider than V, or in some layers than in others,
or layers tell a cache nothing of the batch."""
OWN_ROTATION = ("gpt2", "gpt_oss", "deepseek_v3", "cohere", "gemma4_text")
"""Kinds whose positions are no rotary embedding, or one of their own."""


def pool(pages: int) -> vmmkv.FramePool:
    return vmmkv.FramePool(pages * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)


def answers(
    model: PreTrainedModel, random: Random, count: int, most: int = 40, begin: list[int] | None = None, new: int = NEW
) -> list[Answer]:
    """As many for random prompts of up to so many tokens behind a beginning."""
    made: list[Answer] = []
    while len(made) < count:
        prompt = [random.randrange(2, VOCABULARY) for _ in range(random.randint(1, most))]
        if found := answer(model, (begin or []) + prompt, new):
            made.append(found)
    return made


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    """A model that runs on rows for a test, and is as before afterwards."""
    model = tiny_model(getattr(request, "param", "llama-gqa"), "eager", "cpu")
    yield model
    rows.disable(model)
    assert model.config._attn_implementation == "eager"


@contextmanager
def on_rows(model: PreTrainedModel, **options: Any) -> Iterator[None]:
    """Has a model run on rows, by default on memory of their own."""
    memory = {"max_bytes": "16MiB" if model.device.type == "cpu" else "1GiB"}
    rows.enable(model, **({} if "pool" in options else memory), **options)
    try:
        yield
    finally:
        rows.disable(model)


def check_batch(model: PreTrainedModel, expected: list[Answer], **options: Any) -> None:
    """Looks whether `generate_batch` gives the tokens of `generate`."""
    told = {name: options.pop(name) for name in ("persistent_manager", "warmup") if name in options}
    results = model.generate_batch([each.prompt for each in expected], **config(**options), **told).values()
    assert [result.error for result in results] == [None] * len(expected)
    assert [result.generated_tokens for result in results] == [each.tokens for each in expected]


class Served:
    """A manager at work, and what it was asked for."""

    def __init__(self, model: PreTrainedModel, *, warm: bool = False, **options: Any) -> None:
        self.manager = model.init_continuous_batching(**config(**options))
        if warm:
            self.manager.warmup()
        self.manager.start()
        self.asked: dict[str, Answer] = {}

    def __enter__(self) -> Served:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.manager.stop(block=True, hard_stop=error is not None)
        self.manager.destroy()

    @property
    def cache(self) -> vmmkv.KVCache:
        return self.manager.batch_processor.cache.kv_caches[0]

    def ask(self, answers: list[Answer]) -> list[str]:
        names = self.manager.add_requests([answer.prompt for answer in answers])
        self.asked |= dict(zip(names, answers))
        return names

    def results(self, count: int) -> dict[str, Any]:
        done: dict[str, Any] = {}
        while len(done) < count:
            result = self.manager.get_result(timeout=1)
            assert result is not None or self.manager.is_running(), self.manager.background_thread_status.fatal_error
            if result is not None and result.is_finished():
                assert result.error is None
                done[result.request_id] = result
        return done

    def check(self, answers: list[Answer]) -> None:
        """Asks, waits, and compares what comes with what `generate` made."""
        names = self.ask(answers)
        results = self.results(len(names))
        assert results.keys() == set(names)
        for name in names:
            assert results[name].generated_tokens == self.asked[name].tokens


class ByHand:
    """A manager whose batches are run here, one by one."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.manager = model.init_continuous_batching(**config(safety_margin=0.0, **options))
        self.manager.batch_processor = self.processor = self.manager._create_batch_processor()

    def step(self) -> bool:
        """Runs a batch, if there is one; returns whether there was."""
        found = self.processor.prepare_next_batch()
        if found:
            self.processor._generation_step(self.manager.model)
            self.processor.update_batch()
        return bool(found)

    def end(self) -> None:
        self.processor.reset()
        self.manager.model.set_attn_implementation("eager")


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_all_kinds_of_models_give_the_tokens_of_generate(model: PreTrainedModel) -> None:
    """With full and sliding layers, groups of heads, latents, soft caps and sinks; prompts come in chunks. Where a
    model's rotary embedding is the usual one it is left to what writes K."""
    expected = answers(model, Random(), 5)
    rows.enable(model, pool=pool(400), max_seq_len=100)
    with without_kernels() as append:
        check_batch(model, expected)
    assert bool(append.call_count) == (model.config.model_type not in OWN_ROTATION)


@pytest.mark.few(4)
@pytest.mark.parametrize("model", [name for name in MODELS if name not in NOT_THEIRS], indirect=True)
def test_all_kinds_of_models_give_the_tokens_of_transformers_own_continuous_batching(model: PreTrainedModel) -> None:
    prompts = [each.prompt for each in answers(model, Random(), 5)]
    theirs = model.generate_batch(prompts, **config(num_blocks=50, page_size=16, max_memory_percent=0.9)).values()
    rows.enable(model, pool=pool(400), max_seq_len=100)
    with without_kernels():
        ours = model.generate_batch(prompts, **config()).values()
    assert [each.error for each in [*theirs, *ours]] == [None] * 10
    assert [each.generated_tokens for each in ours] == [each.generated_tokens for each in theirs]


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["llama-gqa-wide", "gemma2-wide", "gpt-oss-wide"], indirect=True)
def test_kernels_give_the_tokens_of_generate(model: PreTrainedModel) -> None:
    """In the simulator, therefore few."""
    expected = answers(model, Random(), 2, most=9, new=3)
    rows.enable(model, pool=pool(400), max_seq_len=100)
    options = config(max_batch_tokens=8)
    options["generation_config"].max_new_tokens = 3
    results = model.generate_batch([answer.prompt for answer in expected], **options)
    assert [result.generated_tokens for result in results.values()] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_16_bits_rows_are_as_near_to_fp32_as_the_model_itself(name: str, dtype: torch.dtype, device: str) -> None:
    """By the log probabilities of what was drawn, beside those of the model without a cache."""
    exact = tiny_model(name if device == "cpu" else f"{name}-wide", "eager", device)  # on a GPU by kernels
    model, random = copy.deepcopy(exact).to(dtype), Random()
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(random.randint(1, 60))] for _ in range(6)]
    rows.enable(model, max_bytes="16MiB" if device == "cpu" else "1GiB", max_seq_len=100)
    results = list(model.generate_batch(prompts, **config(return_logprobs=True)).values())
    assert [result.error for result in results] == [None] * len(prompts)
    made = torch.tensor([result.logprobs for result in results])
    pairs = [(prompt, result.generated_tokens) for prompt, result in zip(prompts, results)]
    right, own = (torch.stack([log_probabilities(each, *pair) for pair in pairs]) for each in (exact, model))
    assert 0 < (made - right).norm() <= 2 * (own - right).norm()


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """What a model without a cache gives tokens behind a prompt, `[tokens]`."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()
    return logits.log_softmax(dim=-1)[range(len(tokens)), tokens]


def test_it_is_ours_that_runs_and_theirs_afterwards(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(model, Random(), 2)
    rows.enable(model, pool=pool(100))
    with Served(model) as served:
        served.check(expected)
        assert isinstance(served.manager.batch_processor.cache, RowCache)
    rows.disable(model)
    monkeypatch.setattr(RowCache, "__init__", None)
    check_batch(model, expected, num_blocks=50, page_size=16, max_memory_percent=0.9)


# ---------------------------------------------------------------------- what becomes of requests


@pytest.mark.few(2)
@pytest.mark.parametrize("host", [0.0, 0.001], ids=["computed anew", "moved to the host"])
@pytest.mark.parametrize("model", ["llama-gqa", "gemma3"], indirect=True)
def test_whatever_becomes_of_requests_their_tokens_are_those_of_generate(model: PreTrainedModel, host: float) -> None:
    """Requests come, fork, and are cancelled; other users of the pool take its memory, and the driver refuses some. In
    the end all that were not cancelled have their tokens, and no memory is used."""
    random, driver = Random(), FaultyDriver(open_driver("cpu", PAGE_SIZE))
    begin = [random.randrange(2, VOCABULARY) for _ in range(20)]
    known = answers(model, random, 5, most=60) + answers(model, random, 5, begin=begin)
    own, several = on_driver(driver, vmmkv.FramePool, 30 * PAGE_SIZE), random.choice((1, 2))
    rows.enable(model, pool=own, max_seq_len=100)
    by_hand = ByHand(model, cpu_offload_space=host, num_return_sequences=several)
    asked: dict[str, Answer] = {}
    missing, has_failed = set[str](), False

    def take_results() -> None:
        while result := by_hand.manager.get_result(timeout=0):
            assert result.error is None or (has_failed and "A larger max_bytes helps" in result.error)
            answer = asked[result.request_id.partition(CHILD)[0]]
            assert result.error or result.generated_tokens == answer.tokens
            missing.discard(result.request_id)

    layout = vmmkv.KVLayout(1, 1, 64, torch.float32)
    with vmmkv.KVCache(layout, 1, 1000, pool=own) as other:
        taken = other.sequence()
        for number in range(120):
            what = random.random()
            if what < 0.2:
                asked[str(number)] = random.choice(known)
                by_hand.manager.add_request(asked[str(number)].prompt, str(number))
                missing |= {str(number), *(f"{number}{child}" for child in CHILDREN[: several - 1])}
            elif what < 0.24 and asked:
                name = random.choice([*asked])
                by_hand.manager.cancel_request(name)
                missing = {each for each in missing if each.partition(CHILD)[0] != name}
            elif what < 0.3:
                taken.free()
                with suppress(vmmkv.OutOfPagesError):
                    taken = other.sequence(random.randint(1, 300))
            elif what < 0.33:
                has_failed = True
                driver.fail("create", skip=random.randint(0, 3), out_of_memory=True, lasting=random.random() < 0.5)
            elif what < 0.4:
                driver.heal()
            by_hand.step()
            take_results()
        driver.heal()
        taken.free()
        while by_hand.processor.has_pending_requests():
            by_hand.step()
            take_results()
    assert not missing
    for cache in by_hand.processor.cache.kv_caches:
        cache.check()
        assert cache.stats().tokens == 0
    assert own.stats().physical_bytes <= 30 * PAGE_SIZE
    by_hand.end()


@pytest.mark.parametrize("stays", [False, True], ids=["all of it", "not all of it"])
@pytest.mark.parametrize("reads", range(1, 12))
def test_who_waits_begins_whenever_others_on_the_pool_give_memory_back(
    model: PreTrainedModel, reads: int, stays: bool
) -> None:
    """Another thread, between any two looks at how much there is."""
    (expected,), own = answers(model, Random(), 1, begin=[7] * 60), pool(24)
    layout, looks, pages = vmmkv.KVLayout(1, 1, 64, torch.float32), [], vmmkv.KVCache.available_pages.fget
    rows.enable(model, pool=own, max_seq_len=200)
    with vmmkv.KVCache(layout, 2, 4000, pool=own) as other, other.sequence(int(stays)):
        much = other.sequence(22 * PAGE_SIZE // layout.token_bytes)

        def look(cache: vmmkv.KVCache) -> int:
            looks.append(pages(cache))
            if len(looks) == reads:
                much.free()
            return looks[-1]

        by_hand = ByHand(model)
        by_hand.manager.add_request(expected.prompt)
        with patch.object(vmmkv.KVCache, "available_pages", property(look)):
            for _ in range(30):
                by_hand.step()
        assert len(looks) > reads
        assert by_hand.manager.get_result(timeout=0).generated_tokens == expected.tokens
        by_hand.end()


def test_who_waits_begins_when_what_it_begins_with_is_known(model: PreTrainedModel) -> None:
    """It lacks few pages then, and is served beside those that it begins like."""
    expected = answers(model, Random(), 6, most=3, begin=[7] * 100)
    rows.enable(model, pool=pool(24), max_seq_len=200)
    by_hand = ByHand(model, max_batch_tokens=1000)
    names = {by_hand.manager.add_request(each.prompt): each for each in expected}
    together = 0
    while by_hand.step():
        together = max(together, len(by_hand.processor.scheduler.active_requests))
    assert together == len(expected)
    results = [by_hand.manager.get_result() for _ in names]
    assert all(each.generated_tokens == names[each.request_id].tokens for each in results)
    by_hand.end()


def test_what_begins_like_an_earlier_request_is_not_computed_again(model: PreTrainedModel) -> None:
    random = Random()
    begin = [random.randrange(2, VOCABULARY) for _ in range(64)]
    first, *others = answers(model, random, 5, begin=begin)
    turn = answers(model, random, 1, most=2, begin=others[0].prompt + others[0].tokens)
    rows.enable(model, pool=pool(200), max_seq_len=200)
    with Served(model) as served:
        served.check([first])
        page = PAGE_SIZE // served.cache.layout.token_bytes
        before = served.cache.stats().cached_tokens
        served.check(others)
        assert served.cache.stats().cached_tokens - before >= len(others) * (64 // page * page)
        before = served.cache.stats().cached_tokens
        served.check(turn)  # of a chat
        assert served.cache.stats().cached_tokens - before >= (len(turn[0].prompt) - 3) // page * page


@pytest.mark.parametrize("end", ["finished", "cancelled", "moved away"])
def test_others_know_a_prompt_at_once_and_an_answer_when_it_ends(model: PreTrainedModel, end: str) -> None:
    """Also what there is of it by then; to say it page by page takes as long as all else that a request needs."""
    random = Random()
    prompt = [random.randrange(2, VOCABULARY) for _ in range(60)]
    rows.enable(model, pool=pool(200), max_seq_len=300)
    by_hand = ByHand(model)
    name = by_hand.manager.add_request(prompt, max_new_tokens=50 if end == "finished" else 200)
    with patch.object(Requests, "commit", autospec=True) as commit:
        for _ in range(70):
            by_hand.step()
        state = by_hand.processor.scheduler.active_requests.get(name)
        if end == "cancelled":
            by_hand.manager.cancel_request(name)
            by_hand.step()
        elif end == "moved away":
            by_hand.processor.cache.free_blocks(name, no_cache=True)
    *first, last = (call.args[2] for call in commit.call_args_list)
    tokens = state.generated_tokens if state else by_hand.manager.get_result().generated_tokens
    assert len(tokens) >= 50
    assert last == [*prompt, *tokens[:-1]]
    assert first
    assert all(each == prompt[: len(each)] for each in first)
    by_hand.end()


def test_nothing_is_kept_where_sharing_is_not_allowed(model: PreTrainedModel) -> None:
    expected = answers(model, Random(), 1, most=60)
    rows.enable(model, pool=pool(200), max_seq_len=200)
    with Served(model, allow_block_sharing=False) as served:
        for _ in range(2):
            served.check(expected)
        assert served.cache.stats().prefix_pages == served.cache.stats().prompt_tokens == 0


@pytest.mark.parametrize("model", ["llama-gqa", "mistral"], indirect=True)
def test_several_answers_to_one_prompt(model: PreTrainedModel) -> None:
    """Forks, of which each is as if it were alone; also where there is no room for all at once."""
    expected = answers(model, Random(), 3, most=60)
    for pages in (200, 26):
        rows.enable(model, pool=pool(pages), max_seq_len=100)
        options = config(num_return_sequences=3, safety_margin=0.0)
        results = list(model.generate_batch([answer.prompt for answer in expected], **options).values())
        assert [result.error for result in results] == [None] * 9
        assert [result.generated_tokens for result in results] == [each.tokens for each in expected for _ in range(3)]


def test_some_have_nothing_left_to_compute_before_they_fork_and_others_have(model: PreTrainedModel) -> None:
    """A prompt of one token, and those that are known but for their last. transformers would look for new tokens where
    the batch before had them, which may be behind all of this one."""
    several, (short,) = answers(model, Random(), 3), answers(model, Random(), 1, most=1, begin=[7])
    rows.enable(model, pool=pool(400), max_seq_len=100)
    by_hand = ByHand(model, num_return_sequences=3)
    for asked in ([short], several, several, [*several, short]):
        names = {by_hand.manager.add_request(each.prompt): each for each in asked}
        while by_hand.step():
            pass
        results = [by_hand.manager.get_result() for _ in range(3 * len(asked))]
        assert all(each.generated_tokens == names[each.request_id.partition("__")[0]].tokens for each in results)
    by_hand.end()


def test_no_more_than_one_request_tries_in_vain_to_begin_in_a_step(model: PreTrainedModel) -> None:
    expected = answers(model, Random(), 12, begin=[7] * 60)
    rows.enable(model, pool=pool(24), max_seq_len=200)
    by_hand, begin = ByHand(model, allow_block_sharing=False), Requests._begin_here
    names = {by_hand.manager.add_request(each.prompt): each for each in expected}
    with patch.object(Requests, "_begin_here", autospec=True, side_effect=begin) as begun:
        tried, is_busy = [0], True
        while is_busy:
            is_busy = by_hand.step()
            tried.append(begun.call_count)
    steps = [after - before for before, after in itertools.pairwise(tried)]
    assert steps[0] < len(expected)
    assert sum(steps) <= 2 * len(expected) + len(steps)
    results = [by_hand.manager.get_result() for _ in names]
    assert all(each.generated_tokens == names[each.request_id].tokens for each in results)
    by_hand.end()


def test_a_name_that_was_cancelled_may_be_used_again_at_once(model: PreTrainedModel) -> None:
    """Who cancels what is done already, and asks again, waits for what he has asked for."""
    first, second = answers(model, Random(), 2)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    by_hand = ByHand(model)
    manager = by_hand.manager
    for expected in (first, second):
        manager.cancel_request("chat")
        manager.add_request(expected.prompt, "chat")
        while by_hand.step():
            pass
        assert manager.get_result().generated_tokens == expected.tokens
    manager.add_request(first.prompt, "chat")
    manager.cancel_request("chat")
    assert not by_hand.step()
    by_hand.end()


def test_nobody_is_told_of_a_request_that_was_cancelled(model: PreTrainedModel) -> None:
    """Nor is kept who was to be told, as transformers does."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    rows.enable(model, pool=pool(40), max_seq_len=900)
    with Served(model) as served:
        handlers = served.manager.output_router.result_handlers
        handlers["endless"] = told.put, SimpleNamespace(call_soon_threadsafe=lambda call, *given: call(*given))
        served.manager.add_request([7], "endless", max_new_tokens=800, streaming=True)
        assert not told.get(timeout=PATIENCE).is_finished()
        with calls(RowManager, "_generation_loop_body") as until:
            served.manager.cancel_request("endless")
            until(lambda: not handlers)
        while not told.empty():
            assert not told.get().is_finished()
        assert served.manager.get_result(timeout=0) is None


def test_who_waits_goes_on_when_all_others_are_cancelled(model: PreTrainedModel) -> None:
    """Nobody finishes then, which is what those wait for that gave way."""
    rows.enable(model, pool=pool(24), max_seq_len=200)
    by_hand = ByHand(model)
    for prompt in ([7] * 10, [8] * 10):
        by_hand.manager.add_request(prompt, max_new_tokens=150)
    scheduler = by_hand.processor.scheduler
    while not scheduler.waiting_requests or not scheduler.active_requests:
        by_hand.step()
    (waiting,), (active,) = scheduler.waiting_requests, scheduler.active_requests
    by_hand.manager.cancel_request(active)
    for _ in range(2):
        by_hand.step()
    assert list(scheduler.active_requests) == [waiting]
    by_hand.end()


class Adapters:
    """In the place of `Weights`: the adapter in use."""

    def __init__(self) -> None:
        self.used: list[str] = ["one"]

    def use(self, name: str) -> None:
        self.used += [name] * (name != self.used[-1])

    def switches(self) -> int:
        return len(self.used)

    def key(self) -> str:
        return self.used[-1]


ONE = Ranks(SimpleNamespace(tp_size=1, tp_local_rank=0))


def test_who_comes_back_from_the_host_needs_room_for_what_its_window_holds() -> None:
    own, layout = pool(12), vmmkv.KVLayout(1, 1, 64, torch.float32)
    with vmmkv.KVCache(layout, 2, 1000, pool=own, host_bytes="1MiB") as cache:
        requests, window = Requests([cache], [7], Adapters(), ONE, reuse=False, has_host=True), 7
        requests.begin("long", 900)
        for held in range(0, 900, 20):
            assert requests.admit("long", held, held + 20, expected=900)
        assert requests.pages_missing("another", 900) > [own.limit_pages]
        (row,) = requests.rows("long")
        cache.kv(0)[0][row, 900 - window : 900] = 5.0
        assert requests.put_away("long")
        assert requests.admit("long", 900, 901, expected=901)
        (row,) = requests.rows("long")
        assert (cache.kv(0)[0][row, 900 - window : 900] == 5.0).all()
        requests.end("long")


@pytest.mark.parametrize("seconds", [0.0, 3.0, float("inf")])
def test_memory_goes_back_once_nobody_has_asked_for_anything_for_a_while(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Once after each time that there was something to do."""
    own, expected, now = pool(100), answers(model, Random(), 3), 0.0
    monkeypatch.setattr(processor, "time", SimpleNamespace(monotonic=lambda: now))
    rows.enable(model, pool=own, max_seq_len=100, idle_seconds=seconds)
    by_hand = ByHand(model)
    for _ in range(2):
        for each in expected:
            by_hand.manager.add_request(each.prompt)
        while by_hand.step():
            now += 100
        held = own.stats().physical_bytes
        now += min(seconds, 1e9)
        assert not by_hand.step()
        assert own.stats().physical_bytes == held > 0
        now += 1
        with patch.object(Requests, "trim", autospec=True, side_effect=Requests.trim) as trim:
            assert not by_hand.step()
            assert not by_hand.step()
        assert trim.call_count == (seconds < 1e9)
        assert (own.stats().physical_bytes == 0) == (seconds < 1e9)
    by_hand.end()


def test_a_manager_may_stop_and_start_again(model: PreTrainedModel) -> None:
    """Another one may have been made before, and not been started."""
    expected = answers(model, Random(), 2)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    forgotten = model.init_continuous_batching(**config())
    with Served(model) as served:
        served.check(expected)
        served.manager.stop(block=True)
        model.set_attn_implementation("eager")
        served.manager.start()
        served.check(expected)
    forgotten.destroy()
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("waiting", [{"block": False}, {"timeout": 0.0}], ids=str)
def test_who_stops_a_manager_without_waiting_leaves_requests_to_their_end(
    model: PreTrainedModel, waiting: dict[str, Any]
) -> None:
    """Also those that wait for others, and its memory goes back then."""
    expected, own = answers(model, Random(), 5), pool(100)
    rows.enable(model, pool=own, max_seq_len=100)
    served = Served(model, max_requests_per_batch=2)
    with served.manager.pause():
        names = served.ask(expected)
        stopping = threading.Thread(target=served.manager.stop, kwargs=waiting)
        stopping.start()
        join(stopping)
    results = served.results(len(names))
    assert [results[name].generated_tokens for name in names] == [each.tokens for each in expected]
    join(served.manager._generation_thread)
    served.manager.destroy()
    gc.collect()
    own.trim()
    assert own.stats().physical_bytes == 0


def test_a_manager_goes_on_when_another_one_of_its_model_stops(model: PreTrainedModel) -> None:
    """As that of `generate_batch`, which nobody sees."""
    expected = answers(model, Random(), 2)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    with Served(model) as first, Served(model) as second:
        first.manager.stop()
        second.check(expected)
        assert len(model.generate_batch([expected[0].prompt], **config())) == 1
        second.check(expected)
        first.manager.start()
        second.manager.stop()
        first.check(expected)


def test_how_a_model_is_called_by_others_says_nothing_about_continuous_batching() -> None:
    """It runs in a thread of its own, without autocast or inference mode, and not as in training."""
    model = tiny_model("gpt2", "eager", "cpu")  # which has dropout
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            (result,) = model.train().generate_batch([expected.prompt], **config()).values()
        assert result.generated_tokens == expected.tokens
    finally:
        rows.disable(model)
        model.eval()


@pytest.mark.parametrize("model", ["llama-gqa", "mistral"], indirect=True)
def test_requests_that_are_made_up_have_room(model: PreTrainedModel) -> None:
    """Also for tokens that they say were computed, of which a window may have left some."""
    rows.enable(model, pool=pool(400), max_seq_len=900)
    processor = model.init_continuous_batching(**config())._create_batch_processor()
    assert len(create_warmup_future_states(2, RequestStatus.DECODING, 1, 256, processor.cache)) == 2
    processor.cache.reset()
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("begins", ["first", "second"])
def test_models_of_one_config_attend_to_rows_until_the_last_is_done(begins: str) -> None:
    """The config has the name of their attention, whoever of them began, and here the first ends first."""
    first, other = (copy.deepcopy(tiny_model("llama-gqa", "eager", "cpu", seed)) for seed in (0, 1))
    second = type(first)(first.config).eval()
    second.load_state_dict(other.state_dict())
    assert second.config is first.config
    (expected,), own = answers(other, Random(), 1), pool(60)
    for each in (first, second):
        rows.enable(each, pool=own, max_seq_len=100)
    if begins == "first":
        ends = Served(first)
    with Served(second) as served:
        if begins == "second":
            ends = Served(first)
        with ends:
            served.check([expected])
        served.check([expected])
    assert first.config._attn_implementation == "eager"


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_that_was_made_under_a_manager_attends_by_itself_once_disabled(
    model: PreTrainedModel, copied: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    """And who says that of the model itself has its manager go on, as that of the copy does."""
    (expected,) = answers(model, Random(), 1)
    ids, options = torch.tensor([expected.prompt]), {"generation_config": config()["generation_config"]}
    rows.enable(model, pool=pool(100), max_seq_len=100)
    with Served(model) as served:
        made, other = copied(model), copy.deepcopy(model)
        for each in (model, made):
            with pytest.raises(vmmkv.UnsupportedAttentionError, match=r"stop .* manager .* copy .*disable\(model\)"):
                each.generate(ids, **options)
        for each in (model, made):
            rows.disable(each)
        assert made.generate(ids, **options)[0, len(expected.prompt) :].tolist() == expected.tokens
        assert made.config._attn_implementation == "sdpa"
        served.check([expected])
    with Served(other):
        rows.disable(other)
        assert other.config._attn_implementation == rows.NAME
    assert other.config._attn_implementation == "sdpa"


def test_models_that_wait_for_each_others_memory_take_turns() -> None:
    """Each wants more than two thirds of it, in small steps: were both to begin anew whenever they cannot go on, each
    would take what the other has just been given."""
    random, own = Random(), pool(5)
    models = [copy.deepcopy(tiny_model("mixtral", "eager", "cpu")) for _ in range(2)]
    begin = [random.randrange(2, VOCABULARY) for _ in range(58)]
    expected = [answers(each, random, 1, most=8, begin=begin)[0] for each in models]
    for each in models:
        rows.enable(each, pool=own, max_seq_len=100)
    hands = [ByHand(each, max_batch_tokens=2, allow_block_sharing=False) for each in models]
    for hand, wanted in zip(hands, expected):
        hand.manager.add_request(wanted.prompt)
    with patch.object(RowScheduler, "give_way", autospec=True, side_effect=RowScheduler.give_way) as give_way:
        is_busy = True
        while is_busy and give_way.call_count <= 2:
            found = [hand.step() for hand in hands]
            is_busy = any(found) or any(hand.processor.has_pending_requests() for hand in hands)
    assert give_way.call_count <= 2
    for hand, wanted, each in zip(hands, expected, models):
        assert hand.manager.get_result(timeout=0).generated_tokens == wanted.tokens
        hand.end()
        rows.disable(each)


def test_a_request_that_there_is_no_memory_for_ends_alone(model: PreTrainedModel) -> None:
    """Also one that only its answer makes too long."""
    expected = answers(model, Random(), 2, most=8)
    rows.enable(model, pool=pool(8), max_seq_len=200)
    with Served(model, safety_margin=0.0) as served:
        page = PAGE_SIZE // served.manager.groups[0].layout.token_bytes
        long = [served.manager.add_request([7] * (9 * page), max_new_tokens=2)]
        long.append(served.manager.add_request([7], max_new_tokens=9 * page))
        names, done = served.ask(expected), {}
        while len(done) < 4:
            result = served.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result
        for name in long:
            assert "A larger max_bytes helps" in done[name].error
        for name in names:
            assert done[name].generated_tokens == served.asked[name].tokens


def test_who_was_to_fork_from_a_request_that_there_is_no_memory_for_is_told_too(model: PreTrainedModel) -> None:
    """`generate_batch` waits for all of them."""
    (expected,) = answers(model, Random(), 1, most=8)
    rows.enable(model, pool=pool(8), max_seq_len=300)
    results = model.generate_batch([[7] * 200, expected.prompt], **config(num_return_sequences=3, safety_margin=0.0))
    assert ["A larger max_bytes" in (result.error or "") for result in results.values()] == [True] * 3 + [False] * 3
    assert [result.generated_tokens for result in results.values()][3:] == [expected.tokens] * 3


# ---------------------------------------------------------------------- other weights


@pytest.mark.parametrize(
    "how",
    [
        "paused",
        "started again",
        "written to",
        "put in the place of others and written to",
        "another adapter",
        "another adapter of what is inside",
    ],
)
def test_nothing_begins_with_what_other_weights_have_made(how: str) -> None:
    """Neither with what was known before, nor with what a request that runs meanwhile leaves."""
    before, after = (tiny_model("llama-gqa", "eager", "cpu", seed) for seed in (0, 1))
    random, model = Random(), copy.deepcopy(before)
    pairs: list[tuple[Answer | None, Answer | None]] = [(None, None)]
    while not all(pairs[-1]):
        prompt = [random.randrange(2, VOCABULARY) for _ in range(60)]
        pairs.append((answer(before, prompt), answer(after, prompt)))
    old, new = pairs[-1]
    assert old is not None
    assert new is not None
    if how.startswith("another adapter"):
        model.tuned = Adapted()
        (model.model if "inside" in how else model).peft_config = {}
    rows.enable(model, pool=pool(300), max_seq_len=200)
    with Served(model) as served:
        served.check([old])
        if how == "paused":
            served.manager.add_request(prompt, "on its way", max_new_tokens=100, streaming=True)
            assert served.manager.get_result(timeout=PATIENCE).request_id == "on its way"
            with served.manager.pause():
                model.load_state_dict(after.state_dict())
            while not served.manager.get_result(timeout=PATIENCE).is_finished():
                pass
        elif how == "started again":
            served.manager.stop(keep_for_next_session=True)
            model.load_state_dict(after.state_dict())
            served.manager.start()
        else:
            if how == "put in the place of others and written to":
                with served.manager.pause():
                    there = {name: each.data for name, each in model.state_dict().items()}
                    model.load_state_dict(there, assign=True)  # as new tensors
                served.check([old])
            if how.startswith("another adapter"):
                switch_adapter(model, after, "other")
            else:
                model.load_state_dict(after.state_dict())
        served.check([new])
        assert served.cache.stats().cached_tokens == (60 - 1 if how == "paused" else 0)
        served.check([new])
        assert served.cache.stats().cached_tokens > 0


@pytest.mark.parametrize("how", ["written to", "swapped", "in the place of another of its name"])
def test_nothing_begins_with_what_an_adapter_has_made_that_is_gone(how: str) -> None:
    """It was put into the model while a manager runs it."""
    one, other, bare = (copy.deepcopy(tiny_model("llama-gqa", "eager", "cpu")) for _ in range(3))
    for model in (one, other):
        put_adapter(model)
    random, old, new = Random(), None, None
    while not (old and new and old.tokens != new.tokens):
        prompt = [random.randrange(2, VOCABULARY) for _ in range(60)]
        old, new = answer(one, prompt), answer(other, prompt)
    rows.enable(bare, pool=pool(300), max_seq_len=200)
    with Served(bare) as served:
        served.manager.add_request([7])
        served.results(1)
        with torch.no_grad():
            put_adapter(bare).copy_(one.tuned.weight)
            served.check([old])
            if how == "written to":
                bare.tuned.weight.copy_(other.tuned.weight)
            elif how == "swapped":  # it is written to as often
                new_weight = torch.nn.Parameter(other.tuned.weight.clone())
                for _ in range(bare.tuned.weight._version):
                    new_weight += 0
                torch.utils.swap_tensors(bare.tuned.weight, new_weight)
            else:
                put_adapter(bare).copy_(other.tuned.weight)
        served.check([new])
        assert served.cache.stats().cached_tokens == 0
        served.check([new])
        assert served.cache.stats().cached_tokens > 0
    rows.disable(bare)


def put_adapter(model: PreTrainedModel) -> torch.Tensor:
    """Gives a model an adapter of its embeddings, as PEFT does, in the place of what it has; returns its weights."""
    tuned = Adapted()
    tuned.weight = torch.nn.Parameter(torch.randn(model.get_input_embeddings().embedding_dim))
    put_in(model, tuned)
    return tuned.weight


def test_nothing_begins_with_what_other_buffers_have_made(model: PreTrainedModel) -> None:
    """Which some quantized layers have instead of parameters."""
    (expected,) = answers(model, Random(), 1, begin=[7] * 40)
    rows.enable(model, pool=pool(300), max_seq_len=200)
    buffer = next(model.buffers())
    with Served(model) as served:
        for cached in (False, True):
            served.check([expected])
            assert (served.cache.stats().cached_tokens > 0) == cached
        buffer.copy_(buffer.clone())
        known = served.cache.stats().cached_tokens
        served.check([expected])
        assert served.cache.stats().cached_tokens == known


def switch_adapter(model: PreTrainedModel, to: PreTrainedModel, name: str) -> None:
    """As PEFT does it: what is computed changes, and nothing is written to."""
    for each, given in zip(model.parameters(), to.parameters(), strict=True):
        each.data.copy_(given)
    model.tuned.active_adapters = [name]


@pytest.mark.parametrize("when", ["before it moves", "while it is there"])
def test_nothing_begins_with_what_two_adapters_have_made_of_one_that_was_on_the_host(when: str) -> None:
    one, other = (tiny_model("llama-gqa", "eager", "cpu", seed) for seed in (0, 1))
    model, random, expected = copy.deepcopy(one), Random(), None
    model.peft_config, model.tuned = {}, Adapted()
    rows.enable(model, pool=pool(600), max_seq_len=600)
    by_hand = ByHand(model, cpu_offload_space=0.001)
    processor = by_hand.processor
    while expected is None:  # two tokens were as likely
        prompt = [random.randrange(2, VOCABULARY) for _ in range(20)]
        moved, stays = (by_hand.manager.add_request(prompt, max_new_tokens=new) for new in (100, 30))
        for _ in range(5):
            by_hand.step()
        if when == "before it moves":
            switch_adapter(model, other, "other")
            for _ in range(9):
                by_hand.step()
        processor.scheduler.starved_requests = [(processor.scheduler.active_requests[moved], 1)]
        with patch.object(RowCache, "count_storable_requests", return_value=0):
            assert processor.offloading_manager.offload_requests()
        assert processor.cache.requests.is_away(moved)
        switch_adapter(model, other, "other")
        while by_hand.step():
            pass
        done = [by_hand.manager.get_result() for _ in range(2)]
        results = {each.request_id: each.generated_tokens for each in done}
        assert results.keys() == {moved, stays}
        switch_adapter(model, one, "one")
        expected = answer(one, [*prompt, *results[moved], 5])
    by_hand.manager.add_request(expected.prompt)
    while by_hand.step():
        pass
    assert by_hand.manager.get_result().generated_tokens == expected.tokens
    by_hand.end()
    rows.disable(model)


def test_what_forks_from_what_two_adapters_have_made_is_nobodys_beginning_either() -> None:
    ids, layout, adapters = torch.randint(100, (40,)).tolist(), vmmkv.KVLayout(1, 1, 64, torch.float32), Adapters()
    with vmmkv.KVCache(layout, 4, 1000, pool=pool(40)) as cache:
        requests = Requests([cache], [0], adapters, ONE, reuse=True, has_host=False)
        requests.begin("before", 40, ids)
        assert requests.admit("before", 0, 40, expected=40)
        adapters.use("other")
        assert requests.fork("before", ["child"]) == ["child"]
        adapters.use("one")
        requests.begin("behind", 40, ids)
        assert requests.admit("behind", 0, 40, expected=40)
        news = [requests.has_news(name, 40, is_over=True) for name in ("before", "child", "behind")]
        assert news == [False, False, True]
        requests.end_all()


class Adapted(torch.nn.Module):
    """A layer with adapters, as PEFT has them."""

    active_adapters, disable_adapters = ["one"], False

    def forward(self, _layer: object, _given: object, states: torch.Tensor) -> torch.Tensor:
        return states * self.weight


def test_what_is_saved_with_an_adapter_is_not_asked_how_much_of_it_there_is(model: PreTrainedModel) -> None:
    """Though it answers for the attention inside, which has a `scaling`, too."""
    own = copy.deepcopy(model)
    own.peft_config, own.tuned = {}, Saved()
    weights = Weights(own)
    before = weights.key()
    own.tuned.active_adapters = ["other"]
    assert weights.key() != before


class Saved(Adapted):
    """As PEFT has it."""

    def __getattr__(self, name: str) -> Any:
        return 0.125 if name == "scaling" else super().__getattr__(name)


def test_a_manager_that_is_started_again_looks_where_weights_are(model: PreTrainedModel) -> None:
    """Its graphs, and its rows, are for those that were there."""
    own = copy.deepcopy(model)
    (expected,) = answers(own, Random(), 1)
    rows.enable(own, pool=pool(100), max_seq_len=100)
    with Served(own) as served:
        served.check([expected])
        served.manager.stop(keep_for_next_session=True)
        own.bfloat16()
        served.manager.start()
        served.manager.add_request(expected.prompt)
        assert served.manager.get_result(timeout=PATIENCE).error is None
        assert served.cache.layout.dtype == torch.bfloat16


@pytest.mark.parametrize("window", [None, 5, 50])
@pytest.mark.parametrize("model", ["mistral"], indirect=True)
def test_a_manager_that_is_started_again_looks_how_far_layers_attend(
    model: PreTrainedModel, window: int | None
) -> None:
    own = copy.deepcopy(model)
    rows.enable(own, pool=pool(200), max_seq_len=200)
    check_batch(own, answers(own, Random(), 3, most=90), persistent_manager=True)
    own.config.sliding_window = window
    check_batch(own, answers(own, Random(), 3, most=90), persistent_manager=True)
    rows.disable(own)


@pytest.mark.parametrize("model", ["gpt2"], indirect=True)
def test_a_manager_that_is_started_again_drops_nothing_out(model: PreTrainedModel) -> None:
    """Though its model has been trained meanwhile."""
    own = copy.deepcopy(model)
    for layer in own.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.5
    expected = answers(own, Random(), 3)
    rows.enable(own, pool=pool(100), max_seq_len=100)
    for _ in range(2):
        check_batch(own, expected, persistent_manager=True)
        own.train()
    rows.disable(own)


def test_a_manager_that_is_kept_serves_callers_in_inference_mode_and_others(model: PreTrainedModel) -> None:
    """transformers runs its thread as its caller runs, from 5.24 on."""
    expected = answers(model, Random(), 3)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            check_batch(model, expected, persistent_manager=True, warmup=False)


def test_a_pause_in_which_somebody_stops_the_manager_ends_as_always(model: PreTrainedModel) -> None:
    own = copy.deepcopy(model)
    rows.enable(own, pool=pool(100), max_seq_len=100)
    with Served(own) as served, served.manager.pause():
        stop = threading.Thread(target=served.manager.stop, kwargs={"block": False})
        stop.start()
        join(stop)
        for each in own.parameters():
            each.data = each.data.clone()
    rows.disable(own)


# ---------------------------------------------------------------------- graphs


class Replayed:
    """In the place of a CUDA graph: what was captured is called again, as it was, and with what it was."""

    def __init__(self, forward: Any, model: PreTrainedModel, *given: Any) -> None:
        self._call = functools.partial(forward, model, *given)
        self._held = lambda: ((weights := Weights(model)).key(), weights.addresses)
        self._captured = self._held()

    def replay(self) -> None:
        assert self._held() == self._captured, "a graph goes on with what it was captured with"
        self._call()

    def reset(self) -> None: ...


def test_weights_are_where_the_tensors_are_that_they_are_made_of() -> None:
    """As of quantized ones, and of those of tensor parallelism, which have no memory of their own."""
    numbers, scales = torch.randint(-9, 9, (1, 2, 3, 4), dtype=torch.int8), torch.rand(1, 2, 3)
    for moved in (numbers, scales):
        before, after = (ScaledStates(numbers, scales, torch.float32) for _ in range(2))
        assert addresses([before, scales]) == addresses([after, scales])
        name = "numbers" if moved is numbers else "scales"
        setattr(after, name, moved.clone())
        assert addresses([before, scales]) != addresses([after, scales])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """A device, and the batch size of each graph that is captured; on the host there are none, and calls in their
    place."""
    sizes: list[int] = []
    capture = model_runner.ModelRunner._capture_graph

    def count(runner: Any, forward: Any, stream: Any, *given: Any) -> None:
        sizes.append(given[1]["input_ids"].shape[1])
        if request.param == "cuda":
            capture(runner, forward, stream, *given)
        else:
            forward(*given)
            runner.inputs_and_outputs.set_graph(Replayed(forward, *given))

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", count)
    if request.param == "cpu":
        monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "graph")
        monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, 0))
        monkeypatch.setattr(groups, "kernels_take", lambda *_: True)
    return request.param, sizes


def test_one_graph_serves_a_batch_size_whatever_the_lengths(captures: tuple[str, list[int]]) -> None:
    """All are captured before the first request, and twice where batches are made ahead. Batches are padded to the
    next."""
    device, sizes = captures
    model = tiny_model("olmo2" if device == "cpu" else "llama-gqa-wide", "eager", device)
    rounds = [answers(model, Random(), 7, most=most) for most in (9, 60)]
    with (
        on_rows(model, max_seq_len=300),
        Served(
            model, warm=True, use_cuda_graph=(False, True), max_batch_tokens=64, max_requests_per_batch=60
        ) as served,
    ):
        before = sorted([2, 4, 8, 16, 32, 48, 60] * (1 if device == "cpu" else 2))
        assert sorted(sizes) == before
        runner = served.manager.batch_processor.model_runner
        assert [runner.maybe_pad_inputs(size, 0, True)[0] for size in (1, 3, 8, 33, 49)] == [2, 4, 8, 48, 60]
        for expected in rounds:
            served.check(expected)
        assert sorted(sizes) == before


@pytest.mark.parametrize("ahead", [False, True], ids=["one batch", "one ahead"])
def test_graphs_of_prompts_serve_every_batch_of_their_size(
    captures: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Whatever prompts and decode there are: a warm-up captures all sizes, and none comes later. What a pass tells
    kernels beside what lies on the device is the same in all passes of a graph."""
    device, sizes = captures
    if ahead and device == "cpu":
        pytest.skip("batches are made ahead on a GPU alone")
    model, told = tiny_model("olmo2" if device == "cpu" else "llama-gqa-wide", "eager", device), {}
    chance = Random()
    expected = [answers(model, chance, chance.randint(2, 30), most=most) for most in (9, 60, 200)]
    expected.append(answers(model, chance, 2, begin=[7] * 1100))  # transformers tells lengths apart from 1024 on
    attend = packed.attend

    def watch(query: torch.Tensor, kept: Any, batch: Any, **options: Any) -> torch.Tensor:
        if batch.max_prompts:
            told.setdefault((query.shape[0], batch.rows.shape[0]), set()).add(batch.max_prompts)
        return attend(query, kept, batch, **options)

    monkeypatch.setattr(packed, "attend", watch)
    options: dict[str, Any] = {"use_cuda_graph": (True, False), "use_async_batching": ahead, "max_batch_tokens": 200}
    with on_rows(model, max_seq_len=1300), Served(model, warm=True, **options, max_requests_per_batch=100) as served:
        assert sizes == [200, 192, 128, 64] * (1 + ahead)
        for each in expected:
            served.check(each)
        assert sizes == [200, 192, 128, 64] * (1 + ahead)
    assert {tokens: prompts for (tokens, _), prompts in told.items()} == {64: {64}, 128: {100}, 192: {100}, 200: {100}}


@pytest.mark.parametrize(
    "how", ["another adapter", "another one merged", "more of an adapter", "an adapter put in", "weights that moved"]
)
def test_graphs_are_not_replayed_with_what_a_model_had_before(captures: tuple[str, list[int]], how: str) -> None:
    """Whatever is as it was, like prompts: what is known of them is not taken either. Graphs that read weights where
    they were are made anew."""
    device, sizes = captures
    kind = "olmo2" if device == "cpu" else "llama-gqa-wide"
    before, after = (
        copy.deepcopy(tiny_model(kind, "eager", device, seed)) for seed in (0, how == "weights that moved")
    )
    tuned = Tuned(after)
    if how == "another adapter":
        put_in(before, tuned)
        put_in(after, tuned.using("other"))
    elif how == "another one merged":
        put_in(before, tuned)
        put_in(after, tuned.using(merged=("other",)))
    elif how == "more of an adapter":
        put_in(before, tuned)
        put_in(after, tuned.using(scale=2.0))
    elif how == "an adapter put in":
        put_in(after, tuned)
    random, pairs = Random(), []
    while len(pairs) < 5 or all(old.tokens == new.tokens for old, new in pairs):
        prompt = [random.randrange(2, VOCABULARY) for _ in range(random.randint(1, 60))]
        old, new = answer(before, prompt), answer(after, prompt)
        if old and new:
            pairs.append((old, new))
    with (
        on_rows(before, max_seq_len=300),
        Served(before, warm=True, use_cuda_graph=(True, True), max_batch_tokens=64, max_requests_per_batch=8) as served,
    ):
        served.check([old for old, _ in pairs])
        captured = len(sizes)
        if how == "weights that moved":
            were = [each.data for each in before.parameters()]
            with served.manager.pause():
                for each, given in zip(before.parameters(), after.parameters(), strict=True):
                    each.data = given.data
        else:
            put_in(before, after.tuned)
        served.check([new for _, new in pairs])
        assert (len(sizes) > captured) == (how == "weights that moved")
        if how == "weights that moved":  # and back
            served.manager.stop(keep_for_next_session=True)
            for each, given in zip(before.parameters(), were, strict=True):
                each.data = given
            served.manager.start()
            served.check([old for old, _ in pairs])
        assert (captured == 0) == (how in ("another adapter", "another one merged", "more of an adapter"))


class Tuned(torch.nn.Module):
    """Two adapters of a model's embeddings, as PEFT has them."""

    disable_adapters = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        embedding = model.get_input_embeddings().weight
        self.weights = torch.nn.ParameterDict(
            {name: torch.randn(embedding.shape[1]).to(embedding) for name in ("one", "other")}
        )
        self.active_adapters, self.scaling = ["one"], {"one": 1.0, "other": 1.0}
        self.merged_adapters: list[str] = []

    def using(self, name: str = "one", scale: float = 1.0, merged: tuple[str, ...] = ()) -> Tuned:
        """The same, of which another is used, or more, or what is merged."""
        other = copy.copy(self)
        other.active_adapters, other.scaling = [name], {**self.scaling, name: scale}
        other.merged_adapters = [*merged]
        return other

    def forward(self, _layer: object, _given: object, states: torch.Tensor) -> torch.Tensor:
        (name,) = self.merged_adapters or self.active_adapters
        return states + self.scaling[name] * states * self.weights[name]


def put_in(model: PreTrainedModel, tuned: Adapted | Tuned) -> None:
    """Gives a model adapters, in the place of those that it has."""
    model.peft_config, model.tuned = {}, tuned
    layer = model.get_input_embeddings()
    layer._forward_hooks.clear()
    layer.register_forward_hook(tuned.forward)


def test_a_warm_up_makes_graphs_of_prompts_where_no_request_may_be_as_long_as_a_batch(
    captures: tuple[str, list[int]],
) -> None:
    device, sizes = captures
    if device != "cpu":
        pytest.skip("on a GPU a page holds more tokens than a batch")
    model = tiny_model("olmo2", "eager", device)
    rows.enable(model, pool=pool(5), max_seq_len=1300)
    manager = model.init_continuous_batching(**config(use_cuda_graph=(True, False), max_batch_tokens=200))
    try:
        assert 200 * manager.groups[0].layout.token_bytes > 5 * PAGE_SIZE
        manager.warmup()
        assert sizes == [200, 192, 128, 64]
    finally:
        manager.destroy()
        rows.disable(model)


def test_batches_of_more_requests_or_tokens_than_graphs_are_for_run_without_one(
    captures: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And graphs that could not be made are not made among requests."""
    device, sizes = captures
    monkeypatch.setattr("vmmkv.integrations.batching.batches.GRAPH_SEQUENCES", 4)
    monkeypatch.setattr("vmmkv.integrations.batching.batches.MOST_TOKENS", 200)
    model = tiny_model("olmo2" if device == "cpu" else "llama-gqa-wide", "eager", device)
    several = [answers(model, Random(), count, most=20) for count in (2, 4, 5, 20)]
    several.append(answers(model, Random(), 3, begin=[7] * 80))
    capture = model_runner.ModelRunner._capture_graph

    def fail(runner: Any, forward: Any, stream: Any, *given: Any) -> None:
        if given[1]["input_ids"].shape[1] == 128:
            raise RuntimeError("this one cannot be captured")
        capture(runner, forward, stream, *given)

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", fail)
    options: dict[str, Any] = {"use_cuda_graph": (True, False), "max_batch_tokens": 256}
    with on_rows(model, max_seq_len=300), Served(model, warm=True, **options, max_requests_per_batch=60) as served:
        for expected in several:
            served.check(expected)
    assert {*sizes} == {192, 64}


def test_without_a_warm_up_there_are_no_more_graphs_than_transformers_has(captures: tuple[str, list[int]]) -> None:
    """Who did not wait for them before, waits for none but these later."""
    device, sizes = captures
    model = tiny_model("olmo2" if device == "cpu" else "llama-gqa-wide", "eager", device)
    expected = answers(model, Random(), 40, most=9)
    with (
        on_rows(model, max_seq_len=300),
        Served(model, use_cuda_graph=(True, True), max_batch_tokens=64, max_requests_per_batch=60) as served,
    ):
        served.check(expected)
        assert {*sizes} <= {2, 4, 8, 16, 32, 60}


def test_batches_of_decode_are_padded_by_little() -> None:
    for most in (1, 2, 15, 16, 17, 250, *Random().sample(range(1, 2000), 5)):
        sizes = decode_sizes(most)
        assert sizes == sorted({*sizes})
        assert {*sizes} >= {min(2 << power, most) for power in range(11)}
        for requests in range(2, most + 1):
            assert min(size for size in sizes if size >= requests) < requests + max(requests / 8, min(requests, 16))


def test_logits_are_those_of_requests_though_a_batch_is_padded(captures: tuple[str, list[int]]) -> None:
    """transformers computes them of as many tokens as there are, if these are fewer than requests might be."""
    device, _ = captures
    model, computed = tiny_model("olmo2" if device == "cpu" else "llama-gqa-wide", "eager", device), []
    expected = answers(model, Random(), 5, begin=[7] * 40)
    rows.enable(model, max_bytes="16MiB" if device == "cpu" else "1GiB", max_seq_len=300)
    watch = model.lm_head.register_forward_hook(lambda _, __, logits: computed.append(logits.shape[1]))
    try:
        with Served(model, use_cuda_graph=(False, True), max_batch_tokens=512, max_requests_per_batch=256) as served:
            served.check(expected)
        assert max(computed) <= SEQUENCES
    finally:
        watch.remove()
        rows.disable(model)


# ---------------------------------------------------------------------- compiled forward passes


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({"default_compile_level": 1}, {"prompts", "decode"}),
        ({"varlen_compile_config": transformers.CompileConfig(mode="default")}, {"prompts"}),
        ({"decode_compile_config": transformers.CompileConfig(mode="default")}, {"decode"}),
    ],
    ids=["both", "prompts", "decode"],
)
def test_forward_passes_are_compiled_as_the_config_says(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiled: set[str]
) -> None:
    """Which those are: the compiler is not run here."""
    expected, ran = answers(model, Random(), 2), set()

    def compile_(forward: Any, **_: Any) -> Any:
        def run(model: Any, batch: dict[str, Any], *given: Any) -> None:
            ran.add("prompts" if batch["block_table"] is None else "decode")
            forward(model, batch, *given)

        return run

    monkeypatch.setattr(model_runner.torch, "compile", compile_)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    with Served(model, **options) as served:
        served.check(expected)
    assert ran == compiled


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["llama-gqa", "mistral", "gemma2", "gpt-oss"], indirect=True)
def test_a_compiled_layer_is_one_program(model: PreTrainedModel) -> None:
    """Which any layer of its kind, of passes with prompts or of decode, may be: so there is one, or two of other sizes.
    Once nobody runs on rows, layers are as before."""
    programs: list[list[str]] = []

    def compile_(graph: torch.fx.GraphModule, _: object) -> Any:
        programs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    expected = answers(model, Random(), 6)
    compiling = transformers.CompileConfig(mode=None, backend=compile_)
    rows.enable(model, max_bytes="16MiB", max_seq_len=300)
    torch.compiler.reset()
    with Served(model, warm=True, varlen_compile_config=compiling, decode_compile_config=compiling) as served:
        served.check(expected)
        served.manager.stop(block=True)
        assert not any(
            "forward" in vars(each) for each in model.modules() if isinstance(each, GradientCheckpointingLayer)
        )
        served.manager.start()
        served.check(expected)
    layers = [targets for targets in programs if any("attend_inside" in target for target in targets)]
    kinds = len({*(getattr(model.config, "layer_types", None) or ["full_attention"])})
    assert kinds <= len(layers) <= 3 * kinds
    for targets in layers:
        assert sum("attend_inside" in target for target in targets) == 1
        assert sum("linear" in target for target in targets) >= 4
    torch.compiler.reset()


@pytest.mark.gpu
def test_compiled_forward_passes_give_the_tokens_of_generate() -> None:
    model = tiny_model("llama-gqa-wide", "eager", "cuda")
    expected = answers(model, Random(), 12, most=60)
    with on_rows(model, max_seq_len=300):
        check_batch(model, expected, default_compile_level=1)
        torch.compiler.reset()


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"use_async_batching": False}, {"use_cuda_graph": False}], ids=str)
@pytest.mark.parametrize("name", ["llama-gqa-wide", "mistral-wide", "gemma2-wide", "gpt-oss-wide", "llama-gqa"])
def test_graphs_and_batches_ahead_give_the_tokens_of_generate(name: str, options: dict[str, Any]) -> None:
    """A graph for each number of requests, and a batch prepared while the one before runs; heads of 8 have no kernels,
    and so no graphs."""
    model = tiny_model(name, "eager", "cuda")
    expected = answers(model, Random(), 12, most=60)
    with on_rows(model, max_seq_len=200):
        for _ in range(2):
            check_batch(model, expected, **options)


def asks_the_device(_module: torch.nn.Module, _given: Any, output: torch.Tensor) -> None:
    output.sum().item()


def refuses_captures(_module: torch.nn.Module, _given: Any, output: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("this model is not for CUDA graphs")


@pytest.mark.gpu
@pytest.mark.parametrize("hook", [asks_the_device, refuses_captures])
def test_a_model_that_cannot_be_captured_runs_without_graphs(hook: Callable[..., None]) -> None:
    """That is found out by a capture that fails, or is broken off, after which torch works as before."""
    model = copy.deepcopy(tiny_model("llama-gqa-wide", "eager", "cuda"))
    expected, stream = answers(model, Random(), 6, most=60), torch.cuda.current_stream()
    model.model.norm.register_forward_hook(hook)
    rows.enable(model, max_bytes="1GiB", max_seq_len=200)
    with Served(model) as served:
        assert served.manager.continuous_batching_config.use_cuda_graph == (False, False)
        assert torch.cuda.current_stream() == stream
        assert 0 <= torch.rand(1, device="cuda").item() < 1
        served.check(expected)
    rows.disable(model)


@pytest.mark.gpu
def test_what_is_zeroed_at_a_start_is_zero_before_the_first_batch() -> None:
    """transformers does it on the default stream, which is long busy here."""
    model = tiny_model("llama-gqa-wide", "eager", "cuda")
    expected = answers(model, Random(), 6, most=60)
    with on_rows(model, max_seq_len=200):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        with Served(model) as served:
            served.check(expected)
            served.manager.stop(block=True)
            torch.cuda._sleep(200_000_000)
            served.manager.start()
            served.check(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("host", [0.0, 0.1], ids=["computed anew", "moved to the host"])
def test_more_requests_than_a_gpu_has_memory_for(host: float) -> None:
    """Pages are taken from requests while batches run that read them."""
    model = tiny_model("llama-gqa-wide", "eager", "cuda")
    expected = answers(model, Random(), 16, most=900)
    own = vmmkv.FramePool("12MiB")  # a page has room for 1024 tokens
    with (
        on_rows(model, pool=own, max_seq_len=1024),
        Served(model, cpu_offload_space=host, safety_margin=0.0, max_batch_tokens=512) as served,
    ):
        served.check(expected)
        assert served.cache.stats().tokens == 0
        served.cache.check()


# ---------------------------------------------------------------------- what is refused


def test_of_several_requests_all_are_added_or_none(model: PreTrainedModel) -> None:
    """Nobody would know the names of those that were. Prompts may be tensors."""
    expected = answers(model, Random(), 3)
    good = [torch.tensor(each.prompt) for each in expected]
    rows.enable(model, pool=pool(100), max_seq_len=100)
    with Served(model) as served:
        for wrong, error in (([7] * 99, vmmkv.SequenceTooLongError), ([], vmmkv.ArgumentError)):
            with pytest.raises(error):
                served.manager.add_requests([good[0], wrong, good[1]])
        names = served.manager.add_requests(good)
        results = served.results(3)
    assert [results[name].generated_tokens for name in names] == [each.tokens for each in expected]


def test_a_request_that_nobody_would_answer_is_refused(model: PreTrainedModel) -> None:
    """After a stop, and after an error in a forward pass; until the next start."""
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    manager = model.init_continuous_batching(**config())
    manager.start()
    manager.stop()
    with pytest.raises(vmmkv.StoppedError, match="stopping"):
        manager.add_request(expected.prompt)
    manager.start()
    with patch.object(model.lm_head, "forward", side_effect=ValueError("broken")):
        manager.add_request(expected.prompt)
        join(manager._generation_thread)
    assert manager.get_result().error == "broken"
    with pytest.raises(vmmkv.StoppedError, match="fatal error"):
        manager.add_requests([expected.prompt])
    manager.start()
    manager.add_request(expected.prompt)
    assert manager.get_result(timeout=PATIENCE).generated_tokens == expected.tokens
    manager.stop()
    manager.destroy()


def test_who_is_new_is_told_of_a_hard_stop(model: PreTrainedModel) -> None:
    """With those that were to fork from it."""
    rows.enable(model, pool=pool(100), max_seq_len=100)
    manager = model.init_continuous_batching(**config(num_return_sequences=3))
    manager.start()
    with manager.pause():  # the loop takes what is new when it goes on, and looks whether it is to stop
        names = manager.add_requests([[7], [8, 9]])
        stopping = threading.Thread(target=manager.stop, kwargs={"hard_stop": True})
        with calls(RowManager, "join") as until:  # which follows when the loop has been told to stop
            stopping.start()
            until(lambda: manager.background_thread_status.local_status > 0)
    join(stopping)
    told = [manager.get_result() for _ in range(6)]
    assert {each.request_id for each in told} == {f"{name}{of}" for name in names for of in ("", *CHILDREN)}
    assert all("stopped" in each.error or "finished before" in each.error for each in told)
    manager.destroy()


def test_names_and_numbers_that_would_end_all_requests_are_refused(model: PreTrainedModel) -> None:
    """transformers looks at them when it is too late, or not at all. A top_k beyond the vocabulary is all of it, as for
    `generate`."""
    (expected,) = answers(model, Random(), 1)
    options = config(per_request_processors=True)
    options["generation_config"].update(do_sample=True, temperature=0.5, top_k=1000)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    manager = model.init_continuous_batching(**options)
    manager.start()
    temperatures = ({"temperature": wrong} for wrong in (0.0, float("nan"), 1e-46, np.float64(0)))
    most = *({"top_k": wrong} for wrong in (-1, 0, 98)), *({"top_p": wrong} for wrong in (-0.1, 1.1, float("nan")))
    names = {"request_id": ["name"]}, {"request_id": 7}
    for wrong in (*temperatures, *most, *names, {"max_new_tokens": float("nan")}, {"max_new_tokens": "5"}):
        with pytest.raises(vmmkv.ArgumentError, match=f"got {next(iter(wrong))}="):
            manager.add_request(expected.prompt, **wrong)
    names = [manager.add_request(expected.prompt, **told) for told in ({}, {"top_k": 1, "temperature": 3.0})]
    done = {result.request_id: result for result in (manager.get_result(timeout=PATIENCE) for _ in names)}
    assert done[names[1]].generated_tokens == expected.tokens
    assert len(done[names[0]].generated_tokens) > 0
    manager.stop()


NOT_DONE: list[dict[str, Any]] = [
    {"num_beams": 4}, {"stop_strings": ["x"]}, {"max_time": 1.0}, {"guidance_scale": 3.0},
    {"sequence_bias": {(5,): 3.0}}, {"forced_eos_token_id": 3},
    {"forced_bos_token_id": 3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 3},
    *({name: True, "return_dict_in_generate": True} for name in BESIDE_TOKENS),
]  # fmt: skip
"""Settings of `generate` that transformers' continuous batching ignores, or ends with."""


@pytest.mark.parametrize("asked", NOT_DONE, ids=str)
def test_settings_that_a_batch_does_not_heed_are_refused(model: PreTrainedModel, asked: dict[str, Any]) -> None:
    """However they are given; and the model is as before."""
    rows.enable(model, pool=pool(10), max_seq_len=100)
    options = config()
    options["generation_config"].update(**asked)
    name = next(iter(asked))
    with pytest.raises(vmmkv.UnsupportedError, match=f"asked for {name}="):
        model.generate_batch([[5] * 9], **options)
    with pytest.raises(vmmkv.UnsupportedError, match=f"asked for {name}="):
        model.init_continuous_batching(**options)
    with pytest.raises(vmmkv.ArgumentError, match=f"got ({'|'.join(asked)})="):
        model.generate_batch([[5] * 9], **config(), **asked)
    assert model.config._attn_implementation == "eager"


def test_nothing_that_a_batch_is_told_is_lost(model: PreTrainedModel) -> None:
    """What transformers would leave out without a word is refused; what says nothing new is not."""
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    lost = (
        {"nonsense": 1}, {"logits_processor": [1]}, {"temperature": 0.1}, {"do_sample": True}, {"past_key_values": [1]},
        {"stopping_criteria": [1]}, {"cache_implementation": "static"}, {"repetition_penalty": 3.0},
        {"input_ids": torch.tensor([[5]])},
    )  # fmt: skip
    for told in lost:
        with pytest.raises(vmmkv.ArgumentError, match=next(iter(told))):
            model.generate_batch([expected.prompt], **config(), **told)
    same = {"input_ids": torch.tensor([expected.prompt]), "attention_mask": torch.ones(1, len(expected.prompt))}
    results = model.generate_batch([expected.prompt], **config(), **same, do_sample=False, past_key_values=None)
    assert [result.generated_tokens for result in results.values()] == [expected.tokens]


def test_paged_generation_is_that_of_generate_or_refused(model: PreTrainedModel) -> None:
    """`generate` hands its padded tensors to `generate_batch`, which knows of no padding."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1 << 30, "pad_token_id": 0}
    ids = torch.randint(2, VOCABULARY, (2, 12))
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **options)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    assert model.generate(ids, attention_mask=mask, cache_implementation="paged", **options)[0].equal(expected)
    mask[0, :5] = 0
    with pytest.raises(vmmkv.UnsupportedError, match="an attention_mask with zeros"):
        model.generate(ids, attention_mask=mask, cache_implementation="paged", **options)
    with pytest.raises(vmmkv.UnsupportedError, match="asked for num_beams=3"):
        model.generate(ids, cache_implementation="paged", num_beams=3, **options)


@pytest.mark.parametrize("given", [True, False], ids=["by_config", "by_keyword"])
def test_paged_generation_refuses_what_it_cannot_return(model: PreTrainedModel, given: bool) -> None:
    """Before any work, however it is given. A length that `max_new_tokens` overrides is none; where nobody asks for
    one, `generate` has its own, or the model's."""

    def generate(**asked: Any) -> torch.Tensor:
        told: dict[str, Any] = {"generation_config": GenerationConfig(**asked)} if given else asked
        return model.generate(torch.tensor([[5, 6, 7]]), cache_implementation="paged", **told)

    rows.enable(model, pool=pool(100), max_seq_len=20)
    with patch.object(type(model), "generate_batch", side_effect=AssertionError):
        for name, value in (("num_return_sequences", 2), ("return_dict_in_generate", True), ("max_length", 8)):
            with pytest.raises(vmmkv.UnsupportedError, match=f"asked for {name}={value}, which generate"):
                generate(**{name: value}, do_sample=name == "num_return_sequences")
    assert generate(max_length=8, max_new_tokens=3, num_return_sequences=1).shape == (1, 1, 6)
    for length in (None, 8):
        by_default = patch.object(model.generation_config, "max_length", length)
        with by_default, pytest.raises(vmmkv.UnsupportedError, match="asked for the length by default, which generate"):
            generate(max_length=None)


@pytest.mark.parametrize("pad", [0, None])
def test_paged_generation_pads_as_generate_does(pad: int | None) -> None:
    """Answers that end before others; the last id that ends one, where there is none for padding."""
    model = copy.deepcopy(tiny_model("llama-gqa", "eager", "cpu"))
    model.generation_config.pad_token_id = pad
    (long, ends), random = ([], []), Random()
    while not ends:
        prompts = [[random.randrange(2, VOCABULARY) for _ in range(12)] for _ in range(2)]
        if (short := answer(model, prompts[0])) and (long := answer(model, prompts[1])):
            ends = [token for token in short.tokens[:-1] if token not in long.tokens]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [ends[0], 1 << 20]}
    ids = torch.tensor(prompts)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert expected[0, -1] == (ends[0] if pad is None else pad)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    assert model.generate(ids, cache_implementation="paged", **options)[0].equal(expected)
    results = model.generate_batch(prompts, GenerationConfig(**options, cache_implementation="paged"))
    assert [len(result.generated_tokens) for result in results.values()] == [short.tokens.index(ends[0]) + 1, NEW]


def test_paged_generation_says_that_a_request_failed(model: PreTrainedModel) -> None:
    """A tensor has no place for that: the answer would be a short one, or padded."""
    rows.enable(model, pool=pool(4), max_seq_len=100)
    with pytest.raises(vmmkv.VmmkvError, match="req_0 of the prompts of generate ended with an error: "):
        model.generate(torch.full((1, 60), 5), cache_implementation="paged", max_new_tokens=30, do_sample=False)


def test_generate_refuses_what_transformers_does_not_hand_on(model: PreTrainedModel) -> None:
    """Also where it is given by place; and only of continuous batching. What others have put in the place of `generate`
    stays there."""
    ids, options = torch.tensor([[5, 6, 7]]), {"generation_config": config()["generation_config"]}
    (processors := transformers.LogitsProcessorList()).append(lambda ids, scores: -scores)
    expected = model.generate(ids, options["generation_config"], processors)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    assert model.generate(ids, logits_processor=processors, **options).equal(expected)
    with pytest.raises(vmmkv.UnsupportedError, match="asked for logits_processor"):
        model.generate(ids, logits_processor=processors, cache_implementation="paged", **options)
    with pytest.raises(vmmkv.UnsupportedError, match="asked for logits_processor"):
        model.generate(ids, options["generation_config"], processors, cache_implementation="paged")
    with pytest.raises(vmmkv.UnsupportedError, match="asked for custom_generate"):
        model.generate(ids, custom_generate=print, cache_implementation="paged", **options)
    plain = transformers.LogitsProcessorList()
    assert model.generate(ids, logits_processor=plain, cache_implementation="paged", **options).shape == (1, 1, 3 + NEW)
    rows.disable(model)
    assert "generate" not in vars(model)
    model.generate = others = Mock()
    try:
        rows.enable(model, pool=pool(100), max_seq_len=100)
        assert model.generate is others
        rows.disable(model)
        assert model.generate is others
    finally:
        del model.generate


def test_generate_refuses_only_as_long_as_a_model_is_on_rows(model: PreTrainedModel) -> None:
    """Who has wrapped it calls it later, too; and one that comes back from a file refuses when it is enabled again."""
    ids = torch.tensor([[5, 6, 7]])
    options = {"cache_implementation": "paged", "generation_config": config()["generation_config"]}
    (processors := transformers.LogitsProcessorList()).append(lambda ids, scores: scores)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    kept = pickle.loads(pickle.dumps(model))
    wrapped = model.generate
    rows.disable(model)
    with patch.object(type(model), "generate", return_value="theirs"):
        assert wrapped(ids, logits_processor=processors, **options) == "theirs"
    rows.enable(kept, pool=pool(100), max_seq_len=100)
    with pytest.raises(vmmkv.UnsupportedError, match="asked for logits_processor"):
        kept.generate(ids, logits_processor=processors, **options)
    rows.disable(kept)
    assert "generate" not in vars(kept)


@pytest.mark.parametrize("container", [torch.tensor, np.array, tuple, set])
def test_generate_is_told_what_ends_a_request_in_any_container(model: PreTrainedModel, container: Any) -> None:
    ids, options = torch.tensor([[5, 6, 7]]), {"generation_config": config()["generation_config"]}
    first = int(model.generate(ids, **options)[0, 3])
    rows.enable(model, pool=pool(100), max_seq_len=100)
    answer = model.generate(ids, eos_token_id=container([first, 1 << 20]), cache_implementation="paged", **options)
    assert answer.flatten().tolist() == [5, 6, 7, first]


@pytest.mark.filterwarnings("ignore:Passing .repetition_penalty:UserWarning")
def test_processors_that_are_not_for_batches_are_refused_where_they_are_to_be_kept(model: PreTrainedModel) -> None:
    """They would see the last token of each request alone; transformers writes a line to the log."""
    rows.enable(model, pool=pool(100), max_seq_len=100)
    (expected,) = answers(model, Random(), 1)
    for keep in ({}, {"drop_unsupported_processors": False}):
        penalized = config(**keep)
        check_batch(model, [expected], **keep)
        penalized["generation_config"].repetition_penalty = 3.0
        kept = pytest.raises(vmmkv.UnsupportedError, match=r"RepetitionPenaltyLogitsProcessor .*=False")
        with kept if keep else nullcontext():
            model.generate_batch([expected.prompt], **penalized)
    assert model.config._attn_implementation == "eager"


def test_a_manager_that_is_kept_gives_nobody_anothers_results(model: PreTrainedModel) -> None:
    """Of requests before, whose results nobody has taken: who asked for them was interrupted, perhaps."""
    first, *expected = answers(model, Random(), 4)
    rows.enable(model, pool=pool(200), max_seq_len=100)
    with Served(model) as served:
        served.ask([first])
        served.manager.stop(keep_for_next_session=True)
        check_batch(model, expected, persistent_manager=True)


def test_a_manager_that_is_kept_is_not_asked_for_another_batching(model: PreTrainedModel) -> None:
    """transformers would return it, and work as it did. What is left open is as it was."""
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    options, kept = config(), {"persistent_manager": True}
    for _ in range(2):
        (result,) = model.generate_batch([expected.prompt], **options, **kept).values()
        assert result.generated_tokens == expected.tokens
    manager = model.init_continuous_batching()
    assert manager is model.init_continuous_batching(**options)
    other = config(return_logprobs=True)
    with pytest.raises(vmmkv.ArgumentError, match="return_logprobs=True of a persistent"):
        model.generate_batch([expected.prompt], **other, **kept)
    with pytest.raises(vmmkv.ArgumentError, match="return_logprobs=True of a persistent"):
        model.init_continuous_batching(**other)
    other["generation_config"].do_sample = True
    with pytest.raises(vmmkv.ArgumentError, match="do_sample=True of a persistent"):
        model.init_continuous_batching(other["generation_config"])
    options["generation_config"].update(do_sample=True)  # its caller's own, too
    with pytest.raises(vmmkv.ArgumentError, match="do_sample=True of a persistent"):
        model.generate_batch([expected.prompt], **options, **kept)


def test_a_manager_that_runs_is_neither_started_nor_warmed_up(model: PreTrainedModel) -> None:
    """Batches that are made up would take the place of requests, and callers of `generate_batch` each other's results,
    where they share a manager that is kept."""
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    model.generate_batch([expected.prompt], **config(), persistent_manager=True)
    with Served(model) as served:
        with pytest.raises(vmmkv.BusyError, match="start a manager that runs"):
            model.generate_batch([expected.prompt], **config(), persistent_manager=True)
        with pytest.raises(vmmkv.BusyError, match="warm up a manager that runs"):
            served.manager.warmup()
        served.check([expected])


def test_ids_that_end_a_request_are_in_no_order() -> None:
    ids = [None, -1, 2, [2], [2, 3], [3, 2], [3, 4]]
    means = [{-1}, {-1}, {2}, {2}, {2, 3}, {2, 3}, {3, 4}]
    for asked, wanted in zip(ids, means):
        for used, has in zip(ids, means):
            with nullcontext() if wanted == has else pytest.raises(vmmkv.ArgumentError, match="eos_token_id"):
                check_same(GenerationConfig(eos_token_id=asked), GenerationConfig(eos_token_id=used))


def test_a_request_ends_with_ids_of_any_kind(model: PreTrainedModel) -> None:
    """Those of a tensor are not compared as tensors are, each equal to itself alone; what is none is refused."""
    (expected,) = answers(model, Random(), 1)
    last = expected.tokens[3]
    until = expected.tokens[: expected.tokens.index(last) + 1]
    array = np.array([VOCABULARY, last])
    kinds = [last, [last], (last, -1), {last}, array, array[1], torch.tensor(array), torch.tensor(last)]
    rows.enable(model, pool=pool(100), max_seq_len=100)
    with Served(model) as served:
        for eos in kinds:
            served.manager.add_request(expected.prompt, eos_token_id=eos)
            (result,) = served.results(1).values()
            assert result.generated_tokens == until, eos
        for wrong in ("x", 5.5, [[5]], torch.tensor([5.0])):
            with pytest.raises(vmmkv.ArgumentError, match="got eos_token_id="):
                served.manager.add_request(expected.prompt, eos_token_id=wrong)
    options = config()
    options["generation_config"].eos_token_id = torch.tensor([last])
    (result,) = model.generate_batch([expected.prompt], **options).values()
    assert result.generated_tokens == until


def test_requests_that_would_end_all_are_refused_when_they_are_asked_for(model: PreTrainedModel) -> None:
    """One that is longer than a row, or has no tokens that the model knows; of `add_request`, and of `generate_batch`
    before any request begins. The others go on."""
    expected = answers(model, Random(), 2, most=30 - NEW)
    wrong: list[tuple[Any, int | None, type[Exception], str]] = [
        *((prompt, None, vmmkv.ArgumentError, r"got (no |)(input_ids|token)") for prompt in (
            [], [3, VOCABULARY], [-1, 3], [3.0], [[3, 4]], torch.tensor([[3, 4]]), "34", 3)),
        ([5] * 25, None, vmmkv.SequenceTooLongError, "25 tokens and 12 new ones"),
        ([5] * 9, 0, vmmkv.ArgumentError, "max_new_tokens=0; it must be 1 or more"),
    ]  # fmt: skip
    rows.enable(model, pool=pool(100), max_seq_len=30)
    for prompt, new, error, what in wrong:
        with pytest.raises(error, match=what):
            model.generate_batch([[5] * 9, prompt], max_new_tokens=new, **config())
    assert len(model.generate_batch(torch.full((2, 9), 5), persistent_manager=True, **config())) == 2
    with Served(model) as served:
        names = served.ask(expected)
        for prompt, new, error, what in wrong:
            with pytest.raises(error, match=what):
                served.manager.add_request(prompt, max_new_tokens=new)
        for name, result in served.results(2).items():
            assert result.generated_tokens == served.asked[name].tokens
        served.manager.add_request(torch.tensor(expected[0].prompt), names[0])
        assert served.results(1)[names[0]].generated_tokens == served.asked[names[0]].tokens
        name = served.manager.add_request([5] * 25, max_new_tokens=AtMost(12))
        assert len(served.results(1)[name].generated_tokens) == 5
    rows.disable(model)
    assert "generate_batch" not in vars(model)


def test_attention_is_as_before_where_nothing_was_started(model: PreTrainedModel) -> None:
    rows.enable(model, pool=pool(10))
    model.init_continuous_batching(**config()).destroy()
    assert model.config._attn_implementation == "eager"
    rows.enable(model, max_bytes=1)
    with (
        pytest.raises(vmmkv.BudgetError, match="asked for max_bytes"),
        model.continuous_batching_context_manager(**config()),
    ):
        pass
    assert model.config._attn_implementation == "eager"


def test_rows_are_those_that_were_last_asked_for(model: PreTrainedModel) -> None:
    """Also where transformers has kept a manager, with rows or with blocks."""
    blocks = config(num_blocks=50, page_size=16, max_memory_percent=0.9)
    model.generate_batch([[5] * 9], persistent_manager=True, **blocks)
    for max_seq_len in (50, 60):
        rows.enable(model, pool=pool(100), max_seq_len=max_seq_len)
        model.generate_batch([[5] * 9], persistent_manager=True, **config())
        with Served(model) as served, pytest.raises(vmmkv.SequenceTooLongError, match=f"a row is {max_seq_len}"):
            served.manager.add_request([5] * 90)
    rows.disable(model)
    with Served(model, num_blocks=50, page_size=16, max_memory_percent=0.9) as served:
        assert not isinstance(served.manager, RowManager)


def test_a_name_that_another_request_has_is_refused(model: PreTrainedModel) -> None:
    """Or one that will fork from it, until it is done: both would write into one row. The other one goes on."""
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(200), max_seq_len=300)
    by_hand = ByHand(model, num_return_sequences=2)
    manager, scheduler = by_hand.manager, by_hand.processor.scheduler

    def results(count: int) -> list[Any]:
        return [manager.get_result(timeout=0) for _ in range(count)]

    for name in ("name", "name", "name__child#0"):
        manager.add_request(expected.prompt, name)
    while not scheduler.active_requests or scheduler.active_requests["name"].generated_len() < 3:
        by_hand.step()
    manager.add_request([7] * 200, "name")
    by_hand.step()
    assert all("which another request has" in each.error for each in results(6))
    for again in (False, True):
        if again:
            manager.add_request(expected.prompt, "name")
        while by_hand.step():
            pass
        assert [each.generated_tokens for each in results(2)] == [expected.tokens] * 2
    by_hand.end()


def test_who_is_cancelled_after_it_has_forked_leaves_the_others(model: PreTrainedModel) -> None:
    (expected,) = answers(model, Random(), 1)
    rows.enable(model, pool=pool(200), max_seq_len=300)
    by_hand = ByHand(model, num_return_sequences=3)
    by_hand.manager.add_request(expected.prompt, "name")
    while len(by_hand.processor.scheduler.active_requests) < 3:
        by_hand.step()
    by_hand.manager.cancel_request("name")
    by_hand.manager.cancel_request("name__child#1")
    while by_hand.step():
        pass
    result = by_hand.manager.get_result(timeout=0)
    assert (result.request_id, result.generated_tokens) == ("name__child#0", expected.tokens)
    assert by_hand.manager.get_result(timeout=0) is None
    by_hand.end()


def test_another_attention_under_a_manager_is_refused(model: PreTrainedModel) -> None:
    rows.enable(model, pool=pool(100), max_seq_len=100)
    with Served(model) as served:
        model.set_attn_implementation("eager")
        served.manager.add_request([5] * 9)
        assert 'runs attn_implementation="eager"' in served.manager.get_result(timeout=PATIENCE).error


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"decode_compile_config": transformers.CompileConfig()}, None),  # which is mode="reduce-overhead"
        ({"varlen_compile_config": transformers.CompileConfig(mode="default", fullgraph=True)}, None),
        ({}, transformers.CompileConfig()),
    ],
    ids=["graphs", "one graph", "graphs, by the model's own config"],
)
def test_passes_that_cannot_run_on_rows_are_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], own: Any
) -> None:
    monkeypatch.setattr(model.config, "compile_config", own, raising=False)
    rows.enable(model, pool=pool(10))
    with pytest.raises(vmmkv.UnsupportedError, match=r"(forward|decode) passes"):
        model.init_continuous_batching(**config(**options))
    assert model.config._attn_implementation == "eager"


def test_models_that_cannot_run_on_rows_are_refused(model: PreTrainedModel) -> None:
    """Layers that keep something else, and positions that nobody can say: there transformers' own is wrong; wrapped
    ones, whose generate_batch is that of the model inside; and layers in several processes."""
    keeps_states = tiny_model("qwen3-next", "eager", "cpu")
    rows.enable(keeps_states, pool=pool(10))
    with pytest.raises(vmmkv.UnsupportedError, match="keeps something else"):
        keeps_states.init_continuous_batching(**config())
    assert keeps_states.config._attn_implementation == "eager"
    rows.disable(keeps_states)
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    bart, split = transformers.BartForCausalLM(transformers.BartConfig(**sizes, vocab_size=9)), copy.deepcopy(model)
    split.config.distributed_config = DistributedConfig(pp_size=2)
    for other, error, what in (
        (bart, vmmkv.UnsupportedError, "no position_ids"),
        (split, vmmkv.UnsupportedError, "layers in several processes"),
        (torch.nn.DataParallel(model), vmmkv.ArgumentError, "got DataParallel; give the PreTrainedModel inside"),
    ):
        with pytest.raises(error, match=what):
            rows.enable(other)


def test_layers_that_tell_attention_nothing_of_their_batch_are_refused() -> None:
    """As Nemotron's, since transformers 5.24."""
    states = torch.randn(1, 2, 1, 8)
    for told in ({}, {CACHE: groups.Probe()}, {"block_table": None}):
        with pytest.raises(vmmkv.UnsupportedAttentionError, match="without a batch of requests"):
            attend_rows(None, states, states, states, None, **told)


def test_layers_that_attend_more_than_once_are_refused(model: PreTrainedModel) -> None:
    """As those of models that go through them again: one row has room for the K and V of each once."""

    def again(_module: torch.nn.Module, given: tuple[Any, ...], told: dict[str, Any], output: Any) -> None:
        hook.remove()
        model.model.layers[0](*given, **told)

    hook = model.model.layers[0].register_forward_hook(again, with_kwargs=True)
    rows.enable(model, pool=pool(10))
    with pytest.raises(vmmkv.UnsupportedError, match="not each keeps K and V once"):
        model.init_continuous_batching(**config())


def test_models_that_ask_their_cache_for_more_than_rows_know_are_refused(model: PreTrainedModel) -> None:
    """As OPT since transformers 5.24. What is wrong with a model itself stays its own error."""
    rows.enable(model, pool=pool(10))
    for ask, error, what in (
        (
            lambda told: told["cache"].get_seq_length(),
            vmmkv.UnsupportedError,
            r"for more than K and V \(get_seq_length\)",
        ),
        (lambda _: model.nonsense, AttributeError, "nonsense"),
    ):
        hook = model.model.layers[0].register_forward_pre_hook(lambda *given, ask=ask: ask(given[2]), with_kwargs=True)
        with pytest.raises(error, match=what):
            model.init_continuous_batching(**config())
        hook.remove()


@pytest.mark.parametrize("family", ["BertLMHeadModel", "RobertaForCausalLM", "LlamaForCausalLM"])
def test_models_that_see_what_comes_are_refused(family: str) -> None:
    """Masked language models whose config does not say that they decode, or models that were made to: a batch has no
    mask that would show them the tokens behind."""
    kind = getattr(transformers, family)
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config_class, alike = kind.config_class, {"max_position_embeddings": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    causal = {"is_causal": True} if family == "LlamaForCausalLM" else {"is_decoder": True}
    for is_causal in (False, True):
        model = kind(config_class(**sizes, **alike, **dict.fromkeys(causal, is_causal))).eval()
        rows.enable(model, pool=pool(10))
        newer = not transformers.__version__.startswith("5.23.") and "is_decoder" in causal  # they ask a cache for more
        refused = not is_causal or newer
        with pytest.raises(vmmkv.UnsupportedError, match=None if newer else "causal") if refused else nullcontext():
            model.init_continuous_batching(**config()).destroy()


def test_positions_that_a_model_cannot_tell_apart_are_refused() -> None:
    """Some have a table of them, and some turn all that are in one batch by the longest request."""
    tiny = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    phi3 = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**tiny, original_max_position_embeddings=64, rope_parameters=longrope)
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**tiny, max_position_embeddings=100, rope_parameters=dynamic)
    )
    gpt2 = tiny_model("gpt2", "eager", "cpu")
    for model, limit, what in ((phi3, 64, "longrope"), (llama, 100, "dynamic"), (gpt2, 1024, "no rotary")):
        rows.enable(model, max_seq_len=limit)
        rows.disable(model)
        with pytest.raises(vmmkv.UnsupportedError, match=f"{what}.* up to {limit} tokens"):
            rows.enable(model, max_seq_len=limit + 1)


def test_arguments_and_versions_that_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(vmmkv.ArgumentError, match="beside a pool"):
        rows.enable(model, pool=pool(10), max_bytes="1GiB")
    with pytest.raises(vmmkv.ArgumentError, match="got pool=3"):
        rows.enable(model, pool=3)
    with pytest.raises(vmmkv.LayoutError, match="max_seq_len"):
        rows.enable(model, max_seq_len=0)
    for seconds in (-1, float("nan"), "3", None, [3]):
        with pytest.raises(vmmkv.ArgumentError, match="got idle_seconds="):
            rows.enable(model, idle_seconds=seconds)
    rows.enable(model, pool=pool(10))
    with pytest.raises(ValueError, match="page_size"):  # transformers' own
        model.init_continuous_batching(**config(page_size=1))
    assert model.config._attn_implementation == "eager"
    rows.disable(model)
    monkeypatch.setattr(batching.transformers, "__version__", "6.0.1")
    with pytest.raises(vmmkv.UnsupportedError, match=r"6\.0\.1 is not among the versions"):
        rows.enable(model)
    monkeypatch.undo()
    monkeypatch.setattr(batching.model, "their_api", _moved())
    with pytest.raises(vmmkv.UnsupportedError, match="does not use ContinuousBatchingManager any more"):
        rows.enable(model)
    assert "init_continuous_batching" not in vars(model)


def _moved() -> Any:
    """Their module, as if it had been rewritten."""

    class ContinuousMixin:
        def init_continuous_batching(self) -> None: ...

    class Moved:
        pass

    Moved.ContinuousMixin = ContinuousMixin  # type: ignore[attr-defined]
    return Moved


def test_attention_on_rows_is_for_continuous_batching_alone(model: PreTrainedModel) -> None:
    rows.enable(model, pool=pool(10))
    model.set_attn_implementation(rows.NAME)
    try:
        with pytest.raises(vmmkv.UnsupportedAttentionError, match="without a batch of requests"):
            model(torch.tensor([[3, 4]]))
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("of_another", [False, True], ids=["its own", "of another one of its config"])
@pytest.mark.parametrize("begins", [False, True], ids=["ends", "begins and ends"])
def test_a_manager_that_ends_while_its_model_generates_is_no_reason_for_other_tokens(
    model: PreTrainedModel, begins: bool, of_another: bool
) -> None:
    """As another thread's may: no mask was made that the model needs to attend by itself."""
    (expected,) = answers(model, Random(), 1)
    lent = type(model)(model.config).eval() if of_another else model
    for each in {model, lent}:
        rows.enable(each, pool=pool(10), max_seq_len=100)
    served = [] if begins else [Served(lent)]
    embeddings, layer = model.get_input_embeddings(), model.model.layers[0]

    def begin(*_: object) -> None:
        hook.remove()
        served.extend([Served(lent)] * begins)
        ending.append(layer.register_forward_pre_hook(end))

    def end(*_: object) -> None:
        ending.pop().remove()
        served[0].manager.stop()

    hook, ending = embeddings.register_forward_hook(begin), list[Any]()
    told = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(vmmkv.UnsupportedAttentionError, match="to generate while a manager runs it"):
        model.generate(torch.tensor([expected.prompt]), **told)
    if not begins:  # refused at once
        hook.remove()
        served[0].manager.stop()
    assert model.generate(torch.tensor([expected.prompt]), **told)[0, -1] == expected.tokens[0]


def test_a_transformers_without_what_is_known_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.generation.continuous_batching.cache_allocators", None)
    for name in [name for name in sys.modules if name.startswith(batching.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(vmmkv.UnsupportedError, match=r"no continuous batching that is known here .*install one of 5"):
        importlib.import_module(batching.__name__)
