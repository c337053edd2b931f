"""The contract of a memory system: one suite, every driver."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from conftest import run_python, small_driver
from faulty import FaultyDriver

from vmmkv.driver.driver import Driver, open_driver
from vmmkv.driver.fence import Fence
from vmmkv.driver.table import FILL
from vmmkv.errors import DeviceError, DriverError, DriverOutOfMemoryError, LayoutError
from vmmkv.tensors import export_range

NUM_PAGES = 4


@pytest.fixture(params=["plain", "faulty"])
def driver(request: pytest.FixtureRequest, device: str) -> Driver:
    inner = small_driver(device)
    return inner if request.param == "plain" else FaultyDriver(inner)  # type: ignore[return-value]


@pytest.fixture
def address(driver: Driver) -> Iterator[int]:
    nbytes = NUM_PAGES * driver.page_size
    address = driver.reserve(nbytes)
    yield address
    driver.synchronize()
    driver.free(address, nbytes)


def view(driver: Driver, address: int, pages: int = 1) -> torch.Tensor:
    return export_range(address, pages * driver.page_size, driver.device, owner=driver)


def put(driver: Driver, address: int):
    """Makes a page and maps it."""
    handle = driver.create()
    driver.map(address, handle)
    driver.set_access(address, driver.page_size)
    return handle


def drop(driver: Driver, address: int, *handles) -> None:
    """Unmaps a page, and releases it if it is given."""
    driver.synchronize()
    driver.unmap(address, driver.page_size)
    for handle in handles:
        driver.release(handle)


def test_each_address_shows_the_bytes_of_its_page(driver: Driver, address: int) -> None:
    """Against plain bytes. New pages are zero; they go elsewhere, lie at two addresses, or scattered in a range that
    reads as one."""
    size, random = driver.page_size, Random()
    held: dict[Any, torch.Tensor] = {}
    mapped: dict[int, Any] = {}

    def at(place: int) -> int:
        return address + place * size

    def unmap(place: int) -> None:
        drop(driver, at(place))
        if (handle := mapped.pop(place)) not in mapped.values() and random.random() < 0.5:
            driver.release(handle)
            del held[handle]

    for _ in range(60):
        what, place = random.choice(["map", "map", "unmap", "write", "fill", "copy"]), random.randrange(NUM_PAGES)
        if what == "map" and place not in mapped:
            handle = driver.create() if not held or random.random() < 0.5 else random.choice([*held])
            held.setdefault(handle, torch.zeros(size, dtype=torch.uint8, device=driver.device))
            driver.map(at(place), handle)
            driver.set_access(at(place), size)
            mapped[place] = handle
        elif what == "unmap" and place in mapped:
            unmap(place)
        elif what == "write" and place in mapped:
            held[mapped[place]].random_()
            view(driver, at(place)).copy_(held[mapped[place]])
        elif what == "fill" and place in mapped:
            value = random.randrange(256)
            driver.make_step(FILL, at(place), size, value, streams=[driver.current_stream()] * 2)
            held[mapped[place]].fill_(value)
        elif what == "copy" and place in mapped:
            source = random.choice([*mapped])
            if mapped[source] != mapped[place]:
                driver.copy(at(place), at(source), size // 2)
                held[mapped[place]][: size // 2] = held[mapped[source]][: size // 2]
        for first, end in combinations(range(NUM_PAGES + 1), 2):
            if all(each in mapped for each in range(first, end)):
                expected = torch.cat([held[mapped[each]] for each in range(first, end)])
                assert torch.equal(view(driver, at(first), end - first), expected)
    for place in [*mapped]:
        unmap(place)
    for handle in held:
        driver.release(handle)


def test_an_event_passes_and_memory_is_told(driver: Driver) -> None:
    fence = Fence.after(driver, [driver.current_stream()])
    fence.wait()
    assert fence.passed()
    free, total = driver.memory_info()
    assert 0 < free <= total


def test_works_from_a_thread_that_is_new_to_the_device(driver: Driver, address: int) -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: drop(driver, address, put(driver, address))).result()


def test_a_failed_call_changes_nothing_and_has_the_drivers_own_name(device: str) -> None:
    driver = small_driver(device)
    with pytest.raises(DriverError) as caught:
        driver.reserve(1 << 60)
    assert caught.value.call in ("cuMemAddressReserve", "mmap")
    assert caught.value.code in ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE", "ENOMEM")
    assert caught.value.code in str(caught.value)


def test_page_size_is_a_multiple_of_the_granularity(device: str) -> None:
    driver = open_driver(device)
    assert driver.page_size == 2 << 20
    with pytest.raises(LayoutError, match="multiple"):
        open_driver(device, 1000)


def test_unknown_device() -> None:
    with pytest.raises(DeviceError, match="mps"):
        open_driver("mps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match="device='cpu'"):
        open_driver("cuda")


@pytest.mark.gpu
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match=f"sees {torch.cuda.device_count()} "):
        open_driver("cuda:99")


STRAY_ACCESS = """
    import resource, sys, torch
    from conftest import on_driver, small_driver
    from vmmkv.tensors import export_range
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    device, what = sys.argv[1:]
    driver = small_driver(device)
    size = driver.page_size
    address = driver.reserve(3 * size)
    handle = driver.create()
    for place, writable in ((address, True), (address + size, False)):  # the second is a read-only alias
        driver.map(place, handle)
        driver.set_access(place, size, writable)
    data = export_range(address, 3 * size, driver.device, driver)
    data[:size] = 1
    print("read", data[size : 2 * size].sum().item() == size, flush=True)
    try:
        if what == "write":
            data[size : 2 * size] = 1
        elif what == "unmapped":
            data.sum().item()
        else:
            driver.synchronize()
            driver.unmap(address, size)
            data[:size].sum().item()
        torch.cuda.synchronize() if device == "cuda" else None
    except RuntimeError as error:
        sys.exit("illegal memory access" if "illegal memory access" in str(error) else str(error))
