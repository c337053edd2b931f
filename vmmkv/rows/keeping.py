"""Keeping: what rows ask of who knows what they hold, and keeps that for sequences that begin alike."""

from __future__ import annotations

from .table import NOBODY


class Keeper:
    """Who keeps nothing; see `vmmkv.reuse.prefixes` for who does."""

    @property
    def is_copying(self) -> bool:
        """Whether copies may be under way that no fence knows."""
        return False

    def known_tenants(self) -> set[int]:
        """Numbers of tenants of whom something is kept, beside what lies on the pool."""
        return set()

    def held_pages(self) -> list[int]:
        """The pages that are kept, wherever they lie; of large frames all."""
        return []

    def leave(self, row: int) -> bool:
        """Says that a row's sequence has ended; returns whether the row is to be kept."""
        return False

    def shorten(self, row: int, tokens: int) -> None:
        """Says that a live row holds its first tokens only, or has given back some in front."""

    def inherit(self, sources: dict[int, int]) -> None:
        """Says that live rows hold what others have held so far, and have the same pages as far as they may share. Who
        is its own source may have pages of its own, from some page on."""

    def forget(self, row: int) -> None:
        """Says that a live row holds nothing any more."""

    def give_up(self, row: int) -> None:
        """Has a kept row be one that nobody can adopt. What is known of it by its pages stays known."""

    def least_needed(self) -> int:
        """The kept row that gives way first when there is no other; `NOBODY` where none is kept."""
        return NOBODY

    def give_way(self, pages: int) -> None:
        """Gives up so many pages, least needed first, before somebody needs them. Those that lie on no row are free
        then; rows of the others are retired, or parked."""

    def evict(self, pages: int, wait: bool) -> int:
        """Gives up what is kept, least needed first, until so many pages are free, or will be as soon as nothing reads
        them, for which it waits if it is to. Returns how many are free."""
        return 0

    def reset(self) -> None:
        """Forgets all, after an interruption: what was held is nobody's then."""

    def close(self) -> None:
        """Gives all up, with the cache."""

    def check(self) -> None:
        """Checks its books.

        Raises:
            InvariantError: one is wrong; the message says which.
        """


class Keeping:
    """Where rows, and what serves them, find who keeps: nobody before the first sequence whose tokens are given."""

    def __init__(self) -> None:
        self.keeper = Keeper()
