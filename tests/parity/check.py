"""One kind of model with one attention and one cache, against transformers' eager attention and `DynamicCache`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from vmmkv import VmmkvError
from vmmkv.integrations import attention, stand_ins
from vmmkv.integrations.transformers import VmmCache

from . import reference_kernels
from .models import UNPADDED, build

CHUNKS = (12, 9, 3, 1, 1)
"""Tokens of each forward pass: more than a window of them, more than `decode` takes, a few, and one by one."""

PADDING = (5, 2, 0)
"""Tokens of padding on the left of each sequence."""

MAX_SEQ_LEN = 64

TOLERANCE = 1e-3
"""Of logits, in their standard deviations."""

COMPILE = "VmmCache(compile=True)"
CASES = (
    ("vmmkv", "DynamicCache"),
    ("vmmkv", "VmmCache"),
    ("vmmkv", COMPILE),
    ("eager", "VmmCache"),
    ("sdpa", "VmmCache"),
)
"""Attention and cache. SDPA is compared with SDPA, the others with eager attention; both with a `DynamicCache`."""


@dataclass
class Outcome:
    """What became of one case.

    Attributes:
        verdict: "same" or "differs"; "refused", by a typed error of vmmkv; "failed", by another; "static", where
            transformers' own `StaticCache` fails or differs as well, as `VmmCache(compile=True)` does; "none", where
            transformers itself cannot run the model with this attention.
        detail: the error, or the largest difference of logits in their standard deviations.
        attention: what the model runs; "eager" where vmmkv's is not for it.
        kernel_calls: how often kernels ran.
        fallbacks: what there were no kernels for.
    """

    verdict: str = "same"
    detail: str = ""
    attention: str = ""
    kernel_calls: int = 0
    fallbacks: tuple[str, ...] = ()


def check(kind: str, device: str = "cpu", cases: tuple[tuple[str, str], ...] = CASES) -> Iterator[Outcome]:
    """Runs cases of a kind, one after the other."""
    expected: dict[str, torch.Tensor] = {}
    for implementation, cache in cases:
        like = "eager" if implementation == "vmmkv" else implementation
        try:
            if like not in expected:
                model = build(kind, like, device)
                logits = logits_of(model, make_cache("DynamicCache", model), padding_of(kind))
                if not logits.isfinite().all():
                    raise ValueError("its logits are not finite")
                expected[like] = logits
        except Exception as error:
            yield Outcome("none", f"{type(error).__name__}: {error}", like)
            continue
        outcome = run(kind, implementation, cache, expected[like], device)
        if cache == COMPILE and outcome.verdict in ("differs", "failed"):
            static = run(kind, like, "StaticCache", expected[like], device)
            outcome.verdict = outcome.verdict if static.verdict == "same" else "static"
        yield outcome


def run(kind: str, implementation: str, cache: str, expected: torch.Tensor, device: str) -> Outcome:
    """Runs one case."""
    outcome = Outcome()
    try:
        with watched(outcome, device):
            model = build(kind, implementation, device)
            outcome.attention = model.config.get_text_config(decoder=True)._attn_implementation
            logits = logits_of(model, make_cache(cache, model), padding_of(kind))
    except VmmkvError as error:
        outcome.verdict, outcome.detail = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        outcome.verdict, outcome.detail = "failed", f"{type(error).__name__}: {error}"
    else:
        difference = ((logits - expected).abs().max() / expected.std()).item()
        outcome.verdict = "same" if difference <= TOLERANCE else "differs"  # NaN differs
        outcome.detail = f"{difference:.2g}"
    return outcome


def padding_of(kind: str) -> tuple[int, ...]:
    return (0,) * len(PADDING) if kind in UNPADDED else PADDING


def make_cache(name: str, model: PreTrainedModel) -> Cache:
    """A new cache for a model, and for what it reads of an encoder."""
    page_size = 4096 if model.device.type == "cpu" else None
    makers: dict[str, Callable[..., Cache]] = {
        "DynamicCache": lambda config: DynamicCache(config=config),
        "StaticCache": lambda config: StaticCache(config=config, max_cache_len=MAX_SEQ_LEN),
        "VmmCache": lambda config: VmmCache(config, MAX_SEQ_LEN, page_size=page_size),
        COMPILE: lambda config: VmmCache(config, MAX_SEQ_LEN, page_size=page_size, compile=True),
    }
    cache = makers[name](model.config)
    if not model.config.is_encoder_decoder:
        return cache
    whole = copy.deepcopy(model.config.get_text_config(decoder=True))  # no window moves over what the encoder saw
    whole.layer_types, whole.sliding_window = None, None
    return EncoderDecoderCache(cache, makers["VmmCache" if isinstance(cache, VmmCache) else "DynamicCache"](whole))


@torch.no_grad()
def logits_of(model: PreTrainedModel, cache: Cache, padding: tuple[int, ...]) -> torch.Tensor:
    """Logits of all tokens that are no padding, `[tokens, vocabulary]`, from one forward pass for each chunk."""
    generator = torch.Generator().manual_seed(1)
    shape = len(padding), sum(CHUNKS)
    tokens, source = (torch.randint(3, 97, shape, generator=generator).to(model.device) for _ in range(2))
    mask = (torch.arange(shape[1]) >= torch.tensor(padding)[:, None]).long().to(model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts, end = [], 0
    for count in CHUNKS:
        chunk = slice(end, end + count)
        end = chunk.stop
        inputs = {"input_ids": tokens[:, chunk], "attention_mask": mask[:, :end]}
        if model.config.is_encoder_decoder:
            inputs = {f"decoder_{name}": tensor for name, tensor in inputs.items()}
            inputs |= {"input_ids": source, "attention_mask": mask.flip(1)}
        elif "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = positions[:, chunk]
        parts.append(model(**inputs, past_key_values=cache).logits)
    return torch.cat(parts, 1)[mask.bool()].float()


@contextmanager
def watched(outcome: Outcome, device: str) -> Iterator[None]:
    """Counts what vmmkv's attention does. On the CPU plain PyTorch stands in for kernels."""
    kernels = attention if device == "cuda" else reference_kernels

    def counted(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: object, **kwargs: object) -> torch.Tensor:
            outcome.kernel_calls += 1
            return kernel(*args, **kwargs)

        return run

    def warn(lacking: str) -> None:
        outcome.fallbacks = tuple(dict.fromkeys([*outcome.fallbacks, lacking]))

    counting = {name: counted(getattr(kernels, name)) for name in ("decode", "prefill")}
    with patch.multiple(attention, warn=warn, **counting), patch.object(stand_ins, "warn", warn):
        yield
