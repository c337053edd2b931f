"""Rows under continuous batching that makes a batch while the one before runs, as it does on a GPU: the same tokens as
`generate`. transformers has such batches on GPUs alone; here streams and events are there that do everything at once.
"""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
from conftest import PATIENCE, calls
from parity.batching import config
from test_continuous_batching import PAGE_SIZE, Served, answers, pool
from test_continuous_batching import model as model
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner, offloading_manager

from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching import cache
from vmmkv.integrations.batching.manager import RowManager

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class AtOnce:
    """A stream, or an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> None: ...

    wait_event = synchronize = record_event


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", AtOnce)
    monkeypatch.setattr(input_outputs, "create_device_stream", AtOnce)
    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    for module in (continuous_api, input_outputs, model_runner, offloading_manager, cache):
        monkeypatch.setattr(module, "stream_context", lambda stream: nullcontext())


@pytest.mark.parametrize("host", [0.0, 0.001], ids=["computed anew", "moved to the host"])
@pytest.mark.parametrize("model", ["llama-gqa", "gemma3"], indirect=True)
def test_more_requests_than_there_is_memory_for(model: PreTrainedModel, host: float) -> None:
    expected = answers(model, Random(), 10, most=60)
    rows.enable(model, pool=pool(30), max_seq_len=100)
    with Served(model, cpu_offload_space=host, safety_margin=0.0, use_async_batching=True) as served:
        served.check(expected)
        assert served.cache.stats().tokens == 0


def test_a_name_may_be_used_again_after_its_request_was_cancelled(model: PreTrainedModel) -> None:
    """What that one leaves goes neither to who waits for the other, nor to who begins alike."""
    several = answers(model, Random(), 4)
    rows.enable(model, pool=pool(400), max_seq_len=900)
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


def test_a_request_that_ends_in_the_batch_that_runs_needs_no_more_memory(model: PreTrainedModel) -> None:
    """For the token after its last, which transformers computes before it knows."""
    rows.enable(model, pool=pool(4), max_seq_len=300)
    with Served(model, safety_margin=0.0, use_async_batching=True) as served:
        held = 4 * PAGE_SIZE // served.manager.groups[0].layout.token_bytes
        served.manager.add_request([7] * (held - 11), max_new_tokens=12)
        assert len(served.results(1)["req_0"].generated_tokens) == 12


def test_who_is_cancelled_before_it_forks_ends_nobody_else(model: PreTrainedModel) -> None:
    """While the batch runs behind which it was to fork."""
    expected = answers(model, Random(), 2)
    rows.enable(model, pool=pool(100), max_seq_len=100)
    manager = model.init_continuous_batching(**config(use_async_batching=True, num_return_sequences=2))
    manager.batch_processor = processor = manager._create_batch_processor()
    try:
        for name, each in zip(("cancelled", "other"), expected):
            manager.add_request(each.prompt, name)
        is_first, results = True, []
        while is_first or processor.has_pending_requests():
            if processor.prepare_next_batch():
                processor._generation_step(model)
                if not is_first:
                    processor.update_batch()
            if is_first:
                manager.cancel_request("cancelled")
            is_first = False
        processor.update_batch()
        while result := manager.get_result(timeout=0):
            results.append((result.request_id, result.generated_tokens))
        tokens = expected[1].tokens
        assert sorted(results) == [("other", tokens), ("other__child#0", tokens)]
    finally:
        processor.reset()
        model.set_attn_implementation("eager")


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
