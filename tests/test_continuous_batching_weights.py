"""Continuous batching on rows of models whose weights or adapters change, with CUDA graphs and compiled passes."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import PATIENCE, join
from parity.batching import Answer, answer
from test_continuous_batching import Served, answers, check_batch, on_rows, pool
from test_continuous_batching import model as model
from tiny_models import VOCABULARY, WINDOW, shortened, tiny_model
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import initialization, model_runner

import vmmkv
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching import attention
from vmmkv.integrations.batching import model as kept
from vmmkv.integrations.batching.model import Weights, addresses
from vmmkv.integrations.batching.requests import Ranks, Requests
from vmmkv.integrations.stand_ins import ScaledStates

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


# ---------------------------------------------------------------------- other weights


def clear(prompts: int, *models: PreTrainedModel) -> list[list[Answer]]:
    """Answers of each model to prompts that no two of them answer alike."""
    random, found = Random(), list[list[Answer]]()
    while len(found) < prompts:
        prompt = [random.randrange(2, VOCABULARY) for _ in range(60)]
        made = [answer(each, prompt) for each in models]
        if all(made) and len({tuple(each.tokens) for each in made}) == len(models):
            found.append(made)
    return [*map(list, zip(*found))]


class Tuned(torch.nn.Module):
    """Two adapters of a model's embeddings, as PEFT has them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        embedding = model.get_input_embeddings().weight
        self.weights = torch.nn.ParameterDict(
            {name: torch.randn(embedding.shape[1]).to(embedding) for name in ("one", "other")}
        )
        self.active_adapters, self.merged_adapters, self.disable_adapters = ["one"], [], False
        self.scaling = {"one": 1.0, "other": 1.0}

    def using(self, name: str = "one", scale: float = 1.0, merged: tuple[str, ...] = ()) -> Tuned:
        """The same, of which another is used, or more, or what is merged."""
        other = copy.copy(self)
        other.active_adapters, other.scaling = [name], {**self.scaling, name: scale}
        other.merged_adapters = [*merged]
        return other

    def forward(self, _layer: object, _given: object, states: torch.Tensor) -> torch.Tensor:
        (name,) = self.merged_adapters or self.active_adapters
        return states + self.scaling[name] * states * self.weights[name]


def put_in(model: PreTrainedModel, tuned: Tuned) -> None:
    """Gives a model adapters, in the place of those that it has."""
    model.peft_config, model.tuned = {}, tuned
    layer = model.get_input_embeddings()
    layer._forward_hooks.clear()
    layer.register_forward_hook(tuned.forward)


def swap(model: PreTrainedModel) -> None:
    """Has other weights in a tensor that has been written to as often."""
    new = torch.nn.Parameter(torch.randn_like(weight := model.tuned.weights["one"]))
    for _ in range(weight._version - new._version):
        new += 0
    torch.utils.swap_tensors(weight, new)


def assign_and_write(model: PreTrainedModel) -> None:
    model.load_state_dict({name: each.data for name, each in model.state_dict().items()}, assign=True)
    model.lm_head.weight *= 2


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "weights written to": lambda model: model.lm_head.weight.mul_(2),
    "buffers, which some quantized layers have instead": lambda model: next(model.buffers()).mul_(2),
    "new tensors written to": assign_and_write,
    "an adapter written to": lambda model: model.tuned.weights["other"].mul_(2),
    "an adapter swapped": swap,
    "an adapter put in": lambda model: put_in(model, Tuned(model)),
    "an adapter taken out": lambda model: delattr(model, "tuned"),
    "another adapter": lambda model: setattr(model.tuned, "active_adapters", ["other"]),
    "another one merged": lambda model: setattr(model.tuned, "merged_adapters", ["other"]),
    "more of an adapter": lambda model: model.tuned.scaling.update(one=2.0),
    "none": lambda model: setattr(model.tuned, "disable_adapters", True),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_any_other_weights_or_adapters_have_another_key(model: PreTrainedModel, change: str) -> None:
    """Which what begins with known tokens must have, and tells no one else."""
    own = copy.deepcopy(model)
    put_in(own, Tuned(own))
    weights = Weights(own)
    before = weights.key()
    assert weights.key() == before
    CHANGES[change](own)
    assert weights.key() != before


