"""Other processes of this user on this machine: whether they live, and where files about them lie."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir


def roots() -> list[Path]:
    """Folders below which private folders may lie, the best one first."""
    folders = [Path(runtime)] if (runtime := os.environ.get("XDG_RUNTIME_DIR")) else []
    folders.append(Path("/dev/shm"))
    with suppress(OSError):
        folders.append(Path(gettempdir()))
    return list(dict.fromkeys(folders))


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
