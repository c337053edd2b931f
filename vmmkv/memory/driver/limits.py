"""What Linux lets this process have: memory, and mappings.

Mappings (`/proc/self/maps`) are limited for the process as a whole, and at the limit nothing works any more: taking
the middle of a mapping away makes two of it, so even unmapping fails. What is counted of ours is therefore the most
that can come of it.

Invariants:
 1. `Mappings.own` is at least the number of mappings in reserved ranges, now and whatever is unmapped next: one for
    each page, and for each gap before, between and behind runs of pages. Linux merges some; whether it does is luck.
 2. A page, or a range, is added only while `SPARE` of all mappings are left to the rest of the process.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

from ...errors import DriverError

SPARE = 1 / 8
"""Of the mappings that there may be: for threads, libraries and large tensors, which ask nobody, and for unmapping."""

MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
MAPPINGS_HINT = f"a larger page_size takes fewer, {MAX_MAPPINGS} allows more"


def memory() -> tuple[int, int]:
    """Free and total bytes: the machine's, or those of the cgroups around this process where they are less."""
    kib = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    free, total = int(kib["MemAvailable"]) << 10, int(kib["MemTotal"]) << 10
    for limit, used in cgroup_limits():
        free, total = min(free, limit - used), min(total, limit)
    return max(free, 0), total


def cgroup_limits(
    listed: str | Path = "/proc/self/cgroup", mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """The limit of each cgroup that this process is in, nested ones too, and what is used of it, in bytes."""
    for line in _read(listed).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, alone or beside version 1
            roots, files = [mounted, mounted / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots, files = [mounted / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        groups = [root / path.lstrip("/") for root in roots]
        for folder in dict.fromkeys(folder for group in groups for folder in (group, *group.parents)):
            try:
                limit, used = (int((folder / name).read_text()) for name in files)
            except (OSError, ValueError):  # a container sees a part of the tree only; "max" is no limit
                continue
            yield limit, used


class Mappings:
    """The mappings of this process: what drivers may still add to them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all, as in a forked child, which inherits no pages."""
        self.own = 0
        self._pages: set[int] = set()
        self._ranges: dict[int, int] = {}
        self._allowed = 0
        self._lock = threading.RLock()  # a finalizer may come in between in the same thread

    def check(self, pages: int = 1) -> None:
        """Raises `DriverError` unless pages side by side, or a range, can be added.

        What others have is counted again whenever ours have grown by as many as are spare.
        """
        if self.own + pages + 1 > self._allowed:
            with self._lock:
                self._allowed = self._count(pages + 1)

    def _count(self, needed: int) -> int:
        """What `own` may grow to before it is time to count again."""
        limit = int(_read(MAX_MAPPINGS))
        starts = [int(line.split("-", 1)[0], 16) for line in _read("/proc/self/maps").splitlines()]
        ranges = list(self._ranges.items())
        inside = sum(bisect_left(starts, first + size) - bisect_left(starts, first) for first, size in ranges)
        others, spare = len(starts) - inside, int(limit * SPARE)
        room = limit - spare - others - self.own
        if room < needed:
            raise DriverError(
                "mmap",
                "ENOMEM",
                f"of the {limit} mappings that this process may have, pages take {self.own}, all else takes {others}, "
                f"and {spare} are kept for it and for unmapping; {MAPPINGS_HINT}",
            )
        return self.own + max(min(room, spare), needed)

    def add_range(self, address: int, nbytes: int) -> None:
        """Counts a reserved range."""
        with self._lock:
            self._ranges[address] = nbytes
            self.own += 1

    def remove_range(self, address: int) -> None:
        """Counts a range that was freed."""
        with self._lock:
            del self._ranges[address]
            self.own -= 1

    def add_page(self, address: int, nbytes: int) -> None:
        """Counts a page that was mapped: it takes two mappings in the middle of a gap, none where it closes one."""
        with self._lock:
            self._pages.add(address)
            neighbours = self._neighbours(address, address + nbytes, nbytes)
            self.own += 2 - neighbours  # nothing is called between reading and writing it: a handler may count, too

    def remove_pages(self, pages: range) -> None:
        """Counts pages that were unmapped, one behind the other; after an interruption some were not mapped."""
        with self._lock:
            for page in pages:
                if page in self._pages:
                    self._pages.remove(page)
                    neighbours = self._neighbours(page, page + pages.step, pages.step)
                    self.own -= 2 - neighbours

    def _neighbours(self, start: int, stop: int, page_size: int) -> int:
        return (start - page_size in self._pages) + (stop in self._pages)


mappings = Mappings()
"""Of this process: there is one limit for all drivers."""
os.register_at_fork(after_in_child=mappings.reset)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise DriverError("open", errno.errorcode.get(error.errno or 0, str(error.errno)), str(path)) from None
