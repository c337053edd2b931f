"""transformers' continuous batching on rows: call `enable(model)`, then `generate_batch`, `init_continuous_batching` or
`transformers serve` as usual.

Scheduler, streaming, logits processors and server stay transformers'; each request is a sequence. `batching` has the
code that knows their insides. Here it depends on `init_continuous_batching` and `generate_batch` of `GenerationMixin`,
which are replaced on a model, and on the attribute in which a model keeps a persistent manager.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from numbers import Real
from types import MethodType
from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel

from ..arguments import check_size
from ..budget import parse_bytes
from ..errors import ArgumentError, UnsupportedAttentionError, UnsupportedError, VmmkvError
from ..layout import kv_dtype_from_name
from ..pool import FramePool, check_pool_alone
from .attention import can_attend
from .batching import check_version
from .batching.attention import ALONE, left_alone, restore
from .batching.attention import NAME as NAME
from .batching.config import check_length, check_positions, token_ids, vocabulary_of, with_names
from .batching.manager import RowManager, settings, started
from .batching.model import Options, not_for_rows

KEPT = "_cached_continuous_batching_manager"  # where transformers keeps a persistent manager
OF_GENERATE_BATCH = inspect.signature(GenerationMixin.generate_batch).parameters.keys() - {"kwargs"}
"""Arguments that transformers' `generate_batch` heeds."""


def enable(
    model: PreTrainedModel,
    *,
    max_bytes: float | str | None = None,
    pool: FramePool | None = None,
    max_seq_len: int | None = None,
    idle_seconds: float = 10.0,
    kv_dtype: str | None = None,
    persistent: bool = False,
    raise_errors: bool = False,
) -> None:
    """Have a model's continuous batching keep K and V in rows, from the next manager on.

    Some settings of a `ContinuousBatchingConfig` change their meaning: `cpu_offload_space` holds prefixes that memory
    has no room for, also of requests that begin anew; `allow_block_sharing` shares pages; `page_size` times
    `num_blocks` is a budget in tokens, which `max_bytes` overrides; `max_memory_percent` is of the memory that is free;
    `safety_margin` is 0.05 by default with the "fifo" scheduler. Compiled passes are refused that capture graphs of
    their own, must be one graph (`fullgraph=True`), or run on several devices.

    Args:
        model: a decoder whose layers attend to all tokens, or to a window; also inside a model of PEFT.
        max_bytes: the most that K and V may take: bytes, `"20GiB"`, or a share of the memory that is free. None is what
            the `ContinuousBatchingConfig` says, or else 80 %. For a model on several devices, on each of them.
        pool: physical memory shared with other models, instead of `max_bytes`.
        max_seq_len: tokens of the longest request, new ones included. It takes addresses only. None is the model's
            `max_position_embeddings`.
        idle_seconds: after so many seconds without a request memory goes back to the system, and cached prefixes are
            dropped; infinity: never.
        kv_dtype: "fp8" (e4m3fn) or "int8": K and V are quantized as they are appended, with a scale for each token and
            head (`KVLayout(scales="token_head")`), and all tokens, those of prompts included, attend to the quantized
            ones. None: the model's dtype.
        persistent: `generate_batch` keeps its manager for the next call, and CUDA graphs with it, as with
            `persistent_manager=True`; K and V go back to the system when a call ends. With other settings than before
            a call makes another manager.
        raise_errors: `generate_batch` raises `VmmkvError` if a request fails, which otherwise its result says.

    Raises:
        UnsupportedError: this version of transformers is not supported, or the model cannot run on rows.
        ArgumentError: the model is no `PreTrainedModel`, `max_seq_len` is missing or no number, `idle_seconds` is
            negative or no number; or the pool is not a `FramePool`, or is a cache's own.
        ValueError: `max_bytes` is given with a pool.
        BudgetError, LayoutError: a number is out of range.
        DtypeError: there is no such kv_dtype, or the model's K and V cannot be stored in it.
    """
    check_version()
    model = _inside(model)
    _check_model(model)
    check_pool_alone(pool, max_bytes=max_bytes)
    if max_bytes is not None:
        parse_bytes(max_bytes, free=0)
    if not (isinstance(idle_seconds, Real) and idle_seconds >= 0):
        raise ArgumentError(f"got idle_seconds={idle_seconds!r}; it must be 0 or more, or infinity for never")
    if max_seq_len is None:
        max_seq_len = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_seq_len is None:
        raise ArgumentError("got no max_seq_len, and the model's config names no max_position_embeddings; give one")
    max_seq_len, kept_dtype = check_size("max_seq_len", max_seq_len), kv_dtype_from_name(kv_dtype)
    check_positions(model, max_seq_len)
    options = Options(max_bytes, pool, max_seq_len, idle_seconds, kept_dtype, persistent, raise_errors)
    _drop_kept(model)
    own, kind = vars(model), cast(Any, type(model))
    own["init_continuous_batching"] = MethodType(_beginning(options), model)
    own["generate_batch"] = MethodType(_checked(options), model)
    generate = own.get("generate", _generate)  # one that was pickled has its class's method as its own
    if hasattr(model, "generate") and getattr(generate, "__func__", generate) in (_generate, kind.generate):
        own["generate"] = MethodType(_generate, model)


