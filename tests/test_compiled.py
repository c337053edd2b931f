"""Compiled functions: machine code, interpreted and checked they do the same; and where their code comes from."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, run_python, small_driver
from faulty import FaultyDriver

from vmmkv.compiled import code
from vmmkv.driver.calls import Calls
from vmmkv.driver.meter import Meter
from vmmkv.driver.table import MAP, SET_ACCESS, SET_READ_ACCESS, UNMAP, VACANT
from vmmkv.errors import DriverError

MODES = {"machine code": {}, "interpreted": {"VMMKV_INTERPRET": "1"}, "checked": {"NUMBA_BOUNDSCHECK": "1"}}
SIZES = {3: 1, 0: 1, 7: 1, 8: 4, 12: 4}
"""By the number of a frame: its pages."""


def life(random: Random) -> list[object]:
    """What many calls come to, with some of them failing."""
    driver, meter = FaultyDriver(small_driver("cpu")), Meter()
    calls, size = Calls(driver, meter), driver.page_size  # type: ignore[arg-type]
    address, handles = driver.reserve(16 * size), np.full(16, VACANT)
    seen: list[object] = []
    for _ in range(random.randrange(4)):
        driver.fail(random.choice(["create", "release", "map", "set_access", "unmap", "any"]), random.randrange(6))

    def note(outcome: Any) -> None:
        seen.append(outcome.done)
        try:
            outcome.check()
        except DriverError as error:
            seen.append(str(error))

    def run(steps: list[tuple[int, ...]]) -> None:
        note(calls.run([*chain.from_iterable(steps)]))

    note(calls.create(handles, [3, 0, 7], 1))
    note(calls.create(handles, [8, 12], 4))
    seen.append((handles != VACANT).tolist())
    made = [frame for frame in SIZES if handles[frame] != VACANT]
    places = dict(zip(made, np.cumsum([1, *(SIZES[frame] for frame in made)]).tolist()))
    ranges = [(address + place * size, SIZES[frame] * size) for frame, place in places.items()]
    maps = [(MAP, *each, int(handles[frame])) for each, frame in zip(ranges, made)]
    run([*maps, *((SET_READ_ACCESS, *each, VACANT) for each in ranges)])
    there = [each for each in ranges if each[0] in driver.mapped]
    run([(SET_ACCESS, *each, VACANT) for each in there[1:]])
    seen += [len(driver.accessible), len(driver.writable)]
    run([*((UNMAP, *each, VACANT) for each in there), *maps[:1]])
    driver.heal()
    driver.unmaps_anything = True
    run([(UNMAP, address, 16 * size, VACANT)])
    for pages in (1, 4):
        note(calls.release(handles, [frame for frame in made if SIZES[frame] == pages], pages))
    assert (handles == VACANT).all()
    assert not driver.handles
    driver.free(address, 16 * size)
    return [*seen, meter.spent[:, 0].tolist()]


LIVES = """
    import conftest
    from random import Random
    from test_compiled import life
    for seed in range(30):
        print(life(Random(seed)))
"""


def test_machine_code_does_what_the_source_says() -> None:
    """Also with bounds checks."""
    told = {}
    for mode, switches in MODES.items():
        child = run_python(LIVES, env=os.environ | switches, fresh=True)
        assert child.returncode == 0, f"{mode}: {child.stderr}"
        told[mode] = child.stdout
    assert told["machine code"].count("\n") == 30
    assert set(told.values()) == {told["machine code"]}


def test_the_source_itself_comes_through() -> None:
    """Interpreted, where an index outside of a table is an error: on a device that runs late, with failing calls."""
    seed = Random().randrange(1 << 32)
    machine = f"Machine(Random({seed}), faults=True).run(150)"
    code = f"import conftest; from random import Random; from core_machine import Machine; {machine}"
    child = run_python(code, env=os.environ | MODES["interpreted"], fresh=True)
    assert child.returncode == 0, f"{machine}: {child.stderr}"


def test_errors_leave_nothing_for_the_garbage_collector() -> None:
    import gc
    import weakref

    driver = FaultyDriver(small_driver("cpu"))
    calls = Calls(driver, Meter())  # type: ignore[arg-type]
    driver.fail("create")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(DriverError):
            calls.create(np.full(1, VACANT), [0], 1).check()
        gone = weakref.ref(calls)
        del calls
        assert gone() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- where code comes from

USE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import vmmkv
    from vmmkv.driver.driver import open_driver
    assert vmmkv.__file__.startswith(sys.argv[1]), vmmkv.__file__
    assert open_driver("cpu").create() and "numba" not in sys.modules
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package."""
    shutil.copytree(ROOT / "vmmkv", tmp_path / "copy" / "vmmkv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", tmp_path / "copy" / "vmmkv" / "kernels")
    return tmp_path / "copy"


