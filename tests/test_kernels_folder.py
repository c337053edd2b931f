"""Where compiled kernels are kept: whoever the user is, and whatever cannot be read or written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import run_python

COMPILES = """
    import os, sys
    from pathlib import Path

    def make_nothing():
        pass

    from vmmkv.kernels import compiler, folders
    compiles = []
    compiler.to_ptx = lambda *args: compiles.append(1) or "the kernel"
    kernel = compiler.Kernel(make_nothing, (), (), 32)
    kernel.ptx((8, 0))  # reads all that this user may read, and another may not
    compiles.clear()
    user = int(sys.argv[1])
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.environ.pop("XDG_CACHE_HOME")
    for _ in range(2):
        assert kernel.ptx((8, 0)) == "the kernel"
    print(len(compiles), folders.cache_folder())
"""
NOBODY = 54321


def compiled(cache: Path, user: int, **environment: str) -> tuple[int, Path]:
    """How often a process with next to no environment compiles a kernel that it needs twice, and where it is kept."""
    child = run_python(COMPILES, str(user), env={"XDG_CACHE_HOME": str(cache)} | environment)
    assert child.returncode == 0, child.stderr
    count, folder = child.stdout.split()
    return int(count), Path(folder)


@pytest.fixture
def all_can_enter() -> Iterator[Path]:
    """A folder that other users can enter, which they cannot where pytest has its own."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that is in no list")
def test_a_user_without_a_home_and_without_a_name(all_can_enter: Path) -> None:
    """Keeps them in a folder for temporary files that is the user's alone, also for the next process."""
    shared = all_can_enter / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / f"vmmkv-{NOBODY}-0").mkdir()  # another user's, of this name
    counts = []
    for _ in range(2):
        count, folder = compiled(all_can_enter / "cache", NOBODY, TMPDIR=str(shared))
        counts.append(count)
        assert folder.parent == shared
        assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (NOBODY, 0o700)
        assert len(list(folder.glob("*.ptx"))) == 1
    assert counts == [1, 0]
    assert not list((shared / f"vmmkv-{NOBODY}-0").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_cannot_be_read_is_done_without(tmp_path: Path) -> None:
    """Such as that of the user who started the process."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    assert compiled(tmp_path / "cache", NOBODY, HOME=str(home)) == (2, home / ".cache" / "vmmkv")
    assert not list(home.iterdir())


def test_a_home_is_used(tmp_path: Path) -> None:
    assert compiled(tmp_path / "cache", 0, HOME=str(tmp_path)) == (1, tmp_path / ".cache" / "vmmkv")
