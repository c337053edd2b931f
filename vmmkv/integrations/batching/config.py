"""What a `ContinuousBatchingConfig` means on rows; checks of requests, since errors in a batch end all of them; and
`with_names`, by which parts of transformers are replaced."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper
from transformers.generation.continuous_batching.initialization import resolve_compile_configs

from ...errors import ArgumentError, SequenceTooLongError, UnsupportedError

OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of `torch.compile` that capture CUDA graphs
SAFETY_MARGIN = 0.05
"""The share of memory that new requests leave to those that grow, in the "fifo" scheduler; transformers: 0.15."""
ALIKE = (
    "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing", "scheduler_type", "safety_margin",
    "use_async_batching", "use_cuda_graph",
)  # fmt: skip
"""Settings that decide which forward passes there are, and of what shape."""


def with_defaults(config: Any, device: torch.device) -> Any:
    """A copy of a `ContinuousBatchingConfig`, with the defaults of rows."""
    config, on_gpu = copy.deepcopy(config), device.type == "cuda"
    defaults = {"use_cuda_graph": (on_gpu, on_gpu), "use_async_batching": on_gpu, "max_memory_percent": 0.8}
    if config.scheduler_type == "fifo":
        defaults["safety_margin"] = SAFETY_MARGIN
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    return config


def compiles(config: Any, of_model: Any) -> bool:
    """Resolve which passes are compiled, by the config and the model's own; returns whether any is."""
    resolve_compile_configs(config, getattr(of_model, "compile_config", None), False, True)
    compiled = [each for each in (config.varlen_compile_config, config.decode_compile_config) if each is not None]
    for each in compiled:
        if each.fullgraph:
            raise UnsupportedError(
                "asked for fullgraph=True; on rows compiled forward passes leave attention to kernels"
            )
        if each.mode in OWN_GRAPHS or (each.options or {}).get("triton.cudagraphs"):
            raise UnsupportedError(
                f"asked for mode={each.mode!r}, which captures CUDA graphs of its own; on rows whole forward passes "
                'are captured. Give mode="default" or "max-autotune-no-cudagraphs"'
            )
    return bool(compiled)