def disable(model: PreTrainedModel) -> None:
    """Have a model's continuous batching keep K and V in blocks again, from the next manager on. Does nothing to one
    that was not enabled, except a copy that was made while a manager ran the model: it gets transformers' default
    attention."""
    model = _inside(model)
    own = vars(model)
    if isinstance(own.get(KEPT), RowManager):
        _drop_kept(model)
    for name in ("init_continuous_batching", "generate_batch"):
        own.pop(name, None)
    if getattr(own.get("generate"), "__func__", None) is _generate:
        del own["generate"]
    restore(model)


def sleep(model: PreTrainedModel, *, offload: bool = False) -> int:
    """Give the memory of a model's K and V back to the system, for a training step, say; returns its bytes. Managers
    stay, and their CUDA graphs. Cached prefixes are dropped.

    A manager that has stopped needs no `wake`. One that runs takes requests, and begins with them at `wake`; until then
    the model attends as before `enable`, and may be trained. In a tensor parallel group all processes sleep and wake;
    one that sleeps alone has an error after `cpu_group_timeout`.

    Args:
        offload: running requests give their memory back, too, and are computed anew at `wake`, from the tokens that
            they have. Otherwise none may run.

    Raises:
        BusyError: requests run, without `offload`.
    """
    with ExitStack() as undo:
        freed = 0
        for manager in managers_of(model):
            if not manager.is_asleep:
                undo.callback(manager.wake)
            freed += manager.sleep(offload=offload)
        undo.pop_all()
    return freed


def wake(model: PreTrainedModel) -> None:
    """End `sleep`. Memory is taken as requests need it."""
    for manager in managers_of(model):
        manager.wake()


class Rollouts:
    """`sleep` and `wake` of a model on rows under verl's names, for trainers that call them on an object."""

    def __init__(self, model: PreTrainedModel, *, offload: bool = False) -> None:
        self._model, self._offload = model, offload

    def release(self, tags: Iterable[str] = ("kv_cache",)) -> int:
        """Give memory back: of K and V (`"kv_cache"`). Raises `UnsupportedError` for other tags: weights stay."""
        _check_tags(tags)
        return sleep(self._model, offload=self._offload)

    def resume(self, tags: Iterable[str] = ("kv_cache",)) -> None:
        """End `release`."""
        _check_tags(tags)
        wake(self._model)


def _check_tags(tags: Iterable[str]) -> None:
    if unknown := {*tags} - {"kv_cache"}:
        raise UnsupportedError(f"asked to release {', '.join(sorted(unknown))}; rows hold kv_cache alone")


def _inside(model: Any) -> Any:
    """The model inside a model of PEFT, which hands `generate_batch` on to it."""
    get = None if isinstance(model, PreTrainedModel) else getattr(model, "get_base_model", None)
    return get() if get else model


