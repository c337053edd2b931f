"""Rollouts under several threads, callers and failures: memory goes back, nothing hangs, and no answer is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import PATIENCE, join
from parity.batching import config
from test_continuous_batching import Served
from test_rollouts import answers, check, make_pool, physical, wait_until
from test_rollouts import model as model
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

import vmmkv
from vmmkv.integrations import continuous_batching as rows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def in_thread(action: Callable[[], Any]) -> None:
    """Run an action in another thread, to its end."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    join(thread)
    if errors:
        raise errors[0]


def train(model: PreTrainedModel) -> None:
    ids = torch.randint(2, VOCABULARY, (1, 7))
    model(ids, labels=ids).loss.backward()
    model.zero_grad()


def test_one_thread_puts_to_sleep_and_another_wakes(model: PreTrainedModel) -> None:
    """The first may stop it then, and the second may not stop it in a pause, which would wait forever."""
    rows.enable(model, pool=make_pool())
    with Served(model) as served:
        rows.sleep(model)

        def wake_and_stop() -> None:
            rows.wake(model)
            with served.manager.pause(), pytest.raises(RuntimeError, match="inside a pause"):
                served.manager.stop(timeout=0.1)

        in_thread(wake_and_stop)
        served.manager.stop()
        assert not served.manager.is_running()


def test_many_threads_put_to_sleep_and_wake(model: PreTrainedModel) -> None:
    pool, expected = make_pool(), answers(model, 4, new=60)
    rows.enable(model, pool=pool)
    with Served(model, cpu_offload_space=0.01) as served:
        names, done = served.manager.add_requests([each.prompt for each in expected], max_new_tokens=60), {}

        def sleep_and_wake() -> None:
            for _ in range(20):
                rows.sleep(model, offload=True)
                rows.wake(model)

        threads = [threading.Thread(target=sleep_and_wake, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(done) < len(names):
            if result := served.manager.get_result(timeout=PATIENCE):
                done[result.request_id] = result.generated_tokens
        for thread in threads:
            join(thread)
    assert [done[name] for name in names] == [each.tokens for each in expected]


def test_a_pause_in_a_sleep_leaves_the_model_to_who_trains_it(model: PreTrainedModel) -> None:
    """And a sleep in a pause; also when a call was refused meanwhile."""
    rows.enable(model, pool=make_pool())
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
        served.check(answers_of(served, model))
    model.destroy_cached_continuous_batching_manager()


def answers_of(served: Served, model: PreTrainedModel) -> Any:
    with served.manager.pause():
        return answers(model, 2)


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
    wait_until(lambda: not manager.is_running())
    assert physical(pool) == 0
    check(model, expected)
    assert rows.managers_of(model) == [manager]


def test_where_one_manager_cannot_sleep_none_does(model: PreTrainedModel) -> None:
    pool = make_pool()
    rows.enable(model, pool=pool)
    with Served(model) as idle, Served(model) as busy:
        busy.manager.add_request([5] * 20, max_new_tokens=400)
        wait_until(lambda: pool.stats().used_bytes)
        with pytest.raises(vmmkv.BusyError), patch.object(rows, "managers_of", lambda _: [idle.manager, busy.manager]):
            rows.sleep(model)
        assert not idle.manager.is_asleep


def test_sleep_while_a_manager_comes_to_its_end(model: PreTrainedModel) -> None:
    """Of itself, or by an error."""
    rows.enable(model, pool=make_pool())
    for _ in range(30):
        with Served(model) as served:
            thread = threading.Thread(target=served.manager.stop, daemon=True)
            thread.start()
            rows.sleep(model)
            rows.wake(model)
            join(thread)


def test_a_call_without_answers_raises(model: PreTrainedModel) -> None:
    """Where its manager has failed before it took requests."""
    rows.enable(model, max_bytes=1, raise_errors=True)
    with pytest.raises(vmmkv.VmmkvError):
        model.generate_batch([[3] * 4], warmup=False, **config())


def test_a_call_with_other_settings_by_place(model: PreTrainedModel) -> None:
    expected = answers(model, 2)
    rows.enable(model, pool=make_pool(), persistent=True)
    check(model, expected)
    told = config(max_batch_tokens=64)
    results = model.generate_batch([each.prompt for each in expected], *told.values())
    assert [result.generated_tokens for result in results.values()] == [each.tokens for each in expected]