@pytest.mark.parametrize("how", ["paused", "started again", "written to", "another adapter", "an adapter put in"])
def test_nothing_begins_with_what_other_weights_have_made(how: str) -> None:
    """Neither with what was known before, nor with what a request that runs meanwhile leaves."""
    before, after = (copy.deepcopy(tiny_model("llama-gqa", "eager", "cpu", seed)) for seed in (0, 1))
    if "adapter" in how:
        before, tuned = copy.deepcopy(after), Tuned(after)
        put_in(after, tuned)
        if how == "another adapter":
            put_in(before, tuned.using("other"))
    (old,), (new,) = clear(1, before, after)
    rows.enable(before, pool=pool(300), max_seq_len=200)
    with Served(before) as served:
        served.check([old])
        if how == "paused":
            served.manager.add_request(old.prompt, "on its way", max_new_tokens=100, streaming=True)
            assert served.manager.get_result(timeout=PATIENCE).request_id == "on its way"
            with served.manager.pause():
                before.load_state_dict(after.state_dict())
            while not served.manager.get_result(timeout=PATIENCE).is_finished():
                pass
        elif how == "started again":
            served.manager.stop(keep_for_next_session=True)
            before.load_state_dict(after.state_dict())
            served.manager.start()
        elif "adapter" in how:
            put_in(before, tuned)
        else:
            before.load_state_dict(after.state_dict())
        served.check([new])
        assert served.cache.stats().cached_tokens == (60 - 1 if how == "paused" else 0)
        served.check([new])
        assert served.cache.stats().cached_tokens > 0


ONE = Ranks(SimpleNamespace(tp_size=1, tp_local_rank=0))


def test_what_two_adapters_have_made_is_nobodys_beginning_nor_what_forks_from_it() -> None:
    ids, layout, used = torch.randint(100, (40,)).tolist(), vmmkv.KVLayout(1, 1, 64, torch.float32), ["one"]
    adapters: Any = SimpleNamespace(switches=lambda: len(used), key=lambda: used[-1])
    with vmmkv.KVCache(layout, 4, 1000, pool=pool(40)) as cache:
        requests = Requests([cache], [0], adapters, ONE, reuse=True)
        requests.begin("before", 40, ids)
        assert requests.admit("before", 0, 40, expected=40)
        used.append("other")
        assert requests.fork("before", ["child"]) == ["child"]
        used.append("one")
        requests.begin("behind", 40, ids)
        assert requests.admit("behind", 0, 40, expected=40)
        news = [requests.has_news(name, 40, is_over=True) for name in ("before", "child", "behind")]
        assert news == [False, False, True]
        requests.end_all()


@pytest.mark.parametrize("model", ["mistral"], indirect=True)
def test_a_manager_that_is_started_again_looks_where_weights_are_and_how_far_layers_attend(
    model: PreTrainedModel,
) -> None:
    """Its graphs, and its rows, are for those that were there."""
    own = copy.deepcopy(model)
    rows.enable(own, pool=pool(200), max_seq_len=200)
    for window in (WINDOW, None, 5, 50):
        own.config.sliding_window = window
        check_batch(own, answers(own, Random(), 3, most=90), persistent_manager=True)
    own.bfloat16()
    with Served(own) as served:
        served.manager.add_request([7])
        assert served.manager.get_result(timeout=PATIENCE).error is None
        assert served.cache.layout.dtype == torch.bfloat16
    rows.disable(own)


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


KIND = {"cpu": "olmo2", "cuda": "llama-gqa-wide"}


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
        monkeypatch.setattr(kept, "kernels_take", lambda *_: True)
    return request.param, sizes