"""


@pytest.mark.parametrize("what", ["write", "unmapped", "after unmap"])
def test_a_stray_access_is_a_fault(device: str, what: str) -> None:
    """A write through a read-only alias, and reads where no page is."""
    child = run_python(STRAY_ACCESS, device, what)
    assert child.stdout == "read True\n"
    if device == "cpu":
        assert child.returncode == -11  # SIGSEGV
    else:
        assert child.returncode == 1
        assert "illegal memory access" in child.stderr


# ---------------------------------------------------------------------- the host: files, forks and limits


CLOSED_AT_EXIT = """
    import atexit, sys, tempfile

    def last():  # registered before anything of vmmkv, so called after it
        strangers = [tempfile.TemporaryFile() for _ in range(9)]
        for stranger in strangers:
            stranger.write(b"x" * 99 * driver.page_size)
            stranger.flush()
        sequence.extend(50)
        sequence.k(0).fill_(7)
        cache.close()
        for stranger in strangers:
            stranger.seek(0)
        print(all(stranger.read() == b"x" * 99 * driver.page_size for stranger in strangers))

    atexit.register(last)
    import vmmkv
    from conftest import on_driver, small_driver, small_layout
    driver = small_driver("cpu")
    cache = on_driver(driver, vmmkv.KVCache, small_layout(driver), 4, 100, max_bytes=30 * driver.page_size)
    sequence = cache.sequence(5)
"""


def test_a_cache_that_is_closed_at_the_very_end_leaves_other_files_alone() -> None:
    child = run_python(CLOSED_AT_EXIT, fresh=True)  # in others the order at the end is another
    assert (child.stdout, child.stderr) == ("True\n", "")


FORKED = """
    import os, resource, warnings
    from conftest import on_driver, small_driver
    from vmmkv.tensors import export_range
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork() beside threads
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def page(driver, writable):
        address, handle = driver.reserve(2 * driver.page_size), driver.create()
        for place, access in (address, True), (address + driver.page_size, writable):
            driver.map(place, handle)
            driver.set_access(place, driver.page_size, access)
        return export_range(address, 2 * driver.page_size, driver.device, driver)

    def child(work):
        if (number := os.fork()) == 0:
            work()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

    driver = small_driver("cpu")
    data = page(driver, False)
    data[: driver.page_size] = 3
    print(child(lambda: data[:1].fill_(9)), child(lambda: data[-1].item()))
    print(child(lambda: page(small_driver("cpu"), True).fill_(9)), (data == 3).all().item())
"""


def test_a_forked_child_faults_on_its_parents_pages() -> None:
    """Written to or read; pages of its own it may have."""
    child = run_python(FORKED)
    assert (child.stdout, child.stderr) == ("-11 -11\n0 True\n", "")


FORKED_DRIVER = """
    import os, sys, vmmkv, warnings
    from conftest import on_driver, small_driver, small_layout
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork() beside threads
    driver = small_driver(sys.argv[1])
    address, handle = driver.reserve(driver.page_size), driver.create()
    if (child := os.fork()) == 0:
        for operation in (
            lambda: driver.reserve(driver.page_size),
            driver.create,
            lambda: driver.map(address, handle),
            lambda: driver.release(handle),
            lambda: driver.unmap(address, driver.page_size),
            lambda: driver.free(address, driver.page_size),
            lambda: on_driver(driver, vmmkv.KVCache, small_layout(driver), 4, 100, max_bytes=9 * driver.page_size),
        ):
            try:
                operation()
            except vmmkv.ForkError as error:
                print("spawn" in str(error), end=" ", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    driver.map(address, handle)
    driver.set_access(address, driver.page_size)
"""


def test_a_forked_child_has_no_part_in_its_parents_driver(device: str) -> None:
    """Nor in its addresses: where the parent's pages are, the child may have put something else."""
    child = run_python(FORKED_DRIVER, device)
    assert (child.returncode, child.stdout, child.stderr) == (0, "True " * 7, "")


@contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    """Lowers a limit of this process for a while."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize("left", [0, 1])
def test_no_more_files(left: int) -> None:
    """For the pages; and for them but not for what is read beside."""
    gc.collect()  # what other tests have left
    before = sorted(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file:
        most = file.fileno() + left
    with limited(resource.RLIMIT_NOFILE, most), pytest.raises(DriverError, match="failed with EMFILE"):
        small_driver("cpu").memory_info()
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_limit_of_file_sizes_is_named() -> None:
    driver = small_driver("cpu")
    with limited(resource.RLIMIT_FSIZE, 3 * driver.page_size):
        handles = [driver.create() for _ in range(3)]
        with pytest.raises(DriverOutOfMemoryError) as caught:
            driver.create()
    assert caught.value.code == "EFBIG"
    assert caught.value.detail.startswith(f"no file, that of the pages included, may be longer than {3 * 4096} bytes")
    assert driver.create() not in handles
