"""transformers' continuous batching on rows, against `generate`: the same tokens, whatever becomes of requests.

Weights are random and large enough for attention to decide what comes; pages hold a few tokens.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from conftest import PATIENCE, calls, join, on_driver
from faulty import FaultyDriver
from parity.batching import NEW, Answer, answer, config, without_kernels
from tiny_models import LEAST_MODELS, VOCABULARY, tiny_model
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner, offloading_manager

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching import cache as row_cache
from vmmkv.integrations.batching import processor
from vmmkv.integrations.batching.batches import RowBatchesAhead, RowBatchOnBothSides
from vmmkv.integrations.batching.cache import RowCache
from vmmkv.integrations.batching.manager import RowManager
from vmmkv.integrations.batching.processor import CHILD, RowScheduler
from vmmkv.integrations.batching.requests import Requests

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAGE_SIZE = 4096
CHILDREN = [f"{CHILD}{number}" for number in range(2)]
"""In names of those that fork where a prompt is to have three answers."""
MODELS = [
    "llama-mha", "llama-gqa", "mistral", "qwen3", "gemma2", "gemma3", "gemma4", "gpt2", "gpt-oss", "deepseek-v3",
    *LEAST_MODELS,
]  # fmt: skip


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
    """A model of the test's own, which may train it, that runs on rows."""
    model = copy.deepcopy(tiny_model(getattr(request, "param", "llama-gqa"), "eager", "cpu"))
    rows.enable(model, pool=pool(400), max_seq_len=900)
    yield model
    for each in [*ByHand.made]:
        each.end()
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
    told["max_new_tokens"], several = options.pop("new", None), options.get("num_return_sequences", 1)
    results = model.generate_batch([each.prompt for each in expected], **config(**options), **told).values()
    assert [result.error for result in results] == [None] * len(expected) * several
    assert [result.generated_tokens for result in results] == [each.tokens for each in expected for _ in range(several)]


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

    def ask(self, answers: list[Answer], **options: Any) -> list[str]:
        names = self.manager.add_requests([answer.prompt for answer in answers], **options)
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

    def check_results(self, names: list[str]) -> None:
        """Waits for requests, and compares what comes with what `generate` made."""
        results = self.results(len(names))
        assert results.keys() == set(names)
        for name in names:
            assert results[name].generated_tokens == self.asked[name].tokens

    def check(self, answers: list[Answer]) -> None:
        self.check_results(self.ask(answers))


