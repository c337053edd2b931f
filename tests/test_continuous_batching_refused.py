"""What continuous batching on rows refuses, by name, before it could end or change other requests."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
import threading
from contextlib import nullcontext
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import transformers
from conftest import PATIENCE, calls, join
from parity.batching import NEW, config
from test_continuous_batching import CHILDREN, ByHand, Served, answers, check_batch, pool
from test_continuous_batching import model as model
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import vmmkv
from vmmkv.integrations import batching
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching.attention import attend_rows
from vmmkv.integrations.batching.manager import RowManager
from vmmkv.integrations.batching.model import CACHE, Probe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_a_request_that_nobody_would_answer_is_refused(model: PreTrainedModel) -> None:
    """After a stop, and after an error in a forward pass; until the next start."""
    (expected,) = answers(model, Random(), 1)
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
    {"output_scores": True}, {"output_hidden_states": True},
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
    """What transformers would leave out without a word is refused."""
    (expected,) = answers(model, Random(), 1)
    lost = (
        {"nonsense": 1}, {"logits_processor": [1]}, {"temperature": 0.1}, {"do_sample": True}, {"past_key_values": [1]},
        {"stopping_criteria": [1]}, {"cache_implementation": "static"}, {"repetition_penalty": 3.0},
        {"input_ids": torch.tensor([[5]])}, {"attention_mask": torch.tensor([[0]])},
    )  # fmt: skip
    for told in lost:
        with pytest.raises(vmmkv.ArgumentError, match=next(iter(told))):
            model.generate_batch([expected.prompt], **config(), **told)
    results = model.generate_batch([expected.prompt], **config(), past_key_values=None)
    assert [result.generated_tokens for result in results.values()] == [expected.tokens]


def test_generate_does_not_run_continuous_batching(model: PreTrainedModel) -> None:
    """It would drop arguments; and only as long as the model is on rows, also once it was saved. A `generate` of others
    stays."""
    ids, options = torch.tensor([[5, 6, 7]]), {"generation_config": config()["generation_config"]}
    expected = model.generate(ids, **options)
    for _ in range(2):
        rows.enable(model, pool=pool(100), max_seq_len=100)
    assert model.generate(ids, **options).equal(expected)
    kept, wrapped = pickle.loads(pickle.dumps(model)), model.generate
    rows.enable(kept, pool=pool(100), max_seq_len=100)
    for each in (model, kept):
        with pytest.raises(vmmkv.UnsupportedError, match="call generate_batch"):
            each.generate(ids, cache_implementation="paged", **options)
        rows.disable(each)
        assert "generate" not in vars(each)
    with patch.object(type(model), "generate", return_value="theirs"):
        assert wrapped(ids, cache_implementation="paged", **options) == "theirs"
    kept.generate = others = Mock()
    rows.enable(kept, pool=pool(100), max_seq_len=100)
    assert kept.generate is others
    rows.disable(kept)
    assert kept.generate is others


@pytest.mark.filterwarnings("ignore:Passing .repetition_penalty:UserWarning")
def test_processors_that_are_not_for_batches_are_refused_where_they_are_to_be_kept(model: PreTrainedModel) -> None:
    """They would see the last token of each request alone; transformers writes a line to the log."""
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
    with Served(model) as served:
        served.ask([first])
        served.manager.stop(keep_for_next_session=True)
        check_batch(model, expected, persistent_manager=True)


def test_a_manager_that_is_kept_is_not_asked_for_another_batching(model: PreTrainedModel) -> None:
    """transformers would return it, and work as it did: another one is made. What is left open is as it was."""
    (expected,) = answers(model, Random(), 1)
    options, kept = config(), {"persistent_manager": True}
    for _ in range(2):
        (result,) = model.generate_batch([expected.prompt], **options, **kept).values()
        assert result.generated_tokens == expected.tokens
    manager = model.init_continuous_batching()
    assert manager is model.init_continuous_batching(**options)
    model.generate_batch([expected.prompt], **config(return_logprobs=True), **kept)
    assert (other := model.init_continuous_batching()) is not manager
    options["generation_config"].update(temperature=0.5, do_sample=True)  # its caller's own, too
    model.generate_batch([expected.prompt], options["generation_config"], **kept)
    assert model.init_continuous_batching() is not other
    assert model.init_continuous_batching().generation_config.do_sample


def test_a_manager_that_runs_is_neither_started_nor_warmed_up(model: PreTrainedModel) -> None:
    """Batches that are made up would take the place of requests, and callers of `generate_batch` each other's results,
    where they share a manager that is kept."""
    (expected,) = answers(model, Random(), 1)
    model.generate_batch([expected.prompt], **config(), persistent_manager=True)
    with Served(model) as served:
        with pytest.raises(vmmkv.BusyError, match="start a manager that runs"):
            model.generate_batch([expected.prompt], **config(), persistent_manager=True)
        with pytest.raises(vmmkv.BusyError, match="warm up a manager that runs"):
            served.manager.warmup()
        served.check([expected])


def test_a_request_ends_with_ids_of_any_kind(model: PreTrainedModel) -> None:
    """Those of a tensor are not compared as tensors are, each equal to itself alone; what is none is refused."""
    (expected,) = answers(model, Random(), 1)
    last = expected.tokens[3]
    until = expected.tokens[: expected.tokens.index(last) + 1]
    kinds = [last, (last, -1), {last}, np.array([VOCABULARY, last]), torch.tensor([last]), torch.tensor(last)]
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
        *((prompt, None, vmmkv.ArgumentError, r"got (input_ids|token)|prompt is empty") for prompt in (
            [], [3, VOCABULARY], [-1, 3], [3.0], [[3, 4]], torch.tensor([[3, 4]]), "34", 3)),
        ([5] * 19, None, vmmkv.SequenceTooLongError, "19 tokens and 12 new ones"),
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
            with pytest.raises(error, match=what):  # all or none
                served.manager.add_requests([expected[0].prompt, prompt], max_new_tokens=new)
        for name, result in served.results(2).items():
            assert result.generated_tokens == served.asked[name].tokens
        served.manager.add_request(torch.tensor(expected[0].prompt), names[0])
        assert served.results(1)[names[0]].generated_tokens == served.asked[names[0]].tokens
    rows.disable(model)
    assert "generate_batch" not in vars(model)


def test_rows_are_those_that_were_last_asked_for(model: PreTrainedModel) -> None:
    """Also where transformers has kept a manager, with rows or with blocks."""
    rows.disable(model)
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
        by_hand.finish()
        assert [each.generated_tokens for each in results(2)] == [expected.tokens] * 2


def test_another_attention_under_a_manager_is_refused(model: PreTrainedModel) -> None:
    with Served(model) as served:
        model.set_attn_implementation("eager")
        served.manager.add_request([5] * 9)
        assert 'runs attn_implementation="eager"' in served.manager.get_result(timeout=PATIENCE).error


def check_refused(model: Any, error: type[Exception], what: str | None, **options: Any) -> None:
    """Looks whether a manager of a model is refused, and the model as before."""
    rows.enable(model, pool=pool(10))
    with pytest.raises(error, match=what):
        model.init_continuous_batching(**config(**options))
    assert model.config._attn_implementation != rows.NAME
    rows.disable(model)


def test_passes_that_cannot_run_on_rows_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs, or as one graph, by the options or the model's own config."""
    graphs = transformers.CompileConfig()  # which is mode="reduce-overhead"
    whole = transformers.CompileConfig(mode="default", fullgraph=True)
    for options in ({"decode_compile_config": graphs}, {"varlen_compile_config": whole}):
        check_refused(model, vmmkv.UnsupportedError, r"(forward|decode) passes", **options)
    monkeypatch.setattr(model.config, "compile_config", graphs, raising=False)
    check_refused(model, vmmkv.UnsupportedError, r"(forward|decode) passes")


