"""Processes of this machine: whether they live, and which numbers they have."""

from __future__ import annotations

import os
from pathlib import Path


def start_of(pid: int) -> int | None:
    """When a living process was started, in clock ticks since the system was: together with its number this names a
    process for ever. None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def namespace() -> int:
    """The namespace that process numbers of this process belong to: containers have their own."""
    return os.stat("/proc/self/ns/pid").st_ino