class ByHand:
    """A manager whose batches are run here, one by one, until the fixture `model` ends it."""

    made: ClassVar[list[ByHand]] = []

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.manager = model.init_continuous_batching(**config(safety_margin=0.0, **options))
        self.manager.batch_processor = self.processor = self.manager._create_batch_processor()
        self.made.append(self)

    def step(self) -> bool:
        """Runs a batch, if there is one; returns whether there was."""
        found = self.processor.prepare_next_batch()
        if found:
            self.processor._generation_step(self.manager.model)
            self.processor.update_batch()
        return bool(found)

    def finish(self) -> None:
        while self.step():
            pass

    def end(self) -> None:
        self.made.remove(self)
        self.processor.reset()
        self.manager.destroy()


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_all_kinds_of_models_give_the_tokens_of_generate(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks; nobody reads tokens that are gone."""
    monkeypatch.setenv("VMMKV_DEBUG", "1")
    expected = answers(model, Random(), 5)
    with without_kernels():
        check_batch(model, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["llama-gqa-wide", "gemma2-wide", "gpt-oss-wide"], indirect=True)
def test_kernels_give_the_tokens_of_generate(model: PreTrainedModel) -> None:
    """In the simulator, therefore few."""
    expected = answers(model, Random(), 2, most=9, new=3)
    check_batch(model, expected, max_batch_tokens=8, new=3)


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
    with Served(model) as served:
        served.check(expected)
        assert isinstance(served.manager.batch_processor.cache, RowCache)
    rows.disable(model)
    monkeypatch.setattr(RowCache, "__init__", None)
    check_batch(model, expected, num_blocks=50, page_size=16, max_memory_percent=0.9)


# ---------------------------------------------------------------------- what becomes of requests


@pytest.mark.few(2)
@pytest.mark.parametrize("host", [0.0, 0.001], ids=["computed anew", "known on the host"])
@pytest.mark.parametrize("model", ["llama-gqa", "gemma3"], indirect=True)
def test_whatever_becomes_of_requests_their_tokens_are_those_of_generate(model: PreTrainedModel, host: float) -> None:
    """Requests come, fork, and are cancelled; other users of the pool take its memory, and the driver refuses some. In
    the end all that were not cancelled have their tokens, and no memory is used."""
    random, driver = Random(), FaultyDriver(open_driver("cpu", PAGE_SIZE))
    begin = [random.randrange(2, VOCABULARY) for _ in range(20)]
    known = (
        answers(model, random, 5, most=60) + answers(model, random, 5, begin=begin) + answers(model, random, 1, most=1)
    )
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


@pytest.mark.few(6)
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


def test_what_begins_like_an_earlier_request_is_not_computed_again(model: PreTrainedModel) -> None:
    random = Random()
    begin = [random.randrange(2, VOCABULARY) for _ in range(64)]
    first, *others = answers(model, random, 5, begin=begin)
    turn = answers(model, random, 1, most=2, begin=others[0].prompt + others[0].tokens)
    with Served(model) as served:
        served.check([first])
        page = PAGE_SIZE // served.cache.layout.token_bytes
        before = served.cache.stats().cached_tokens
        served.check(others)
        assert served.cache.stats().cached_tokens - before >= len(others) * (64 // page * page)
        before = served.cache.stats().cached_tokens
        served.check(turn)  # of a chat
        assert served.cache.stats().cached_tokens - before >= (len(turn[0].prompt) - 3) // page * page


def test_nothing_is_kept_where_sharing_is_not_allowed(model: PreTrainedModel) -> None:
    expected = answers(model, Random(), 1, most=60)
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
        check_batch(model, expected, num_return_sequences=3, safety_margin=0.0)


def test_a_name_that_was_cancelled_may_be_used_again_at_once(model: PreTrainedModel) -> None:
    """Who cancels what is done already, and asks again, waits for what he has asked for."""
    first, second = answers(model, Random(), 2)
    by_hand = ByHand(model)
    manager = by_hand.manager
    for expected in (first, second):
        manager.cancel_request("chat")
        manager.add_request(expected.prompt, "chat")
        by_hand.finish()
        assert manager.get_result().generated_tokens == expected.tokens
    manager.add_request(first.prompt, "chat")
    manager.cancel_request("chat")
    assert not by_hand.step()


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
    with Served(model) as first, Served(model) as second:
        first.manager.stop()
        second.check(expected)
        assert len(model.generate_batch([expected[0].prompt], **config())) == 1
        second.check(expected)
        first.manager.start()
        second.manager.stop()
        first.check(expected)


@pytest.mark.parametrize("model", ["gpt2"], indirect=True)
def test_how_a_model_is_called_by_others_says_nothing_about_continuous_batching(model: PreTrainedModel) -> None:
    """It runs in a thread of its own, without autocast or inference mode, and drops nothing out, as in training."""
    own, expected = copy.deepcopy(model), answers(model, Random(), 2)
    for layer in own.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.5
    rows.enable(own, pool=pool(100), max_seq_len=100)
    for inference in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(inference):
            check_batch(own.train(), expected, persistent_manager=True, warmup=False)
    rows.disable(own)


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
    """With those that were to fork from it; also one that only its answer makes too long."""
    (expected,) = answers(model, Random(), 1, most=8)
    rows.enable(model, pool=pool(8), max_seq_len=300)
    with Served(model, num_return_sequences=3, safety_margin=0.0) as served:
        page, done = PAGE_SIZE // served.manager.groups[0].layout.token_bytes, list[Any]()
        served.manager.add_request([7] * (9 * page), "long", max_new_tokens=2)
        served.manager.add_request([7], "longer", max_new_tokens=9 * page)
        served.manager.add_request(expected.prompt, "short")
        while len(done) < 9:
            if (result := served.manager.get_result(timeout=1)) and result.is_finished():
                done.append(result)
    for result in done:
        if result.request_id.startswith("short"):
            assert result.generated_tokens == expected.tokens
        else:
            assert "A larger max_bytes helps" in result.error


# ---------------------------------------------------------------------- batches that are made while the one before runs


class AtOnce:
    """A stream, or an event, that does everything at once: transformers makes batches ahead on GPUs alone."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> None: ...

    wait_event = synchronize = record_event


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", AtOnce)
    for names in (vars(input_outputs), RowBatchOnBothSides.__init__.__globals__, RowBatchesAhead.__init__.__globals__):
        monkeypatch.setitem(names, "create_device_stream", AtOnce)
    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    for module in (continuous_api, input_outputs, model_runner, offloading_manager, row_cache):
        monkeypatch.setattr(module, "stream_context", lambda stream: nullcontext())


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("host", [0.0, 0.001], ids=["computed anew", "moved to the host"])
@pytest.mark.parametrize("model", ["llama-gqa", "gemma3"], indirect=True)
def test_batches_ahead_of_more_requests_than_there_is_memory_for(model: PreTrainedModel, host: float) -> None:
    expected = answers(model, Random(), 10, most=60)
    rows.enable(model, pool=pool(30), max_seq_len=100)
    with Served(model, cpu_offload_space=host, safety_margin=0.0, use_async_batching=True) as served:
        served.check(expected)
        assert served.cache.stats().tokens == 0


@pytest.mark.usefixtures("streams")
def test_a_name_may_be_used_again_while_a_batch_is_ahead(model: PreTrainedModel) -> None:
    """What that one leaves goes neither to who waits for the other, nor to who begins alike."""
    several = answers(model, Random(), 4)
    with Served(model, use_async_batching=True) as served:
        for expected in several:
            served.manager.add_request([7] * 60, "chat", max_new_tokens=800, streaming=True)
            assert served.manager.get_result(timeout=PATIENCE).request_id == "chat"
            with calls(RowManager, "_generation_loop_body") as until:
                served.manager.cancel_request("chat")
                until(lambda: not served.manager.batch_processor.has_pending_requests())
            while served.manager.get_result(timeout=0):
                pass
            served.manager.add_request(expected.prompt, "chat")
            assert served.results(1)["chat"].generated_tokens == expected.tokens


@pytest.mark.usefixtures("streams")
def test_a_request_that_ends_in_the_batch_that_runs_needs_no_more_memory(model: PreTrainedModel) -> None:
    """For the token after its last, which transformers computes before it knows."""
    rows.enable(model, pool=pool(4), max_seq_len=300)
    with Served(model, safety_margin=0.0, use_async_batching=True) as served:
        held = 4 * PAGE_SIZE // served.manager.groups[0].layout.token_bytes
        served.manager.add_request([7] * (held - 11), max_new_tokens=12)
        assert len(served.results(1)["req_0"].generated_tokens) == 12


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("model", ["llama-gqa", "gemma3"], indirect=True)
def test_requests_sleep_on_the_host_while_a_batch_is_ahead(model: PreTrainedModel) -> None:
    expected, random, slept, memory = answers(model, Random(), 6, most=60, new=60), Random(), 0, pool(400)
    rows.enable(model, pool=memory, max_seq_len=200)
    with Served(model, cpu_offload_space=0.01, use_async_batching=True) as served:
        names = served.manager.add_requests([each.prompt for each in expected], max_new_tokens=60)
        done: dict[str, Any] = {}
        while len(done) < len(names):
            if slept < 5 and memory.stats().used_bytes:
                slept += rows.sleep(model, offload=True) > 0
                assert memory.stats().used_bytes == 0
                rows.wake(model)
            if result := served.manager.get_result(timeout=random.uniform(0, 0.01)):
                done[result.request_id] = result
    assert slept
    assert [done[name].generated_tokens for name in names] == [each.tokens for each in expected]
