"""The serving engine: every backend generates what a model without any cache would, and gives everything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from conftest import ROUNDS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.batching import shape_of
from benchmarks.engine.attention import Attend, Batch, Write
from benchmarks.engine.engine import BACKENDS, Engine
from benchmarks.engine.model import Angles, Config, Model, random_model, rotate
from benchmarks.engine.run import Run
from vmmkv import KVLayout

CPU = torch.device("cpu")
RNG = np.random.default_rng()
VOCABULARY = 97
GPU_CONFIG = Config(VOCABULARY, 256, 256, 4, 8, 2, 64)
"""4 KiB a token in float32."""
KINDS = {
    "Llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "Qwen3": {"tie_word_embeddings": True},
}


def reference_model(kind: str, device: torch.device) -> transformers.PreTrainedModel:
    """A random model of transformers. On a GPU its tokens are so large that pages are few."""
    gpu = device.type == "cuda"
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4 if gpu else 2,
        "num_attention_heads": 16 if gpu else 4,
        "num_key_value_heads": 8 if gpu else 2,
        "head_dim": 64 if gpu else 8,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **KINDS[kind], initializer_range=0.2)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval().to(device)


def same_model(reference: transformers.PreTrainedModel) -> Model:
    """The engine's model with the same weights."""
    config = shape_of(reference.config)
    tensors = reference.state_dict()

    def read(*names: str) -> torch.Tensor:
        return torch.cat([tensors[f"model.{name}.weight"] for name in names])

    weights = {"embed": read("embed_tokens"), "norm": read("norm"), "lm_head": tensors["lm_head.weight"]}
    for layer in range(config.num_layers):
        at, attention = f"layers.{layer}", f"layers.{layer}.self_attn"
        weights[f"{layer}.input_norm"] = read(f"{at}.input_layernorm")
        weights[f"{layer}.post_norm"] = read(f"{at}.post_attention_layernorm")
        weights[f"{layer}.qkv"] = read(*(f"{attention}.{name}_proj" for name in "qkv"))
        weights[f"{layer}.o"] = read(f"{attention}.o_proj")
        weights[f"{layer}.gate_up"] = read(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
        weights[f"{layer}.down"] = read(f"{at}.mlp.down_proj")
        if config.qk_norm:
            norms = zip("qk", (config.num_heads, config.num_kv_heads))
            weights[f"{layer}.qk_norm"] = torch.cat([read(f"{attention}.{n}_norm").expand(c, -1) for n, c in norms])
    return Model(config, weights, 512)


Logits = Callable[[torch.Tensor], torch.Tensor]
"""Of tokens `[tokens]`, `[tokens, vocab_size]`, without any cache."""


@torch.inference_mode()
def check_greedy(logits: Logits, prompts: list[torch.Tensor], run: Run) -> None:
    """Every token is the likeliest behind those before it, or as likely as rounding can tell."""
    for request, prompt in enumerate(prompts):
        output = torch.tensor(run.output(request))
        found = logits(torch.cat([prompt, output]))[len(prompt) - 1 : -1].cpu()
        chosen = found.gather(1, output.unsqueeze(1)).squeeze(1)
        assert (found.amax(1) - chosen).max() < 1e-3, f"request {request}: {output.tolist()}"


def logits_without_cache(model: Model) -> Logits:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: Angles) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in (rotate(q, angles), rotate(k, angles), v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    return lambda tokens: model.logits(model.forward(tokens, torch.arange(len(tokens)), attend))


def random_seed() -> int:
    return int(RNG.integers(2**31))


def random_requests(count: int, longest: int, most: int) -> tuple[list[torch.Tensor], list[int]]:
    prompts = [torch.from_numpy(RNG.integers(0, VOCABULARY, size)) for size in RNG.integers(1, longest + 1, count)]
    return prompts, RNG.integers(most // 2, most + 1, count).tolist()


def check_nothing_is_kept(engine: Engine, backend: str) -> None:
    kv = engine.kv
    if backend == "vmm":
        kv.cache.check()
        assert kv.cache.stats().rows["live"] == 0
        kv.give_back()
        assert kv.physical_bytes() == 0
    else:
        kv.give_back()
        assert len(kv.free_rows) == len(set(kv.free_rows)) > 0
    if backend == "paged":
        assert sorted(kv.free_blocks.tolist()) == list(range(kv.num_free))
        assert kv.num_free == kv.pool.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_transformers(kind: str, device: str) -> None:
    """With the same weights it has the same logits, without a cache, and so have rows and blocks on any device."""
    reference = reference_model(kind, torch.device(device))
    model = same_model(reference)
    layout = KVLayout(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim, torch.float32)
    page = 2 << 20 if device == "cuda" else 16 * layout.token_bytes
    page_tokens = page // layout.token_bytes
    prompts, outputs = random_requests(9, 2 * page_tokens, page_tokens)
    for backend in BACKENDS:
        engine = Engine(model, backend, 9 * page, 5, 4 * page_tokens, 10_000, chunk=page_tokens + 5)
        run = engine.run(prompts, outputs)
        check_greedy(lambda tokens: reference(tokens.to(device).unsqueeze(0)).logits[0], prompts, run)
        check_run(run, outputs)
        assert max(run.running) <= 5
        check_nothing_is_kept(engine, backend)
        engine.close()


def check_run(run: Run, outputs: list[int]) -> None:
    assert run.finished == len(outputs)
    assert run.generated == sum(outputs)
    assert (run.first <= run.finish).all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int]:
    """Prompts, outputs, blocks of the pool, sequences, chunk."""
    prompts = draw(st.lists(st.integers(1, 80), min_size=1, max_size=12))
    outputs = draw(st.lists(st.integers(1, 60), min_size=len(prompts), max_size=len(prompts)))
    least = -(-max(map(sum, zip(prompts, outputs))) // 16)
    blocks = draw(st.integers(least, 3 * least))
    return prompts, outputs, blocks, draw(st.integers(1, 6)), draw(st.integers(1, draw(st.sampled_from([8, 64, 200]))))


def related_ids(counts: list[int]) -> list[np.ndarray]:
    """Token ids of requests, each of which begins as long as it likes like one before it."""
    found = [RNG.integers(0, VOCABULARY, counts[0])]
    for count in counts[1:]:
        other = found[RNG.integers(len(found))]
        common = other[: RNG.integers(len(other) + 1)][:count]
        found.append(np.concatenate([common, RNG.integers(0, VOCABULARY, count - len(common))]))
    return found


def tiny_model() -> Model:
    return random_model(Config(VOCABULARY, 64, 64, 2, 4, 2, 16), 256, CPU, torch.float32, random_seed())


CAPTURING = "graph_pool_handle", "synchronize", "CUDAGraph", "graph"


class WithGraphs(Engine):
    """Has graphs without a GPU: what would be captured is run again. Attention is our kernels', in the simulator, or
    torch's, which knows of a batch what they know."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.use_graphs = self.use_prompt_graphs = True
        if "attention" not in options:
            self.write = partial(write_from_device, self.write)
            self.attention = partial(attend_from_device, self.attention)

    def _capture(self) -> None:
        with mock.patch.multiple(torch.cuda, **dict.fromkeys(CAPTURING, mock.DEFAULT)):
            super()._capture()

    def _graph_of(self, function: Callable[[int], None], size: int, pool: Any) -> Any:
        super()._graph_of(function, size, pool)
        return SimpleNamespace(replay=partial(function, size))


def write_from_device(write: Write, *args: Any) -> torch.Tensor:
    *new, batch = args
    return write(*new, on_host(batch))


def attend_from_device(attend: Attend, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What nobody computes is no number."""
    out = torch.full_like(q, torch.nan)
    if tokens := int(batch.cu_seqlens[-1]):
        out[:tokens] = attend(layer, q, on_host(batch))
    return out


def on_host(batch: Batch) -> Batch:
    """What the device knows of a batch, without what pads it."""
    counts = batch.cu_seqlens.diff()
    live = counts > 0
    assert (batch.seq_lens == (batch.starts + counts) * live).all()
    assert (counts > 1).sum() <= batch.prompts
    assert batch.prompts or (counts == live).all()
    return replace(batch, host=torch.stack([batch.rows, batch.starts, counts])[:, live].long().numpy())


@pytest.mark.simulator
@pytest.mark.parametrize("backend", ["vmm", "paged"])
def test_our_kernels_serve_padded_batches(backend: str) -> None:
    """What captured graphs do on a GPU, here in the simulator."""
    model = random_model(Config(VOCABULARY, 64, 64, 1, 2, 1, 64), 64, CPU, torch.float32, random_seed())
    prompts, outputs = random_requests(2, 4, 3)
    engine = WithGraphs(model, backend, 1 << 17, 3, 32, 100, attention="numba", chunk=6)
    check_greedy(logits_without_cache(model), prompts, engine.run(prompts, outputs))


FULL = [15] * 4, [30] * 4, 8, 4, 60
"""A batch for which there is not enough room; its prompts fill the largest graph, and all are sampled behind."""


@pytest.mark.parametrize("backend", ["vmm", "paged", "vmm, reuse", "paged, reuse"])
@given(batch=batches(), wait=st.booleans(), late=st.booleans(), graphs=st.booleans())
@example(batch=FULL, wait=False, late=False, graphs=True)
@settings(max_examples=4 * ROUNDS)
def test_any_batch_has_the_tokens_that_it_had_without_a_cache(
    backend: str, batch: tuple[list[int], list[int], int, int, int], wait: bool, late: bool, graphs: bool
) -> None:
    """In each way to serve it, also when what others have computed is there already."""
    sizes, outputs, blocks, max_sequences, chunk = batch
    name, _, beside = backend.partition(", ")
    model, prompts = tiny_model(), list(map(torch.from_numpy, related_ids(sizes)))
    max_tokens = sum(sizes) + sum(outputs) + len(sizes)
    engine = (WithGraphs if graphs else Engine)(
        model,
        name,
        blocks * 16 * 512,  # 512 bytes a token
        max_sequences,
        140,
        max_tokens,
        chunk=chunk,
        reuse=beside == "reuse",
        late=late,
    )
    engine.tokens[max_tokens] = 1
    for _ in range(2):
        run = engine.run(prompts, outputs, wait=wait)
        check_greedy(logits_without_cache(model), prompts, run)
        check_run(run, outputs)
        assert run.preemptions > 0 or batch != FULL or engine.reuse  # prompts may be alike
        assert engine.tokens[max_tokens] == 1, "padding has written where it reads"
    check_nothing_is_kept(engine, name)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu_all_backends_and_graphs_agree_in_bf16(head_dim: int) -> None:
    device = torch.device("cuda")
    model = random_model(
        Config(VOCABULARY, 256, 512, 4, 8, 2, head_dim, True), 2048, device, torch.bfloat16, random_seed()
    )
    prompts, outputs = random_requests(40, 700, 40)
    found = []
    for backend, graphs in (("vmm", True), ("paged", True), ("vmm", False)):
        engine = Engine(model, backend, 256 << 20, 40, 1024, 100_000, chunk=512, graphs=graphs)
        run = engine.run(prompts, outputs)
        assert bool(engine.graphs) == bool(engine.prompt_graphs) == graphs
        assert run.preemptions == 0
        check_nothing_is_kept(engine, backend)
        engine.close()
        found.append([run.output(request) for request in range(len(prompts))])
    rows, paged, ungraphed = found
    assert [request for request in range(len(prompts)) if rows[request] != paged[request]] == []
    # Without graphs batches are not padded, and matrix products round otherwise: sooner or later tokens differ.
    assert np.mean([one[:2] == other[:2] for one, other in zip(rows, ungraphed)]) > 0.8


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_reuse_finds_what_others_have_computed(backend: str) -> None:
    """With graphs, and the host a step ahead. A page holds 512 tokens."""
    model = random_model(GPU_CONFIG, 2048, torch.device("cuda"), torch.float32, random_seed())
    system = torch.from_numpy(RNG.integers(0, VOCABULARY, 1100))
    prompts = [torch.cat([system, prompt]) for prompt in random_requests(12, 300, 1)[0]]
    engine = Engine(model, backend, 12 * 2 << 20, 6, 2048, 40_000, chunk=700, reuse=True, late=True)
    run = engine.run(prompts, RNG.integers(100, 300, len(prompts)).tolist())
    logits = logits_without_cache(model)
    check_greedy(lambda tokens: logits(tokens.cuda()), prompts, run)
    assert run.finished == len(prompts)
    assert (run.cached[2:] >= 1024).all()
    check_nothing_is_kept(engine, backend)
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_room_is_refused(backend: str) -> None:
    engine = Engine(tiny_model(), backend, 10 * 16 * 512, 4, 160, 200)
    with pytest.raises(ValueError, match="no room"):
        engine.run([torch.zeros(150, dtype=torch.int64)], [11])
    with pytest.raises(ValueError, match="max_tokens"):
        engine.run([torch.zeros(90, dtype=torch.int64)] * 2, [11, 11])
    assert engine.run([torch.zeros(149, dtype=torch.int64)], [11]).finished == 1
