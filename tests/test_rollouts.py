"""Rollouts of reinforcement learning: memory goes back between them, and the answers are those of `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import PATIENCE, soon
from parity.batching import NEW, Answer, answer, config
from test_continuous_batching import PAGE_SIZE, ByHand, Served
from test_continuous_batching import answers as answers_of
from test_continuous_batching import check_batch as check
from test_continuous_batching import model as model
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

import vmmkv
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching.requests import Requests

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


def test_running_requests_go_on_after_a_sleep(model: PreTrainedModel) -> None:
    """Memory is at 0 meanwhile, and the model may be trained; then they go on."""
    pool, expected, slept, refused = make_pool(), answers(model, 5, new=100), 0, 0
    rows.enable(model, pool=pool)
    with Served(model) as served:
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


def test_verls_words_and_a_model_of_peft(model: PreTrainedModel) -> None:
    """Which gives the model inside by a method."""
    expected, outside = answers(model, 2), SimpleNamespace(get_base_model=lambda: model)
    rows.enable(outside, pool=make_pool(), persistent=True)
    rollouts = rows.Rollouts(outside)
    check(model, expected)
    assert rollouts.release(tags=["kv_cache"]) == 0
    rollouts.resume(tags=["kv_cache"])
    check(model, expected)
    with pytest.raises(vmmkv.UnsupportedError, match="weights"):
        rollouts.release(tags=["weights"])
    assert rows.sleep(outside) == 0
    rows.disable(outside)


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


def test_failed_requests_are_raised_where_that_was_asked_for(model: PreTrainedModel) -> None:
    """And where the manager has failed before it took requests."""
    rows.enable(model, pool=make_pool(8), raise_errors=True)
    with pytest.raises(vmmkv.VmmkvError, match="ended with an error"):
        model.generate_batch([[3] * 400], **config())
    rows.enable(model, max_bytes=1, raise_errors=True)
    with pytest.raises(vmmkv.VmmkvError):
        model.generate_batch([[3] * 4], warmup=False, **config())


# ---------------------------------------------------------------------- several threads, callers and failures


def test_many_threads_put_to_sleep_and_wake(model: PreTrainedModel) -> None:
    """Also while a manager comes to its end."""
    expected = answers(model, 4, new=60)

    def sleep_and_wake() -> None:
        for _ in range(20):
            rows.sleep(model, offload=True)
            rows.wake(model)

    with Served(model, cpu_offload_space=0.01) as served, ThreadPoolExecutor(3) as others:
        names = served.ask(expected, max_new_tokens=60)
        slept = [others.submit(sleep_and_wake) for _ in range(3)]
        served.check_results(names)
        for each in slept:
            each.result(PATIENCE)
    for _ in range(30):
        with Served(model) as served, ThreadPoolExecutor(1) as other:
            stopped = other.submit(served.manager.stop)
            rows.sleep(model)
            rows.wake(model)
            stopped.result(PATIENCE)


def test_a_pause_in_a_sleep_leaves_the_model_to_who_trains_it(model: PreTrainedModel) -> None:
    """And a sleep in a pause; also when a call was refused meanwhile."""
    manager = model.init_continuous_batching(**config())
    manager.start()
    manager.stop(keep_for_next_session=True)
    with Served(model) as served:
        assert served.manager is manager
        rows.sleep(model)
        model.train()
        with manager.pause():
            train(model)
        with pytest.raises(vmmkv.BusyError):
            model.generate_batch([[3, 4]], **config())
        train(model)
        assert model.training
        rows.wake(model)
        with manager.pause():
            rows.sleep(model)
            rows.wake(model)
            train(model)
        with manager.pause():
            expected = answers(model, 2)
        served.check(expected)
    model.destroy_cached_continuous_batching_manager()


def test_a_call_that_is_refused_leaves_the_manager_awake(model: PreTrainedModel) -> None:
    """Since another caller runs it."""
    expected = answers(model, 2)
    rows.enable(model, pool=make_pool(), persistent=True)
    check(model, expected)
    with Served(model) as served:
        with pytest.raises(vmmkv.BusyError, match="start a manager"):
            check(model, expected)
        assert not served.manager.is_asleep
        served.check(expected)


@pytest.mark.parametrize("new", [3, 400])
def test_an_interrupted_call_leaves_nothing_behind(model: PreTrainedModel, new: int) -> None:
    """The interrupt comes through, though requests run, and memory goes back when they are done."""
    pool, expected = make_pool(), answers(model, 2)
    rows.enable(model, pool=pool, persistent=True)
    check(model, expected)
    (manager,) = rows.managers_of(model)
    stop = type(manager).stop
    with (
        patch.object(manager, "get_result", side_effect=KeyboardInterrupt),
        patch.object(manager, "stop", lambda timeout, **told: stop(manager, timeout=0.01, **told)),
        pytest.raises(KeyboardInterrupt),
    ):
        model.generate_batch([[5] * 20], max_new_tokens=new, **config())
    soon(lambda: not manager.is_running())
    assert physical(pool) == 0
    check(model, expected)
    assert rows.managers_of(model) == [manager]


def test_where_one_manager_cannot_sleep_none_does(model: PreTrainedModel) -> None:
    pool = make_pool()
    rows.enable(model, pool=pool)
    with Served(model) as idle, Served(model) as busy:
        busy.manager.add_request([5] * 20, max_new_tokens=400)
        soon(lambda: pool.stats().used_bytes)
        with pytest.raises(vmmkv.BusyError), patch.object(rows, "managers_of", lambda _: [idle.manager, busy.manager]):
            rows.sleep(model)
        assert not idle.manager.is_asleep


def test_a_request_waits_for_memory_of_another_process(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which has live tokens there, and a pool with the same budget."""
    monkeypatch.setattr("vmmkv.ledger.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("vmmkv.ledger.SETTLING", 0)
    monkeypatch.setattr("vmmkv.lending.PATIENCE", 0.1)
    where: dict[str, Any] = {"device": "cpu", "page_size": PAGE_SIZE, "shared": "two"}
    layout, (one,) = vmmkv.KVLayout(2, 2, 16, torch.float32), answers(model, 1)
    looks, look = list[bool](), Requests.others_hold_memory

    def others_hold_memory(requests: Requests) -> bool:
        looks.append(look(requests))
        return looks[-1]

    monkeypatch.setattr(Requests, "others_hold_memory", others_hold_memory)
    with (
        closing(vmmkv.FramePool(40 * PAGE_SIZE, **where)) as pool,
        closing(vmmkv.FramePool(40 * PAGE_SIZE, **where)) as other,
        vmmkv.KVCache(layout, 1, 320, pool=other, lookahead=0, large_frames=False) as cache,
    ):
        held = cache.sequence(8 * 39)
        rows.enable(model, pool=pool)
        with Served(model) as served:
            served.manager.add_request(one.prompt)
            while len(looks) < 20:
                assert served.manager.get_result(timeout=0.01) is None
            held.free()
            assert served.manager.get_result(timeout=PATIENCE).generated_tokens == one.tokens
        rows.disable(model)
