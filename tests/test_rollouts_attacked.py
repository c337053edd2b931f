"""Rollouts under several threads, callers and failures: memory goes back, nothing hangs, and no answer is wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from conftest import PATIENCE, join
from parity.batching import config
from test_continuous_batching import Served
from test_continuous_batching import check_batch as check
from test_continuous_batching import model as model
from test_rollouts import answers, make_pool, physical, train, wait_until
from tiny_models import tiny_model
from transformers import PreTrainedModel

import vmmkv
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching.scheduler import CHILD

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_one_thread_puts_to_sleep_and_another_wakes(model: PreTrainedModel) -> None:
    """The first may stop it then, and the second may not stop it in a pause, which would wait forever."""
    rows.enable(model, pool=make_pool())
    with Served(model) as served, ThreadPoolExecutor(1) as other:
        rows.sleep(model)

        def wake_and_stop() -> None:
            rows.wake(model)
            with served.manager.pause(), pytest.raises(RuntimeError, match="inside a pause"):
                served.manager.stop(timeout=0.1)

        other.submit(wake_and_stop).result(PATIENCE)
        served.manager.stop()
        assert not served.manager.is_running()


def test_many_threads_put_to_sleep_and_wake(model: PreTrainedModel) -> None:
    expected = answers(model, 4, new=60)
    rows.enable(model, pool=make_pool())
    with Served(model, cpu_offload_space=0.01) as served, ThreadPoolExecutor(3) as others:
        names = served.ask(expected, max_new_tokens=60)

        def sleep_and_wake() -> None:
            for _ in range(20):
                rows.sleep(model, offload=True)
                rows.wake(model)

        slept = [others.submit(sleep_and_wake) for _ in range(3)]
        served.check_results(names)
        for each in slept:
            each.result(PATIENCE)


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


def test_memory_that_others_took_meanwhile(model: PreTrainedModel) -> None:
    """A request of two layer groups of which one was moved comes back when it goes on."""
    two = tiny_model("gemma3", "eager", "cpu")
    expected, pool = answers(two, 3, new=60), make_pool()
    rows.enable(two, pool=pool)
    suspend, count = vmmkv.Sequence.suspend, 0

    def no_room(sequence: vmmkv.Sequence) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise vmmkv.OutOfHostMemoryError("full")
        suspend(sequence)

    def resume(sequence: vmmkv.Sequence) -> None:
        raise vmmkv.OutOfPagesError("taken", requested=1, available=0)

    try:
        with Served(two, cpu_offload_space=0.01) as served:
            names = served.ask(expected, max_new_tokens=60)
            wait_until(lambda: pool.stats().used_bytes)
            with (
                served.manager.pause(),
                patch.object(vmmkv.Sequence, "suspend", no_room),
                patch.object(vmmkv.Sequence, "resume", resume),
                pytest.raises(vmmkv.OutOfHostMemoryError),
            ):
                rows.sleep(two, offload=True)
            served.check_results(names)
    finally:
        rows.disable(two)


@pytest.mark.parametrize("children", [0, 2])
def test_what_ends_or_forks_while_it_is_away(model: PreTrainedModel, children: int) -> None:
    """As in a sleep while a batch runs behind which a request ends, or forks, that the next batch has no room for."""
    expected = answers(model, 3, new=2)
    rows.enable(model, pool=make_pool())
    options = config(cpu_offload_space=0.01, num_return_sequences=children + 1, max_batch_tokens=200)
    manager = model.init_continuous_batching(**options)
    manager.batch_processor = processor = manager._create_batch_processor()
    try:
        names = [manager.add_request(each.prompt, max_new_tokens=2) for each in expected]
        done, requests = {}, processor.cache.requests
        while not done or processor.has_pending_requests():
            if processor.prepare_next_batch():
                processor._generation_step(model)
                requests.put_all_away()
                processor.update_batch()
            while result := manager.get_result(timeout=0):
                assert result.error is None
                done[result.request_id] = result.generated_tokens
        tokens = dict(zip(names, (each.tokens for each in expected)))
        forked = {f"{name}{CHILD}{number}": tokens[name] for name in names for number in range(children)}
        assert done == tokens | forked
        assert not any(name in requests for name in done)
        assert not requests.caches[0].stats().tokens
    finally:
        processor.reset()
        model.set_attn_implementation("eager")