def test_one_graph_serves_a_batch_size_whatever_the_lengths(captures: tuple[str, list[int]]) -> None:
    """All are captured before the first request, and twice where batches are made ahead. Batches are padded to the
    next."""
    device, sizes = captures
    model = tiny_model(KIND[device], "eager", device)
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
    model, told = tiny_model(KIND[device], "eager", device), {}
    chance = Random()
    expected = [answers(model, chance, chance.randint(2, 30), most=most) for most in (9, 60, 200)]
    expected.append(answers(model, chance, 2, begin=[7] * 1100))  # transformers tells lengths apart from 1024 on
    attend = attention.write_and_attend

    def watch(query: torch.Tensor, key: Any, value: Any, kept: Any, batch: Any, **options: Any) -> torch.Tensor:
        if batch.max_prompts:
            told.setdefault((query.shape[0], batch.rows.shape[0]), set()).add(batch.max_prompts)
        return attend(query, key, value, kept, batch, **options)

    monkeypatch.setattr("vmmkv.integrations.batching.cache.write_and_attend", watch)
    options: dict[str, Any] = {"use_cuda_graph": (True, False), "use_async_batching": ahead, "max_batch_tokens": 200}
    with on_rows(model, max_seq_len=1300), Served(model, warm=True, **options, max_requests_per_batch=100) as served:
        assert sizes == [200, 192, 128, 64] * (1 + ahead)
        for each in expected:
            served.check(each)
        assert sizes == [200, 192, 128, 64] * (1 + ahead)
    assert {tokens: prompts for (tokens, _), prompts in told.items()} == {64: {64}, 128: {100}, 192: {100}, 200: {100}}


@pytest.mark.parametrize("how", ["another adapter", "an adapter put in", "weights that moved"])
def test_graphs_are_not_replayed_with_what_a_model_had_before(captures: tuple[str, list[int]], how: str) -> None:
    """Nor what is known of prompts. Graphs of weights that have moved are made anew; of adapters there are none."""
    device, sizes = captures
    moves = how == "weights that moved"
    before, after = (copy.deepcopy(tiny_model(KIND[device], "eager", device, seed)) for seed in (0, moves))
    if not moves:
        tuned = Tuned(after)
        put_in(after, tuned.using("other"))
        if how == "another adapter":
            put_in(before, tuned)
    old, new = clear(5, before, after)
    options: dict[str, Any] = {"use_cuda_graph": (True, True), "max_batch_tokens": 64, "max_requests_per_batch": 8}
    with on_rows(before, max_seq_len=300), Served(before, warm=True, **options) as served:
        served.check(old)
        captured = len(sizes)
        if moves:
            were = [each.data for each in before.parameters()]
            with served.manager.pause():
                for each, given in zip(before.parameters(), after.parameters(), strict=True):
                    each.data = given.data
        else:
            put_in(before, after.tuned)
        served.check(new)
        assert (len(sizes) > captured) == moves
        if moves:  # and back
            served.manager.stop(keep_for_next_session=True)
            for each, given in zip(before.parameters(), were, strict=True):
                each.data = given
            served.manager.start()
            served.check(old)
        assert (captured == 0) == (how == "another adapter")


def test_batches_of_more_requests_or_tokens_than_graphs_are_for_run_without_one(
    captures: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And graphs that could not be made are not made among requests."""
    device, sizes = captures
    monkeypatch.setattr("vmmkv.integrations.batching.batches.GRAPH_SEQUENCES", 4)
    monkeypatch.setattr("vmmkv.integrations.batching.batches.MOST_TOKENS", 200)
    model = tiny_model(KIND[device], "eager", device)
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


# ---------------------------------------------------------------------- compiled forward passes


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["llama-gqa", "mistral", "gemma2", "gpt-oss"], indirect=True)
def test_compiled_passes_give_the_tokens_of_generate(model: PreTrainedModel) -> None:
    """Attention lies between compiled parts of a layer; of each kind of layers all share one program, or two."""
    programs: list[list[str]] = []

    def compile_(graph: torch.fx.GraphModule, _: object) -> Any:
        programs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    model = shortened(model)
    expected = answers(model, Random(), 6)
    compiling = transformers.CompileConfig(mode=None, backend=compile_)
    rows.enable(model, max_bytes="16MiB", max_seq_len=300)
    torch.compiler.reset()
    few: dict[str, Any] = {"max_batch_tokens": 16, "max_requests_per_batch": 4}  # each size of a batch is compiled
    with Served(model, warm=True, varlen_compile_config=compiling, decode_compile_config=compiling, **few) as served:
        served.check(expected)
    kinds = len({*(getattr(model.config, "layer_types", None) or ["full_attention"])})
    assert kinds <= sum(sum("linear" in target for target in targets) >= 2 for targets in programs) <= 8 * kinds
    torch.compiler.reset()
    rows.disable(model)


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
