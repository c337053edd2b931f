"""Rollouts of reinforcement learning: memory goes back between them, and the answers are those of `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity.batching import NEW, Answer, answer, config
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel

import vmmkv
from vmmkv.integrations import continuous_batching as rows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAGE_SIZE = 4096


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A model that is as before afterwards."""
    model = tiny_model("llama-gqa", "eager", "cpu")
    yield model
    rows.disable(model)
    assert model.config._attn_implementation == "eager"


def answers(model: PreTrainedModel, count: int, new: int = NEW) -> list[Answer]:
    """The answers to random prompts."""
    random, found = Random(), list[Answer]()
    while len(found) < count:
        if each := answer(model, [random.randrange(2, VOCABULARY) for _ in range(random.randint(5, 40))], new):
            found.append(each)
    return found


def physical(pool: vmmkv.FramePool) -> int:
    return pool.stats().physical_bytes


def make_pool(pages: int = 4000) -> vmmkv.FramePool:
    return vmmkv.FramePool(pages * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)


def check(model: PreTrainedModel, expected: list[Answer], **options: Any) -> None:
    results = model.generate_batch([each.prompt for each in expected], **config(**options)).values()
    assert [result.generated_tokens for result in results] == [each.tokens for each in expected]


def test_a_persistent_manager_gives_memory_back_behind_each_call(model: PreTrainedModel) -> None:
    """And is the same for the next call, unless that has other settings."""
    pool, expected = make_pool(), answers(model, 6)
    rows.enable(model, pool=pool, persistent=True)
    check(model, expected)
    (manager,) = rows.managers_of(model)
    for _ in range(3):
        assert physical(pool) == 0
        check(model, expected)
        assert rows.managers_of(model) == [manager]
    check(model, expected, max_batch_tokens=64)
    assert manager not in rows.managers_of(model)
    assert physical(pool) == 0


def test_weights_may_change_between_calls(model: PreTrainedModel) -> None:
    """Prefixes from before are not found then."""
    rows.enable(model, pool=make_pool(), persistent=True)
    for step in range(3):
        rows.sleep(model)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        ids = torch.randint(2, VOCABULARY, (2, 12))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        rows.disable(model)
        expected = answers(model, 3)
        rows.enable(model, pool=make_pool(), persistent=step > 0)
        check(model, expected)


def test_running_requests_go_on_after_a_sleep(model: PreTrainedModel) -> None:
    """Memory is at 0 meanwhile, and the model may be trained; then they go on."""
    pool, expected, slept, refused = make_pool(), answers(model, 5, new=100), 0, 0
    rows.enable(model, pool=pool)
    with model.continuous_batching_context_manager(**config()) as manager:
        names, done = manager.add_requests([each.prompt for each in expected], max_new_tokens=100), dict[str, Any]()
        while len(done) < len(expected):
            if slept < 4 and pool.stats().used_bytes:
                try:
                    rows.sleep(model)
                except vmmkv.BusyError:
                    refused += 1
                slept += rows.sleep(model, offload=True) > 0
                assert physical(pool) == 0
                ids = torch.randint(2, VOCABULARY, (1, 7))
                model(ids, labels=ids).loss.backward()
                model.zero_grad()
                rows.wake(model)
                rows.wake(model)
            if result := manager.get_result(timeout=0.01):
                done[result.request_id] = result
    assert slept
    assert refused
    assert [done[name].generated_tokens for name in names] == [each.tokens for each in expected]


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.001)


def test_a_manager_that_sleeps_can_be_stopped(model: PreTrainedModel) -> None:
    rows.enable(model, pool=make_pool())
    with model.continuous_batching_context_manager(**config()):
        rows.sleep(model)
    assert not rows.managers_of(model)


def test_verls_words(model: PreTrainedModel) -> None:
    rows.enable(model, pool=make_pool(), persistent=True)
    rollouts, expected = rows.Rollouts(model), answers(model, 2)
    check(model, expected)
    assert rollouts.release(tags=["kv_cache"]) == 0
    rollouts.resume(tags=["kv_cache"])
    check(model, expected)
    with pytest.raises(vmmkv.UnsupportedError, match="weights"):
        rollouts.release(tags=["weights"])


