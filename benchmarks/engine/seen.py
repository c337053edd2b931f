"""What the host has seen of the tokens of all requests: prompts from the start, samples when their step is done."""

from __future__ import annotations

import numpy as np
import torch

from .backend import Ids, Numbers


class SeenTokens:
    """Tokens by number of request.

    Args:
        totals: tokens that each will have.
    """

    def __init__(self, prompts: list[torch.Tensor], totals: Numbers) -> None:
        self._begins = totals.cumsum() - totals
        self._tokens = np.zeros(int(totals.sum()), np.int64)
        self._counts = np.array([len(prompt) for prompt in prompts])
        for begin, prompt in zip(self._begins, prompts):
            self._tokens[begin : begin + len(prompt)] = prompt.numpy()

    def of(self, request: int) -> Ids:
        """What was seen of a request."""
        begin = self._begins[request]
        return self._tokens[begin : begin + self._counts[request]]

    def take(self, requests: Numbers, tokens: Ids) -> None:
        """Takes down a token more of each of these."""
        self._tokens[self._begins[requests] + self._counts[requests]] = tokens
        self._counts[requests] += 1
