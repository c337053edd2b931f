"""Requests of one batch that are sampled each in its own way, as those of a server's clients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper

from ...errors import UnsupportedError
from ..request_checks import LEAST_TEMPERATURE


def sampling_manager(model: Any, config: ContinuousBatchingConfig | None) -> Any:
    """Make a manager with the model's own generation config, each of whose requests has its own sampling. `top_k` and
    `top_p` sort a vocabulary, and are there if the model's config has them."""
    config, own = copy.deepcopy(config) or ContinuousBatchingConfig(), copy.deepcopy(model.generation_config)
    config.per_request_processors = True
    own.do_sample, own.num_return_sequences = True, 1
    own.temperature = 0.5  # each request has its own; for 1.0 there would be no processor
    manager = model.init_continuous_batching(own, config)
    processors = manager.logit_processor.logits_processor
    for at, each in enumerate(processors):
        if isinstance(each, ContinuousBatchingTemperatureLogitsWarper):
            processors[at] = OneTemperatureEach(cast(Any, each))
    return manager


def sampling(manager: Any, config: GenerationConfig) -> dict[str, Any]:
    """The keywords of `add_request` for a request's sampling. Raises `UnsupportedError` if the manager has no processor
    for it."""
    if not config.do_sample:
        return {"temperature": LEAST_TEMPERATURE}
    supported: Mapping[str, type] = manager.logit_processor.supported_keys
    numbers = {"temperature": 1.0 if config.temperature is None else config.temperature}
    numbers |= {name: getattr(config, name) for name in ("top_k", "top_p") if getattr(config, name) is not None}
    for name, neutral in {"top_k": 0, "top_p": 1}.items():
        if name not in supported and numbers.get(name, neutral) != neutral:
            raise UnsupportedError(
                f"asked for {name}={numbers[name]}; this model's generation_config.json has none, and the server sorts "
                f"vocabularies for none of its requests. Put {name} there, or leave it out"
            )
    return {name: supported[name](value) for name, value in numbers.items() if name in supported}


class OneTemperatureEach(ContinuousBatchingTemperatureLogitsWarper):  # type: ignore[misc, unused-ignore]
    """Divides logits by the temperature of their request. Without sampling the likeliest token alone is left, the first
    of several."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        temperatures = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        alone = torch.full_like(scores, -torch.inf).scatter_(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(temperatures > LEAST_TEMPERATURE, scores / temperatures, alone)
