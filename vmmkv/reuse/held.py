"""Frames that a prefix tree knows pages of: they are held here, as one place more where they are."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..memory.accounts import Account
from ..memory.pool import FramePool


class Held:
    """The frames of the tree, as the pool's tables say where frames are."""

    def __init__(self, pool: FramePool, account: Account) -> None:
        self._pool: FramePool = weakref.proxy(pool)  # which has this among its tables
        self.account = account
        self.zero_frames: list[int] = []
        self.doubt: list[Any] = []
        self._pages: dict[int, int] = {}
        """By frame, how many of its pages the tree knows."""

    def hold(self, pages: Iterable[int]) -> None:
        """Holds the frames of pages that have become known."""
        frames, held, new = self._pool.frames, self._pages, list[int]()
        for frame in frames.frames_of(pages):
            if frame in held:
                held[frame] += 1
            else:
                held[frame] = 1
                new.append(frame)
        frames.share(new)

    def drop(self, pages: Iterable[int]) -> int:
        """Gives up the frames of pages that are known no more, if they were the last ones there. Returns how many pages
        these still have on rows that do not use them."""
        frames, held, gone = self._pool.frames, self._pages, list[int]()
        for frame in frames.frames_of(pages):
            if held[frame] > 1:
                held[frame] -= 1
            else:
                del held[frame]
                gone.append(frame)
        shares, users = frames.shares.data, frames.users.data
        unused = sum([not users[page] for page in frames.in_pages([frame for frame in gone if shares[frame]])])
        self._pool.give(self.account, gone)
        return unused

    def known_pages(self, pages: set[int]) -> set[int]:
        """Of pages those that are held, where these are all that are."""
        counts = Counter(self._pool.frames.frames_of(pages))
        return pages if counts == self._pages else set()

    def tell_uses(self) -> None:
        """Does nothing: who maps frames counts."""

    def mapped_pages(self) -> list[int]:
        """The pages of the frames that are held."""
        return self._pool.frames.in_pages(list(self._pages))

    def settle(self) -> None:
        """Holds nothing, after an interruption: nobody can trust the tree then."""
        self._pages.clear()

    def leave_behind(self) -> None:
        """Leaves all frames to the pool, for its next operation: the cache is gone."""
        frames = list(self._pages)
        self._pages.clear()
        with suppress(ReferenceError):  # or it is gone, too, with all frames
            self._pool.left_behind.append((self, self.account, frames))
