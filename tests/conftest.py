"""What tests share: devices, small geometries, and child processes for what kills a process."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import faulty
import leftovers
import pytest
import torch
from hypothesis import HealthCheck, settings

import vmmkv
from vmmkv.compiled.code import digest, make
from vmmkv.compiled.make import LIBRARIES
from vmmkv.driver.driver import Driver, open_driver
from vmmkv.kernels.folders import cache_folder

ROUNDS = int(os.environ.get("VMMKV_ROUNDS", "1"))
"""How many times as much is done of what is done at random: `VMMKV_ROUNDS=10 python -m pytest`."""

SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
"""What is said of a machine, and of bad luck, is no failure."""
CALM = {"deadline": None, "suppress_health_check": SLOWNESS, "print_blob": True, "max_examples": 50 * ROUNDS}
settings.register_profile("default", settings.get_profile("default"), **CALM)
settings.load_profile("default")  # where CI is set Hypothesis would take one of its own: the same examples in each run

if not torch.cuda.is_available():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # kernels run in Numba's simulator, on host memory
    # torch believes what the processor says of vectors: to compile a program for each kind of them, and run it, takes
    # longer than all that the tests have compiled.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Few programs are compiled: to prepare torch's header for them takes as long as three of them.
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # without a pool of threads or processes that stays
torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels are tested."""


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


ROOT = Path(__file__).parent.parent


def some(number: int, few: int) -> list[int]:
    """Of so many things any few, others in each run: with enough rounds all of them."""
    return Random().sample(range(number), min(number, few * ROUNDS))


