"""Processes of this machine: whether they live."""

from __future__ import annotations

from pathlib import Path


def start_of(pid: int) -> int | None:
    """When a living process was started, in clock ticks since the system was: together with its number this names a
    process for ever. None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
