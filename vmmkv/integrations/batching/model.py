"""Puts a model on rows: its next manager is one of ours, and what transformers would ignore is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api as their_api

from ...errors import ArgumentError, UnsupportedAttentionError, UnsupportedError, VmmkvError
from ..request_checks import (
    check_length,
    check_paged,
    check_same,
    check_same_batching,
    check_told,
    end_ids,
    token_ids,
    vocabulary_of,
    within_vocabulary,
)
from ..with_names import with_names
from .attention import ALONE, left_alone, restore
from .groups import Options
from .manager import RowManager, started

KEPT = "_cached_continuous_batching_manager"
"""Where transformers keeps a persistent manager."""
OF_GENERATE_BATCH = inspect.signature(their_api.ContinuousMixin.generate_batch).parameters.keys() - {"kwargs"}
"""Arguments that transformers' `generate_batch` heeds."""
NOT_HANDED_ON = ("logits_processor", "custom_generate")
"""Arguments that `generate` drops silently where it runs continuous batching."""


class OfGenerate(str):
    """The `cache_implementation` with which `generate` calls `generate_batch`, to make one tensor of all answers."""


def put_on_rows(model: PreTrainedModel, options: Options) -> None:
    """Have the next manager of a model keep K and V in rows."""
    manager = type("RowManager", (RowManager,), {"options": options})
    begin = inspect.unwrap(their_api.ContinuousMixin.init_continuous_batching)
    begin = torch.no_grad()(with_names(begin, ContinuousBatchingManager=manager))
    _drop_kept(model)
    own, kind = vars(model), cast(Any, type(model))
    own["init_continuous_batching"] = MethodType(_as_kept(begin), model)
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


def _check_kept(model: Any, generation_config: GenerationConfig | None, batching_config: Any = None) -> None:
    """Raise `ArgumentError` if a model has a persistent manager that was made for other configs: transformers would
    return it. Drop results of its earlier requests that were not taken."""
    kept = vars(model).get(KEPT)
    if isinstance(kept, RowManager):
        if generation_config is not None:
            check_same(within_vocabulary(generation_config, vocabulary_of(model)), kept.generation_config)
        if batching_config is not None:
            check_same_batching(batching_config, kept.asked)


def _as_kept(begin: Callable[..., Any]) -> Callable[..., Any]:
    """`init_continuous_batching` that refuses configs for which a persistent manager was not made."""

    @functools.wraps(begin)
    def init_continuous_batching(
        model: Any, generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        _check_kept(model, generation_config, continuous_batching_config)
        return begin(model, generation_config, continuous_batching_config, *args, **kwargs)

    return init_continuous_batching


def managers_of(model: Any) -> list[RowManager]:
    """The managers of a model that run or are kept."""
    kept = vars(model).get(KEPT)
    return [each for each in started.get(model, ()) if each is kept or each.is_running()]


def _keep(model: Any, config: GenerationConfig, batching_config: Any) -> None:
    """Have a model forget its persistent manager if it was made for other configs."""
    try:
        _check_kept(model, config, batching_config)
    except ArgumentError:
        _drop_kept(model)


def _checked(options: Options) -> Callable[..., Any]:
    """`generate_batch` that raises the errors of `add_request`: transformers' logs them, and returns no results."""

    @functools.wraps(their_api.ContinuousMixin.generate_batch)
    def generate_batch(
        model: Any,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *args: Any,
        max_new_tokens: Any = None,
        **kwargs: Any,
    ) -> Any:
        config = generation_config or model.generation_config
        check_told({name: kwargs[name] for name in kwargs.keys() - OF_GENERATE_BATCH}, inputs, config)
        if options.persistent:
            kwargs["persistent_manager"] = True
            _keep(model, config, continuous_batching_config)
        _check_kept(model, config)
        ids = [token_ids(each, vocabulary_of(model)) for each in inputs]
        new = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_length(options.max_seq_len, max(map(len, ids), default=0), new)
        if isinstance(kept := vars(model).get(KEPT), RowManager):
            kept.forget_results()
        told = {"max_new_tokens": max_new_tokens, **kwargs}
        results = type(model).generate_batch(model, ids, generation_config, continuous_batching_config, *args, **told)
        if options.raise_errors:
            _raise_first_error(results)
            if len(results) < (wanted := len(ids) * (config.num_return_sequences or 1)):
                raise VmmkvError(f"{wanted - len(results)} requests were not answered; transformers has logged why")
        if isinstance(kwargs.get("cache_implementation"), OfGenerate):
            _pad(results, config)
        return results

    return generate_batch


def _raise_first_error(results: dict[str, Any]) -> None:
    for name, result in results.items():
        if result.error is not None:
            raise VmmkvError(f"request {name} ended with an error: {result.error}")


def _pad(results: dict[str, Any], config: GenerationConfig) -> None:
    """Pad answers as `generate` does. Raises `VmmkvError` if a request failed: a tensor has no place for that."""
    _raise_first_error(results)
    pad = end_ids(config.eos_token_id)[0] if config.pad_token_id is None else config.pad_token_id
    longest = max((len(result.generated_tokens) for result in results.values()), default=0)
    for result in results.values():
        result.generated_tokens = result.generated_tokens + [pad] * (longest - len(result.generated_tokens))


@functools.wraps(GenerationMixin.generate)
def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` that refuses to drop arguments while the model is on rows, and to run beside a manager. Code that has
    wrapped it may call it later, too."""
    if kwargs.get("cache_implementation") == "paged" and "generate_batch" in vars(model):
        given = inspect.signature(type(model).generate).bind(model, *args, **kwargs).arguments
        for name in NOT_HANDED_ON:
            if given.get(name) and not isinstance(given[name], str):  # the name of a recipe, which is run instead
                raise UnsupportedError(
                    f"asked for {name}, which generate does not hand on to continuous batching; leave it out, or "
                    'cache_implementation="paged"'
                )
        if not given.get("custom_generate"):
            told, config = given["kwargs"], given.get("generation_config")
            max_length = told.get("max_length", getattr(config, "max_length", None))
            check_paged(model._prepare_generation_config(config, **told)[0], max_length)
            kwargs["cache_implementation"] = OfGenerate("paged")
        return type(model).generate(model, *args, **kwargs)
    refused = UnsupportedAttentionError(f"asked {type(model).__name__} to generate while a manager runs it; {ALONE}")
    with left_alone(model, refused):
        return type(model).generate(model, *args, **kwargs)