def few(number: int, group: str, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which a run takes so many; where there is a GPU it takes all."""
    return [pytest.param(value, marks=pytest.mark.few(number, group), id=str(value)) for value in values]


def each_with_few(number: int, each: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """The same for two parameters: each comes with so many of the others."""
    pairs = itertools.product(each, others)
    return [pytest.param(*pair, marks=pytest.mark.few(number, pair[0])) for pair in pairs]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """In a fresh clone compiles all machine code at once, on all cores: the processes of a run would wait for one."""
    if not hasattr(session.config, "workerinput"):
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {name: f"{name}-{digest(import_module(name).SOURCES)}-*.bc" for name in LIBRARIES}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: make(name, folder), [name for name in names if not [*folder.glob(names[name])]]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """While all is imported little is garbage; and to look for garbage among it, which many tests have Python do, would
    take a third of a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Nor is what tests have imported, when another file's begin: many tests look for garbage after each operation."""
    result = yield
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    mark_by_device(items)  # before `-m gpu` chooses
    result = yield
    if not torch.cuda.is_available():
        leave_out(config, items)
    return result


def mark_by_device(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        return
    for item in items:
        if hasattr(getattr(item, "module", None), "DEVICE"):  # where there is a GPU, kernels are tested on it
            item.add_marker(pytest.mark.gpu)
        parameters = getattr(item, "callspec", None)
        if "simulator" in item.keywords and (parameters is None or parameters.params.get("device", "cpu") == "cpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs kernels on host memory: where there is a GPU they run there")
            )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of what is marked `few` all but so many, others in each run. All processes of a run leave out the same."""
    random = Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    groups: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("few")) and "gpu" not in item.keywords:
            groups.setdefault((item.nodeid.split("[")[0], mark.args), []).append(item)
    left_out: set[pytest.Item] = set()
    for (_, (few, *_)), group in groups.items():
        left_out.update(random.sample(group, max(0, len(group) - few * ROUNDS)))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each core. With a GPU none beside this one: tests count the memory of a GPU, which is one."""
    return 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, neighbours stay in one: they share what is made once, like models and fixtures."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


_at_first = leftovers.Living()
"""What there was when the test began."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process or a listening socket behind. A fixture with a wider scope
    starts what it needs before this one, and ends it."""
    global _at_first
    _at_first = leftovers.Living()
    yield
    if left := leftovers.left_since(_at_first):
        pytest.fail(f"left behind: {', '.join(left)}")


@pytest.fixture(autouse=True)
def _no_driver_is_misused() -> Iterator[None]:
    """Fails a test in which a `FaultyDriver` has refused a call as misuse, also if the caller ignored its status."""
    faulty.MISUSE.clear()
    yield
    misuse, faulty.MISUSE[:] = list(faulty.MISUSE), []
    if misuse:
        pytest.fail(f"a driver was misused: {'; '.join(map(str, misuse))}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def undebugged(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what counts fills, fences or capacities, which debugging changes."""
    monkeypatch.delenv("VMMKV_DEBUG", raising=False)


def small_driver(device: str) -> Driver:
    """Pages as small as the device has them: 4 KiB on the host, 2 MiB on a GPU."""
    return open_driver(device, 4096 if device == "cpu" else None)


def small_layout(driver: Driver, **kwargs: object) -> vmmkv.KVLayout:
    """A token record of 3/16 of a page, so that tokens straddle pages."""
    head_dim = driver.page_size // 256
    return vmmkv.KVLayout(num_layers=3, num_kv_heads=2, head_dim=head_dim, dtype=torch.float32, **kwargs)  # type: ignore[arg-type]


def on_driver(driver: Any, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes a cache, a pool or a tensor on a driver that a test has made."""
    if driver is None:
        return make(*args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        open_drivers_with(patch, lambda *_: driver)
        return make(*args, **kwargs)


def open_drivers_with(patch: pytest.MonkeyPatch, opening: Callable[..., Any]) -> None:
    """Has caches, pools and tensors open their drivers by a function of a test's."""
    for module in ("vmmkv.pool", "vmmkv.cache"):
        patch.setattr(f"{module}.open_driver", opening)


@pytest.fixture
def make_cache(device: str) -> Callable[..., vmmkv.KVCache]:
    """Makes a cache of 4 rows of 100 tokens and 40 pages, unless asked otherwise."""

    def make(
        max_sequences: int = 4, max_seq_len: int = 100, pages: int = 40, layers_per_range: int | None = None, **kwargs
    ):
        driver = kwargs.pop("driver", None) or small_driver(device)
        layout = kwargs.pop("layout", None) or small_layout(driver, layers_per_range=layers_per_range)
        # Only what is asked for is mapped, page by page.
        options = {"max_bytes": pages * driver.page_size, "lookahead": 0, "large_frames": False} | kwargs
        return on_driver(driver, vmmkv.KVCache, layout, max_sequences, max_seq_len, **options)

    return make


def randoms(number: int) -> Iterator[Random]:
    """What chooses in so many runs. The output of a test that fails ends with that of the run that has failed."""
    for _ in range(number * ROUNDS):
        seed = Random().randrange(1 << 32)
        print(f"Random({seed})")
        yield Random(seed)


@pytest.fixture
def seed() -> int:
    """A number to begin with, which the output of a test that fails names."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    return seed


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


PATIENCE = 300.0
"""Seconds after which a test gives up waiting: a last resort, far beyond what a busy machine needs."""


@contextmanager
def calls(owner: Any, name: str) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Watches a method that another thread calls. Yields a function that waits until a condition holds, and checks the
    condition when the method is called and when it returns."""
    method, ticks = getattr(owner, name), threading.Semaphore(0)

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        ticks.release()
        try:
            return method(*args, **kwargs)
        finally:
            ticks.release()

    def until(condition: Callable[[], object]) -> None:
        while not condition():
            assert ticks.acquire(timeout=PATIENCE), f"{name} was not called for {PATIENCE} seconds"

    with mock.patch.object(owner, name, watched):
        yield until


def soon(condition: Callable[[], object]) -> None:
    """Waits for what only a server tells that is asked again and again, as its metrics."""
    pause = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"it has not come to that in {PATIENCE:.0f} seconds")


def join(*threads: threading.Thread) -> None:
    """Waits for the end of threads, however much they have to do when there are many rounds."""
    for thread in threads:
        thread.join(PATIENCE * ROUNDS)
        assert not thread.is_alive(), f"{thread.name} runs for ever"


def seed_alone(number: int) -> None:
    """Seeds torch's global generator, for a test in which no other thread may draw from it.

    Raises:
        AssertionError: the test has other threads, and the numbers would depend on which thread draws first.
    """
    others = leftovers.drawing_threads(_at_first)
    assert not others, f"the global generator is seeded while other threads run: {others}"
    torch.manual_seed(number)


@functools.cache
def _zygote(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tests" / "zygote.py"), *args]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    leftovers.OF_RUN.add(process.pid)
    atexit.register(process.communicate)  # ends it
    return process


def run_python(
    code: str, *args: str, bare: bool = False, fresh: bool = False, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with the tests' helpers importable.

    The process is forked from one that has imported torch and vmmkv and has loaded vmmkv's machine code. A bare one has
    imported torch alone, a fresh one nothing.
    """
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n" + textwrap.dedent(code)
    if fresh:
        return subprocess.run([sys.executable, "-c", script, *args], env=env, capture_output=True, text=True)
    with TemporaryDirectory() as folder:
        output = [Path(folder) / "stdout", Path(folder) / "stderr"]
        for path in output:
            path.touch()
        child = {
            "code": script,
            "arguments": args,
            "environment": env or dict(os.environ),
            "output": [*map(str, output)],
        }
        zygote = _zygote("bare") if bare else _zygote()
        assert zygote.stdin
        assert zygote.stdout
        print(json.dumps(child), file=zygote.stdin, flush=True)
        return subprocess.CompletedProcess(args, int(zygote.stdout.readline()), *(path.read_text() for path in output))
