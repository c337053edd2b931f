"""Places: in which rows of a page table each frame lies, so that nobody has to look for it in all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class Places:
    """See above. Most frames lie in one row, so that is all that is kept of them."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}
        """By frame: one of its rows."""
        self._others: dict[int, dict[int, None]] = {}
        """By frame that lies in several: the other ones."""

    def __len__(self) -> int:
        """How many there are: a frame has as many as it has rows."""
        return len(self._row) + sum(map(len, self._others.values()))

    def rows(self, frame: int) -> Iterator[int]:
        """Those that a frame lies in."""
        if frame in self._row:
            yield self._row[frame]
            yield from self._others.get(frame, ())

    def add(self, row: int, frames: Collection[int]) -> None:
        """Says that frames lie in a row, too."""
        if self._row.keys().isdisjoint(frames):
            self._row.update(dict.fromkeys(frames, row))
            return
        for frame in frames:
            if frame not in self._row:
                self._row[frame] = row
            elif frame in self._others:
                self._others[frame][row] = None
            else:
                self._others[frame] = {row: None}

    def remove(self, row: int, frames: Collection[int]) -> None:
        """Says that frames lie in a row no more."""
        for frame in frames:
            others = self._others.get(frame)
            if others is None:
                self._row.pop(frame, None)
                continue
            if self._row[frame] == row:
                self._row[frame], _ = others.popitem()
            else:
                others.pop(row, None)
            if not others:
                del self._others[frame]
