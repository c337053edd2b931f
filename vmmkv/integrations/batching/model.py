"""Puts a model on rows: its next manager is one of ours, and what transformers would ignore is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api as their_api

from ...errors import ArgumentError, UnsupportedAttentionError, UnsupportedError, VmmkvError
from .attention import ALONE, left_alone, restore
from .config import check_length, token_ids, vocabulary_of, with_names
from .groups import Options
from .manager import RowManager, settings, started

KEPT = "_cached_continuous_batching_manager"  # where transformers keeps a persistent manager
OF_GENERATE_BATCH = inspect.signature(their_api.ContinuousMixin.generate_batch).parameters.keys() - {"kwargs"}
"""Arguments that transformers' `generate_batch` heeds."""


def put_on_rows(model: PreTrainedModel, options: Options) -> None:
    """Have the next manager of a model keep K and V in rows."""
    manager = type("RowManager", (RowManager,), {"options": options})
    begin = inspect.unwrap(their_api.ContinuousMixin.init_continuous_batching)
    begin = torch.no_grad()(with_names(begin, ContinuousBatchingManager=manager))
    _drop_kept(model)
    own, kind = vars(model), cast(Any, type(model))
    own["init_continuous_batching"] = MethodType(_made_for_these(begin), model)
    own["generate_batch"] = MethodType(_checked(options), model)
    generate = own.get("generate", _generate)  # one that was pickled has its class's method as its own
    if hasattr(model, "generate") and getattr(generate, "__func__", generate) in (_generate, kind.generate):
        own["generate"] = MethodType(_generate, model)


def take_off_rows(model: PreTrainedModel) -> None:
    """Have the next manager of a model keep K and V in blocks again."""
    own = vars(model)
    if isinstance(own.get(KEPT), RowManager):
        _drop_kept(model)
    for name in ("init_continuous_batching", "generate_batch"):
        own.pop(name, None)
    if getattr(own.get("generate"), "__func__", None) is _generate:
        del own["generate"]
    restore(model)


def _drop_kept(model: PreTrainedModel) -> None:
    """Have a model forget its persistent manager, which would be the next as well."""
    kept = vars(model).pop(KEPT, None)
    if kept is not None and not kept.is_running():
        kept.destroy()


def managers_of(model: Any) -> list[RowManager]:
    """The managers of a model that run or are kept."""
    kept = vars(model).get(KEPT)
    return [each for each in started.get(model, ()) if each is kept or each.is_running()]


def _made_for_these(begin: Callable[..., Any]) -> Callable[..., Any]:
    """`init_continuous_batching` that makes another manager where a persistent one was made for other configs, which
    transformers would return."""

    @functools.wraps(begin)
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

    @functools.wraps(their_api.ContinuousMixin.generate_batch)
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
