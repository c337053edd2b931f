"""How much memory Linux lets this process have."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import DriverError


def memory() -> tuple[int, int]:
    """Free and total bytes: the machine's, or those of the cgroups around this process where they are less."""
    kib = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    free, total = int(kib["MemAvailable"]) << 10, int(kib["MemTotal"]) << 10
    for limit, used in cgroup_limits():
        free, total = min(free, limit - used), min(total, limit)
    return max(free, 0), total


def cgroup_limits(
    listed: str | Path = "/proc/self/cgroup", mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """The limit of each cgroup that this process is in, nested ones too, and what is used of it, in bytes."""
    for line in read(listed).splitlines():
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


def read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise DriverError("open", errno.errorcode.get(error.errno or 0, str(error.errno)), str(path)) from None