def _check_model(model: PreTrainedModel) -> None:
    """Raise an error if rows cannot serve a model's attention or distribution."""
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            f"got {type(model).__name__}; give the PreTrainedModel inside, whose generate_batch it calls"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise not_for_rows(model, "no position_ids, so that it cannot tell requests apart that lie in one batch")
    if not can_attend(model):
        raise not_for_rows(model, "an attention of its own, or does more with masks, K or V than to hand them to it")
    if (getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1) > 1:
        raise not_for_rows(model, "layers in several processes; tensor parallelism splits heads")


def _drop_kept(model: PreTrainedModel) -> None:
    """Have a model forget its persistent manager, which would be the next as well."""
    kept = vars(model).pop(KEPT, None)
    if kept is not None and not kept.is_running():
        kept.destroy()


def managers_of(model: Any) -> list[RowManager]:
    """The managers of a model that run or are kept."""
    model = _inside(model)
    kept = vars(model).get(KEPT)
    return [each for each in started.get(model, ()) if each is kept or each.is_running()]


def _beginning(options: Options) -> Callable[..., Any]:
    """`init_continuous_batching` that makes managers on rows. It makes another one where a persistent one was made for
    other configs, which transformers would return."""
    manager = type("RowManager", (RowManager,), {"options": options})
    theirs = inspect.unwrap(GenerationMixin.init_continuous_batching)
    begin = torch.no_grad()(with_names(theirs, ContinuousBatchingManager=manager))

    @functools.wraps(theirs)
    def init_continuous_batching(
        model: Any, generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kept = vars(model).get(KEPT)
        for at, config in enumerate((generation_config, continuous_batching_config)):
            if isinstance(kept, RowManager) and config is not None and settings(config) != kept.made_by[at]:
                _drop_kept(model)
        return begin(model, generation_config, continuous_batching_config, *args, **kwargs)

    return init_continuous_batching


def _checked(options: Options) -> Callable[..., Any]:
    """`generate_batch` that raises the errors of `add_request`: transformers' logs them, and returns no results. It
    refuses keywords that transformers' ignores."""

    @functools.wraps(GenerationMixin.generate_batch)
    def generate_batch(
        model: Any, inputs: Any, generation_config: Any = None, *args: Any, max_new_tokens: Any = None, **kwargs: Any
    ) -> Any:
        for name in kwargs.keys() - OF_GENERATE_BATCH:
            if kwargs[name] is not None:
                raise ArgumentError(
                    f"got {name}={kwargs[name]!r}, which generate_batch ignores; give it a GenerationConfig"
                )
        if options.persistent:
            kwargs["persistent_manager"] = True
        config = generation_config or model.generation_config
        ids = [token_ids(each, vocabulary_of(model)) for each in inputs]
        new = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_length(options.max_seq_len, max(map(len, ids), default=0), new)
        if isinstance(kept := vars(model).get(KEPT), RowManager):
            kept.forget_results()
        results = type(model).generate_batch(model, ids, config, *args, max_new_tokens=max_new_tokens, **kwargs)
        if options.raise_errors:
            for name, result in results.items():
                if result.error is not None:
                    raise VmmkvError(f"request {name} ended with an error: {result.error}")
            if len(results) < (wanted := len(ids) * (config.num_return_sequences or 1)):
                raise VmmkvError(f"{wanted - len(results)} requests were not answered; transformers has logged why")
        return results

    return generate_batch


@functools.wraps(GenerationMixin.generate)
def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` that refuses to run beside a manager, or as one, which would drop arguments. Code that has wrapped it
    may call it later, too."""
    if kwargs.get("cache_implementation") == "paged" and "generate_batch" in vars(model):
        raise UnsupportedError(
            'asked for cache_implementation="paged" of a model on rows, with which generate drops some of its '
            "arguments; call generate_batch"
        )
    refused = UnsupportedAttentionError(f"asked {type(model).__name__} to generate while a manager runs it; {ALONE}")
    with left_alone(model, refused):
        return type(model).generate(model, *args, **kwargs)
