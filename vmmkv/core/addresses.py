"""Reserved addresses, and the object that views of them hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from sys import is_finalizing
from typing import TYPE_CHECKING

from ..driver.driver import Driver
from ..errors import LayoutError, VmmkvError

if TYPE_CHECKING:
    from .cache import Cache

ADDRESS_LIMIT = 100 << 40
"""Bytes of virtual addresses that can be relied on: 100 TiB could be reserved on an H200, 127 could not."""


class Addresses:
    """A reserved range. When nothing holds the object any more, neither a cache nor a view, the addresses are free: by
    then nothing is mapped there. A forked child does not free the parent's addresses: the driver refuses there.

    Args:
        driver: the memory system.
        nbytes: bytes of the range.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver, self.nbytes = driver, nbytes
        self.start = driver.reserve(nbytes)
        self.is_empty = True
        """Whether nothing is mapped there. The collector may come here before it comes to the cache."""

    def free(self) -> None:
        """Frees the addresses. A second call does nothing. An interruption may leave them reserved, not free twice."""
        start, self.start = self.start, 0
        try:
            if start:
                self.driver.free(start, self.nbytes)
        except VmmkvError:
            self.start = start
            raise

    def __del__(self, ends: Callable[[], bool] = is_finalizing) -> None:
        if not ends() and "is_empty" in vars(self) and self.is_empty:
            with suppress(VmmkvError):
                self.free()


class Views:
    """Held by all tensors over the ranges of a cache. Keeps the addresses reserved; and keeps a cache open that is
    collected before the tensors are.

    Args:
        addresses: the ranges.
    """

    cache: Cache | None = None
    """A cache that nothing else holds."""

    def __init__(self, addresses: list[Addresses]) -> None:
        self.addresses = addresses

    def __del__(self) -> None:
        if self.cache is not None:
            self.cache.end()


def check_address_space(nbytes: int, asked: str) -> None:
    """Raises `LayoutError` where what was asked for would take more addresses than there are."""
    if nbytes > ADDRESS_LIMIT:
        tebibytes = nbytes / 2**40 if nbytes < 1 << 1000 else math.inf
        raise LayoutError(
            f"{asked} takes {tebibytes:.1f} TiB of virtual addresses; {ADDRESS_LIMIT >> 40} TiB can be relied "
            "on. Lower one of the factors"
        )
