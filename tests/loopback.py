"""A peer for tests that is this process: what is received is what was sent last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vmmkv.transfer import Head


class Loopback:
    """As `vmmkv.transfer.Peer`. It is asked for all tokens, before anybody listens, and the last are received."""

    head: Head
    sent: list[torch.Tensor]

    def __init__(self, *_: object) -> None: ...

    def ask(self, head: Head) -> int:
        Loopback.head = head
        return head.start

    def send(self, states: list[torch.Tensor]) -> None:
        Loopback.sent = [each.clone() for each in states]

    def listen(self) -> Head:
        return Loopback.head

    @contextmanager
    def told(self) -> Iterator[None]:
        yield

    def accept(self, first: int) -> None: ...

    def receive(self, states: list[torch.Tensor]) -> None:
        for each, sent in zip(states, Loopback.sent, strict=True):
            each.copy_(sent[len(sent) - len(each) :])


@contextmanager
def looped() -> Iterator[None]:
    """Has sequences go to this process, and come from it, meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmmkv.transfer.Peer", Loopback)
        yield