@pytest.mark.parametrize("together", [1, 4])
def test_equal_prompts_share_pages_though_they_come_at_once(model: PreTrainedModel, together: int) -> None:
    """Whether they fit into one pass or not."""
    pool, most, random = make_pool(), 0, Random()
    while not (one := answer(model, [random.randrange(2, VOCABULARY) for _ in range(300)], 8)):
        pass
    rows.enable(model, pool=pool)
    pages = -(-len(one.prompt) * kept_bytes(model) // PAGE_SIZE)
    with model.continuous_batching_context_manager(**config(max_batch_tokens=400 * together)) as manager:
        names = manager.add_requests([one.prompt] * 8, max_new_tokens=8)
        done: dict[str, Any] = {}
        while len(done) < 8:
            most = max(most, pool.stats().used_bytes // PAGE_SIZE)
            if result := manager.get_result(timeout=0.001):
                done[result.request_id] = result
    assert all(done[name].generated_tokens == one.tokens for name in names)
    assert pages <= most < 2 * pages + 8


def kept_bytes(model: Any) -> int:
    """Bytes of K and V of a token."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize


def test_a_model_of_peft_is_found(model: PreTrainedModel) -> None:
    """By the method with which PEFT gives the model inside."""
    expected, outside = answers(model, 2), SimpleNamespace(get_base_model=lambda: model)
    rows.enable(outside, pool=make_pool())
    check(model, expected)
    assert rows.sleep(outside) == 0
    rows.disable(outside)


def test_failed_requests_are_raised_where_that_was_asked_for(model: PreTrainedModel) -> None:
    rows.enable(model, pool=make_pool(8), raise_errors=True)
    with pytest.raises(vmmkv.VmmkvError, match="ended with an error"):
        model.generate_batch([[3] * 400], **config())


def test_a_thousand_sleeps_leave_memory_where_it_was(model: PreTrainedModel) -> None:
    pool = make_pool()
    rows.enable(model, pool=pool)
    with model.continuous_batching_context_manager(**config()):
        for _ in range(1000):
            rows.sleep(model)
            rows.wake(model)
        assert physical(pool) == 0
        assert len(rows.managers_of(model)) == 1


def test_equal_prompts_begin_together_once_one_is_computed(model: PreTrainedModel) -> None:
    """Not one with each pass."""
    (one,) = answers(model, 1)
    rows.enable(model, pool=make_pool())
    with model.continuous_batching_context_manager(**config(max_batch_tokens=400)) as manager:
        with manager.pause():
            names = manager.add_requests([one.prompt] * 8)
        done = {result.request_id: result for result in (manager.get_result(timeout=60) for _ in names)}
        assert manager.current_batch <= NEW + 2
    assert all(done[name].generated_tokens == one.tokens for name in names)


def test_a_request_waits_for_memory_of_another_process(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which has live tokens there, and a pool with the same budget."""
    monkeypatch.setattr("vmmkv.ledger.cache_folder", lambda: tmp_path)
    where: dict[str, Any] = {"device": "cpu", "page_size": PAGE_SIZE, "shared": "two"}
    layout, (one,) = vmmkv.KVLayout(2, 2, 16, torch.float32), answers(model, 1)
    with (
        closing(vmmkv.FramePool(40 * PAGE_SIZE, **where)) as pool,
        closing(vmmkv.FramePool(40 * PAGE_SIZE, **where)) as other,
        vmmkv.KVCache(layout, 1, 320, pool=other, lookahead=0, large_frames=False) as cache,
    ):
        held = cache.sequence(8 * 39)
        rows.enable(model, pool=pool)
        with model.continuous_batching_context_manager(**config()) as manager:
            manager.add_request(one.prompt)
            assert manager.get_result(timeout=8) is None
            held.free()
            assert manager.get_result(timeout=60).generated_tokens == one.tokens
        rows.disable(model)
