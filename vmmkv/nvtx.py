"""NVTX: ranges on a profiler's time line, where there is a GPU; elsewhere they are nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Range:
    """A range that is entered again and again, in any thread."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class Ranges:
    """The ranges of a pool: `growth` beyond what is mapped, and what users ask for that copies or maps."""

    def __init__(self, device: torch.device) -> None:
        def make(name: str) -> AbstractContextManager[None]:
            return Range(f"vmmkv: {name}") if device.type == "cuda" else nullcontext()

        self.growth = make("growth")
        self.fork, self.reorder = make("fork"), make("reorder")
        self.hit = make("prefix hit")
        self.suspend, self.resume = make("suspend"), make("resume")
        self.send, self.receive = make("send"), make("receive")
