"""Where the machine code of compiled functions comes from: a wheel, a folder, or the compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import llvmlite.binding as llvm
import pytest
from conftest import ROOT, run_python

LIBRARY = """
    from .compiled.code import on_first_use
    from .small_functions import double

    ENTRIES, SOURCES = [double], ["small_functions.py"]
    __getattr__ = on_first_use(__name__, ENTRIES, SOURCES)
    del double
"""
FUNCTIONS = """
    import numpy

    from .compiled import entry

    @entry
    def double(number: int) -> int:
        return 2 * number
"""
USE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    sys.dont_write_bytecode = True
    import vmmkv
    from vmmkv import small
    assert vmmkv.__file__.startswith(sys.argv[1]), vmmkv.__file__
    assert small.double(4) == 8 and "numba" not in sys.modules
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package, with a small library."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "vmmkv", copy / "vmmkv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", copy / "vmmkv" / "kernels")
    (copy / "vmmkv" / "small.py").write_text(dedent(LIBRARY))
    (copy / "vmmkv" / "small_functions.py").write_text(dedent(FUNCTIONS))
    return copy


def use(copy: Path, cache: Path) -> str:
    """Uses the small library of a copy; returns what that said to the terminal."""
    child = run_python(USE, str(copy), env=os.environ | {"XDG_CACHE_HOME": str(cache)}, bare=True)
    assert child.returncode == 0, child.stderr
    return child.stderr


def test_code_is_compiled_once_for_each_content_of_its_sources(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert use(copied, cache).startswith("vmmkv: compiling vmmkv.small once, for ")
    assert use(copied, cache) == ""
    files = {path.name for path in (cache / "vmmkv").glob("*.bc")}
    assert {name.rsplit("-", 1)[1] for name in files} == {"x86_64.bc", "aarch64.bc"}
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for name in files:  # both processors' bitcode becomes machine code
        module = llvm.parse_bitcode((cache / "vmmkv" / name).read_bytes())
        assert module.get_function("vmmkv_double")
        machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=2)
        assert len(machine.emit_object(module)) > 100
    source = copied / "vmmkv" / "small_functions.py"
    source.write_text(source.read_text() + "\n")
    assert "compiling" in use(copied, cache)
    assert len([*(cache / "vmmkv").glob("*.bc")]) == 4


def test_what_a_wheel_ships_is_loaded_and_needs_no_folder(copied: Path, tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    assert "compiling" in use(copied, no_folder)  # for this process alone
    shipped = copied / "vmmkv" / "compiled" / "machine_code"
    shipped.mkdir(exist_ok=True)
    script = copied / "vmmkv" / "compiled" / "make.py"
    subprocess.run([sys.executable, "-P", str(script), "vmmkv.small", str(shipped)], check=True)
    assert use(copied, no_folder) == ""


def test_code_that_allocates_or_raises_is_refused(copied: Path, tmp_path: Path) -> None:
    source = copied / "vmmkv" / "small_functions.py"
    source.write_text(source.read_text().replace("2 * number", "len(numpy.zeros(2 * number))"))
    with pytest.raises(AssertionError, match="a function there allocates, or raises"):
        use(copied, tmp_path)