def use(copy: Path, cache: Path) -> str:
    """Uses a driver of a copy; returns what that said to the terminal."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    child = run_python(USE, str(copy), env=environment, fresh=True)
    assert child.returncode == 0, child.stderr
    return child.stderr


def test_code_is_compiled_once_for_each_content_of_its_sources(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert use(copied, cache).startswith("vmmkv: compiling vmmkv.driver.entries once, for ")
    assert use(copied, cache) == ""
    files = {path.name for path in (cache / "vmmkv").glob("*.bc")}
    assert {name.rsplit("-", 1)[1] for name in files} == {"x86_64.bc", "aarch64.bc"}
    source = copied / "vmmkv" / "driver" / "running.py"
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
    subprocess.run([sys.executable, "-P", str(script), "vmmkv.driver.entries", str(shipped)], check=True)
    assert use(copied, no_folder) == ""


def test_a_file_that_cannot_be_read_is_made_anew(copied: Path, tmp_path: Path) -> None:
    use(copied, tmp_path)
    for path in (tmp_path / "vmmkv").glob("*.bc"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "compiling" in use(copied, tmp_path)
    assert use(copied, tmp_path) == ""


def test_threads_load_one_copy() -> None:
    """Functions of a library share words, so that all have to be of the same."""
    child = run_python(LOADING, fresh=True)
    assert (child.returncode, child.stderr) == (0, "")


LOADING = """
    import threading
    from vmmkv.compiled import code
    from vmmkv.driver import entries

    linked, link = [], code.link
    names = [function.__name__ for function in entries.ENTRIES]

    def counted(*arguments):
        linked.append(link(*arguments))
        return linked[-1]

    code.link = counted
    threads = [threading.Thread(target=getattr, args=(entries, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(linked) == 1, len(linked)
"""


def test_sources_that_do_not_compile_are_told(copied: Path, tmp_path: Path) -> None:
    source = copied / "vmmkv" / "driver" / "running.py"
    source.write_text(source.read_text().replace("place[0] += calls", "place[0] += 'x'"))
    with pytest.raises(AssertionError, match=r"RuntimeError: vmmkv.driver.entries does not compile"):
        use(copied, tmp_path)


def test_code_that_allocates_or_raises_is_refused(copied: Path, tmp_path: Path) -> None:
    source = copied / "vmmkv" / "driver" / "running.py"
    source.write_text(
        source.read_text().replace("    done, start = 0, now", "    np.zeros(count)\n    done, start = 0, now")
    )
    with pytest.raises(AssertionError, match="a function there allocates, or raises"):
        use(copied, tmp_path)


def test_bitcode_becomes_machine_code_of_both_processors(tmp_path: Path) -> None:
    import llvmlite.binding as llvm

    code.make("vmmkv.driver.entries", tmp_path)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for path in tmp_path.glob("*.bc"):
        module = llvm.parse_bitcode(path.read_bytes())
        machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=2)
        assert len(machine.emit_object(module)) > 10_000
    assert platform.machine() in {path.stem.rsplit("-", 1)[1] for path in tmp_path.glob("*.bc")}
