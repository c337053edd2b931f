"""How much memory Linux lets this process have."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path

from ..errors import DriverError


def memory() -> tuple[int, int]:
    """Free and total bytes: the machine's, or those of the container around this process where they are less."""
    kib = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    free, total = int(kib["MemAvailable"]) << 10, int(kib["MemTotal"]) << 10
    with suppress(DriverError, ValueError):  # there is no cgroup, or "max" is its limit
        limit, used = (int(read(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        free, total = min(free, limit - used), min(total, limit)
    return max(free, 0), total


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise DriverError("open", errno.errorcode.get(error.errno or 0, str(error.errno)), path) from None
