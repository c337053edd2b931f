"""One call of `generate`, and what can be seen of it from inside: times, logits, memory, copies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, LogitsProcessor, LogitsProcessorList, PreTrainedModel


class Clock:
    """Moments of the work on a device: each is when what was submitted before has finished."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._ticks: list[Any] = []

    def tick(self) -> None:
        if self._cuda:
            self._ticks.append(torch.cuda.Event(enable_timing=True))
            self._ticks[-1].record()
        else:
            self._ticks.append(perf_counter())

    def seconds(self) -> list[float]:
        """Between one tick and the next."""
        if self._cuda:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._ticks)]
        return [end - start for start, end in pairwise(self._ticks)]


class Observer(LogitsProcessor):
    """Keeps what each step computes, and makes the next token what it is told: every cache gets the same tokens, so
    that logits can be compared.

    Args:
        tokens: `[batch_size]`, the token of every step.
        vocabulary: tokens that there are.
    """

    def __init__(self, tokens: torch.Tensor, vocabulary: int) -> None:
        self.clock = Clock(tokens.device)
        self.choices: list[torch.Tensor] = []
        self.logits: torch.Tensor | None = None
        self._scores = torch.nn.functional.one_hot(tokens, vocabulary).float()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.clock.tick()
        if not self.choices and scores.is_cuda:
            torch.cuda.reset_peak_memory_stats()  # from here on it is that of decode steps
        self.choices.append(scores.argmax(-1))
        self.logits = scores
        return self._scores


@dataclass(frozen=True)
class Run:
    """What one call of `generate` did.

    Attributes:
        ids: `[batch_size, tokens]`, prompt included. The last one is not in the cache.
        first_seconds: until the logits of the first new token were there.
        step_seconds: of each step after it.
        choices: `[steps, batch_size]`, the tokens that greedy decoding would have taken.
        logits: `[batch_size, vocabulary]` of the last step.
        peak_bytes: the most that torch's allocator had out during the steps; None on the CPU.
    """

    ids: torch.Tensor
    first_seconds: float
    step_seconds: list[float]
    choices: torch.Tensor
    logits: torch.Tensor
    peak_bytes: int | None


def decode(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, new_tokens: int, compiled: bool = False) -> Run:
    """`generate`, from prompts without padding, `[batch_size, tokens]`, of which the cache may hold a part."""
    vocabulary = model.config.vocab_size
    observer = Observer((ids[:, 0] + 1) % vocabulary, vocabulary)
    if ids.is_cuda:
        torch.cuda.synchronize()
    observer.clock.tick()
    ids = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        disable_compile=not compiled,
        logits_processor=LogitsProcessorList([observer]),
    )
    first, *steps = observer.clock.seconds()
    peak = torch.cuda.max_memory_allocated() if ids.is_cuda else None
    return Run(ids, first, steps, torch.stack(observer.choices).cpu(), observer.logits.cpu(), peak)


@torch.no_grad()
def fill(cache: Cache, model: PreTrainedModel, batch: int, tokens: int) -> None:
    """Writes random K and V of a prompt into an empty cache, the same in each layer and for each cache."""
    config = model.config
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    generator = torch.Generator(model.device).manual_seed(tokens)
    k, v = (torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype) for _ in range(2))
    for layer in range(config.num_hidden_layers):
        cache.update(k, v, layer)


class Watched(TorchDispatchMode):
    """Counts the bytes that operators write which do nothing but copy, and names the attention operators that run.

    Attributes:
        copied_bytes: by torch's operators; kernels that torch does not know of are not seen.
        attention: SDPA's kernels, as torch names them; empty where it took none (plain matrix products, or another
            attention).
    """

    COPYING = frozenset(
        getattr(torch.ops.aten, name)
        for name in ("cat", "clone", "copy_", "_to_copy", "index_copy", "index_copy_", "index_select", "repeat")
    )

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = 0
        self.attention: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator in self.COPYING:
            # index_copy_(target, dimension, index, source) returns all of the target.
            written = args[3] if operator is torch.ops.aten.index_copy_ else output
            self.copied_bytes += written.nbytes
        if "attention" in operator.__name__:
            self.attention.add(operator.__name__.removeprefix("_scaled_dot_product_").replace("_attention", ""))
        return output
