"""Folders of this user alone: for compiled code, and below those that all users may write to."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp


def cache_folder() -> Path:
    """Returns where compiled code is kept, which need not exist yet.

    Raises:
        OSError: there is no place for it.
    """
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "vmmkv"
    try:
        return Path.home() / ".cache" / "vmmkv"
    except RuntimeError:  # there is neither HOME nor an entry of the user in passwd
        return private_folder(Path(gettempdir()))


def private_folder(root: Path) -> Path:
    """Returns a folder below `root` that no other user can read, write to, or put another in the place of; makes one
    where there is none.

    Raises:
        OSError: there is none, and none can be made.
    """
    if not _keeps_others_out(root):
        raise PermissionError(f"{root} belongs to another user, who could replace what is put there")
    folders = private_folders(root)
    return folders[0] if folders else Path(mkdtemp(prefix=_prefix(), dir=root))


def private_folders(root: Path) -> list[Path]:
    """Returns existing private folders. Entries of other users under such a name are passed over, links included."""
    with suppress(OSError):
        if _keeps_others_out(root):
            return [folder for folder in sorted(root.glob(f"{_prefix()}*")) if _is_private(folder)]
    return []


def _prefix() -> str:
    return f"vmmkv-{os.geteuid()}-"


def _keeps_others_out(root: Path) -> bool:
    """Whether no other user can rename or remove what this user puts into a folder."""
    status = root.stat()
    return status.st_uid == os.geteuid() or bool(status.st_mode & stat.S_ISVTX)


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