def test_models_that_cannot_run_on_rows_are_refused(model: PreTrainedModel) -> None:
    """Layers that keep something else, that attend more than once, or ask a cache for more, as OPT since transformers
    5.24; positions that nobody can say; wrapped models; and layers in several processes. Other errors stay."""
    check_refused(tiny_model("qwen3-next", "eager", "cpu"), vmmkv.UnsupportedError, "keeps something else")
    layer = model.model.layers[0]

    def again(_module: torch.nn.Module, given: tuple[Any, ...], told: dict[str, Any], output: Any) -> None:
        hook.remove()
        layer(*given, **told)

    hook = layer.register_forward_hook(again, with_kwargs=True)
    check_refused(model, vmmkv.UnsupportedError, "not each keeps K and V once")
    asks = re.escape("for more than K and V (get_seq_length)")
    for ask, error, what in (
        (lambda told: told["cache"].get_seq_length(), vmmkv.UnsupportedError, asks),
        (lambda _: model.nonsense, AttributeError, "nonsense"),
    ):
        hook = layer.register_forward_pre_hook(lambda *given, ask=ask: ask(given[2]), with_kwargs=True)
        check_refused(model, error, what)
        hook.remove()
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


def test_attention_on_rows_is_for_batches_of_requests_alone() -> None:
    """Some layers tell attention nothing of their batch, as Nemotron's since transformers 5.24."""
    states = torch.randn(1, 2, 1, 8)
    for told in ({}, {CACHE: Probe()}, {"block_table": None}):
        with pytest.raises(vmmkv.UnsupportedAttentionError, match="without a batch of requests"):
            attend_rows(None, states, states, states, None, **told)


@pytest.mark.parametrize("family", ["BertLMHeadModel", "LlamaForCausalLM"])
def test_models_that_see_what_comes_are_refused(family: str) -> None:
    """Masked language models whose config does not say that they decode, or models that were made to see it."""
    kind = getattr(transformers, family)
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "pad_token_id": 0}
    causal = "is_causal" if family == "LlamaForCausalLM" else "is_decoder"
    newer = not transformers.__version__.startswith("5.23.") and causal == "is_decoder"  # they ask a cache for more
    for is_causal in (False, True):
        made = kind(kind.config_class(**sizes, num_hidden_layers=1, **{causal: is_causal})).eval()
        if is_causal and not newer:
            rows.enable(made, pool=pool(10), max_seq_len=64)
            made.init_continuous_batching(**config()).destroy()
        else:
            check_refused(made, vmmkv.UnsupportedError, None if newer else "causal")


def test_positions_that_a_model_cannot_tell_apart_are_refused() -> None:
    """Some have a table of them, and some turn all that are in one batch by the longest request."""
    tiny = {"vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    sizes = {"original_max_position_embeddings": 64, "rope_parameters": longrope}
    phi3 = transformers.Phi3ForCausalLM(transformers.Phi3Config(**tiny, **sizes))
    sizes = {"max_position_embeddings": 100, "rope_parameters": dynamic}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny, **sizes))
    gpt2 = tiny_model("gpt2", "eager", "cpu")
    for each, limit, what in ((phi3, 64, "longrope"), (llama, 100, "dynamic"), (gpt2, 1024, "no rotary")):
        rows.enable(each, max_seq_len=limit)
        rows.disable(each)
        with pytest.raises(vmmkv.UnsupportedError, match=f"{what}.* up to {limit} tokens"):
            rows.enable(each, max_seq_len=limit + 1)


def test_arguments_and_versions_that_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a pool has its own"):
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
    assert "init_continuous_batching" not in vars(model)


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
