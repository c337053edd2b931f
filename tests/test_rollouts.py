"""Rollouts of reinforcement learning: memory goes back between them, and the answers are those of `generate`."""

from __future__ import annotations

import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity.batching import NEW, Answer, answer, config
from test_continuous_batching import PAGE_SIZE, ByHand, Served
from test_continuous_batching import answers as answers_of
from test_continuous_batching import check_batch as check
from test_continuous_batching import model as model
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

import vmmkv
from vmmkv.integrations import continuous_batching as rows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def answers(model: PreTrainedModel, count: int, new: int = NEW) -> list[Answer]:
    return answers_of(model, Random(), count, new=new)


def train(model: PreTrainedModel) -> None:
    ids = torch.randint(2, VOCABULARY, (1, 7))
    model(ids, labels=ids).loss.backward()
    model.zero_grad()


def physical(pool: vmmkv.FramePool) -> int:
    return pool.stats().physical_bytes


def make_pool(pages: int = 4000) -> vmmkv.FramePool:
    return vmmkv.FramePool(pages * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)


def test_a_persistent_manager_gives_memory_back_behind_each_call(model: PreTrainedModel) -> None:
    """And is the same for the next call, unless that has other settings, by name or by place."""
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
    results = model.generate_batch([each.prompt for each in expected], *config(max_batch_tokens=48).values())
    assert [result.generated_tokens for result in results.values()] == [each.tokens for each in expected]
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


def test_running_requests_sleep_on_the_host(model: PreTrainedModel) -> None:
    """Memory is at 0 meanwhile, and the model may be trained; then they go on."""
    pool, expected, slept, refused = make_pool(), answers(model, 5, new=100), 0, 0
    rows.enable(model, pool=pool)
    with Served(model, cpu_offload_space=0.01) as served:
        names, done = served.ask(expected, max_new_tokens=100), dict[str, Any]()
        while len(done) < len(names):
            if slept < 4 and pool.stats().used_bytes:
                try:
                    rows.sleep(model)
                except vmmkv.BusyError:
                    refused += 1
                slept += rows.sleep(model, offload=True) > 0
                assert physical(pool) == 0
                train(model)
                rows.wake(model)
                rows.wake(model)
            if result := served.manager.get_result(timeout=0.01):
                done[result.request_id] = result.generated_tokens
    assert slept
    assert refused
    assert done == {name: served.asked[name].tokens for name in names}


def test_without_host_memory_requests_go_on(model: PreTrainedModel) -> None:
    pool, expected = make_pool(), answers(model, 5, new=60)
    rows.enable(model, pool=pool)
    with Served(model) as served:
        names = served.ask(expected, max_new_tokens=60)
        wait_until(lambda: pool.stats().used_bytes)
        with pytest.raises(vmmkv.VmmkvError, match="host"):
            rows.sleep(model, offload=True)
        served.check_results(names)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.001)


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
    """Whether they fit into one pass or not. Once one is computed, all others begin together."""
    pool, most, random = make_pool(), 0, Random()
    while not (one := answer(model, [random.randrange(2, VOCABULARY) for _ in range(300)], 8)):
        pass
    rows.enable(model, pool=pool)
    by_hand = ByHand(model, max_batch_tokens=400 * together)
    for _ in range(8):
        by_hand.manager.add_request(one.prompt, max_new_tokens=8)
    steps = 0
    while by_hand.step():
        steps, most = steps + 1, max(most, pool.stats().used_bytes // PAGE_SIZE)
    assert steps <= 8 + 2
    results = [by_hand.manager.get_result(timeout=0) for _ in range(8)]
    assert all(result.generated_tokens == one.tokens for result in results)
    (cache,) = by_hand.processor.cache.kv_caches
    pages = -(-len(one.prompt) * cache.layout.token_bytes // PAGE_SIZE)
    assert pages <= most < 2 * pages + 8
    by_hand.end()


def test_a_model_of_peft_is_found(model: PreTrainedModel) -> None:
    """By the method with which PEFT gives the model inside."""
    expected, outside = answers(model, 2), SimpleNamespace(get_base_model=lambda: model)
    rows.enable(outside, pool=make_pool())
    check(model, expected)
    assert rows.sleep(outside) == 0
    rows.disable(outside)


def test_failed_requests_are_raised_where_that_was_asked_for(model: PreTrainedModel) -> None:
    """And where the manager has failed before it took requests."""
    rows.enable(model, pool=make_pool(8), raise_errors=True)
    with pytest.raises(vmmkv.VmmkvError, match="ended with an error"):
        model.generate_batch([[3] * 400], **config())
    rows.enable(model, max_bytes=1, raise_errors=True)
    with pytest.raises(vmmkv.VmmkvError):
        model.generate_batch([[3] * 4], warmup=False, **config())