def decode_sizes(most: int) -> list[int]:
    """Batch sizes of decode up to so many requests, ascending: powers of two up to 16, then steps of 16, or of an
    eighth of the power of two below. None is 1 unless all are: `torch.compile` makes a program of its own for 1."""
    sizes = [min(2, most)]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(min(2 * last if last < 16 else last + max(16, (1 << last.bit_length()) // 16), most))
    return sizes


LENGTH_MATTERS = ("dynamic", "longrope")  # rotary embeddings that depend on the longest request of a batch
LEAST_TEMPERATURE = 1e-30  # the least number that logits can be divided by in fp32
NOT_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "constraints": ([],), "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "exponential_decay_length_penalty": (),
    "force_words_ids": ([],), "forced_bos_token_id": (), "forced_eos_token_id": ([],), "guidance_scale": (1,),
    "max_time": (), "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,), "num_beam_groups": (1,),
    "num_beams": (1,), "output_attentions": (False,), "output_hidden_states": (False,), "output_logits": (False,),
    "output_scores": (False,), "penalty_alpha": (0,), "prompt_lookup_num_tokens": (0,), "sequence_bias": ({}, []),
    "stop_strings": ([],), "token_healing": (False,), "watermarking_config": (),
}  # fmt: skip
"""Settings of a `GenerationConfig` that continuous batching ignores or fails with, and their values that mean nothing
beside None."""


def check_generation(config: GenerationConfig) -> None:
    """Raises `UnsupportedError` where tokens would not be those that a `GenerationConfig` asks for. Not for
    `repetition_penalty`, which the configs of many models have: transformers leaves it out with a warning."""
    for name, neutral in NOT_IN_BATCHES.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise UnsupportedError(
                f"asked for {name}={value!r}, which continuous batching does not do; leave it out, or call generate "
                "without it"
            )


def within_vocabulary(config: GenerationConfig, vocabulary: int | None) -> GenerationConfig:
    """A config with a `top_k` of the vocabulary at most. `generate` takes a larger one for that; a batch would fail."""
    if vocabulary is not None and isinstance(config.top_k, int) and config.top_k > vocabulary:
        config = copy.deepcopy(config)
        config.top_k = vocabulary
    return config


def end_ids(given: Any) -> list[int]:
    """Ids that end a request, given as one or as several in any container. None gives -1, as transformers writes it."""
    try:
        return [-1 if given is None else operator.index(given)]
    except TypeError:
        pass
    try:
        return list(map(operator.index, given))
    except TypeError:
        raise ArgumentError(f"got eos_token_id={given!r}; give a whole number, or several") from None


def check_positions(model: PreTrainedModel, max_seq_len: int) -> None:
    """Raises `UnsupportedError` where a model has no positions for so many tokens, or gives requests other positions
    as soon as a longer request is in their batch."""
    config = model.config.get_text_config()
    known, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    limits = {"no rotary embeddings": known} if not rope else {}
    for each in (rope or {}, *(rope or {}).values()):
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind in LENGTH_MATTERS:
            original = each.get("original_max_position_embeddings")
            limits[f"rope_type={kind!r}"] = original if kind == "longrope" else known
    for what, limit in limits.items():
        if limit is not None and max_seq_len > limit:
            raise UnsupportedError(
                f"asked for max_seq_len={max_seq_len}; {type(model).__name__} has {what}, with which requests that lie "
                f"in one batch are right up to {limit} tokens. Give max_seq_len={limit}, or less"
            )


def check_length(max_seq_len: int, tokens: int, new: int | None) -> int:
    """How many new tokens a request of so many tokens gets: `new`, or as many as a row has room for."""
    try:
        wanted = 1 if new is None else operator.index(new)
    except TypeError:
        raise ArgumentError(f"got max_new_tokens={new!r}; give a whole number") from None
    if wanted < 1:
        raise ArgumentError(f"got max_new_tokens={new}; it must be 1 or more")
    room = max_seq_len - tokens
    if room < wanted:
        raise SequenceTooLongError(
            f"asked for {tokens} tokens and {wanted} new ones; a row is {max_seq_len} long. "
            "A larger max_seq_len takes addresses, not memory"
        )
    return room if new is None else wanted


def vocabulary_of(model: Any) -> int | None:
    """How many tokens a model knows, if it says so."""
    return getattr(model.config.get_text_config(), "vocab_size", None)


def token_ids(input_ids: Any, vocabulary: int | None) -> list[int]:
    """The ids of a prompt. Ids that the model does not know would end the forward pass, and all requests with it."""
    try:
        ids = list(map(operator.index, input_ids.tolist() if isinstance(input_ids, torch.Tensor) else input_ids))
    except TypeError as error:
        raise ArgumentError(f"got input_ids that are not the whole numbers of one prompt: {error}") from None
    if not ids:
        raise ArgumentError("the prompt is empty, and nothing would decide the first token. Begin with bos_token_id")
    wrong = max(ids) if min(ids) >= 0 else min(ids)
    if wrong < 0 or (vocabulary is not None and wrong >= vocabulary):
        raise ArgumentError(f"got token {wrong}; this model's are 0 to {vocabulary or 'its vocabulary'}, exclusive")
    return ids


def check_sampling(vocabulary: int | None, *, temperature: Any = None, top_k: Any = None, top_p: Any = None) -> None:
    """Raises `ArgumentError` for numbers from which no token can be drawn, or that mean something else in `generate`.
    transformers looks at their types alone, and a draw that fails ends all requests."""
    if isinstance(temperature, int | float) and not temperature >= LEAST_TEMPERATURE:
        raise ArgumentError(
            f"got temperature={temperature}; it must be {LEAST_TEMPERATURE} or more. top_k=1 takes the likeliest token"
        )
    if isinstance(top_k, int) and not 0 < top_k <= (vocabulary or top_k):
        raise ArgumentError(f"got top_k={top_k}; it must be 1 to {vocabulary or 'the vocabulary'}, which is all tokens")
    if isinstance(top_p, float) and not 0 <= top_p <= 1:
        raise ArgumentError(f"got top_p={top_p}; it must be 0 to 1, which is all tokens")


class OneTemperatureEach(ContinuousBatchingTemperatureLogitsWarper):  # type: ignore[misc, unused-ignore]
    """Divides logits by the temperature of their request. Without sampling the likeliest token alone is left, the first
    of several."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        temperatures = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        alone = torch.full_like(scores, -torch.inf).scatter_(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(temperatures > LEAST_TEMPERATURE, scores / temperatures, alone)


def give_each_its_temperature(processors: list[Any]) -> None:
    """Replace the processor of transformers that divides logits by temperatures."""
    for at, each in enumerate(processors):
        if isinstance(each, ContinuousBatchingTemperatureLogitsWarper):
            processors[at] = OneTemperatureEach(cast(Any, each))


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function in which global names mean something else."""
    code = function.__code__.replace()  # of its own: compilers keep their programs with the code
    known, defaults = function.__globals__ | names, function.__defaults__
    made = FunctionType(code, known, code.co_name, defaults, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
