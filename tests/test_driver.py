"""The contract of a memory system: one suite, every driver."""

from __future__ import annotations

import gc
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import run_python, small_driver
from faulty import FaultyDriver

from vmmkv.driver import host, limits
from vmmkv.driver.driver import Driver, open_driver
from vmmkv.errors import DeviceError, DriverError, LayoutError
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


def put(driver: Driver, address: int, writable: bool = True):
    """Makes a page and maps it."""
    handle = driver.create()
    driver.map(address, handle)
    driver.set_access(address, driver.page_size, writable)
    return handle


def drop(driver: Driver, address: int, *handles) -> None:
    driver.synchronize()
    driver.unmap(address, driver.page_size * len(handles))
    for handle in handles:
        driver.release(handle)


def test_fresh_pages_are_zero_also_after_release(driver: Driver, address: int) -> None:
    for _ in range(3):
        handle = put(driver, address)
        page = view(driver, address)
        assert not page.any()
        page.fill_(7)
        assert (page == 7).all()
        drop(driver, address, handle)


def test_one_page_at_two_addresses_is_one_memory(driver: Driver, address: int) -> None:
    """And keeps its bytes when it is mapped elsewhere."""
    handle, size = put(driver, address), driver.page_size
    data = torch.randint(0, 255, (size,), dtype=torch.uint8).to(driver.device)
    view(driver, address).copy_(data)
    for place in (address + size, address + 2 * size):
        driver.map(place, handle)
        driver.set_access(place, size, False)
    driver.synchronize()
    driver.unmap(address, 2 * size)
    assert torch.equal(view(driver, address + 2 * size), data)
    drop(driver, address + 2 * size, handle)


def test_scattered_pages_read_as_one_range(driver: Driver, address: int) -> None:
    handles = [driver.create() for _ in range(NUM_PAGES)]
    order = [handles[index] for index in torch.randperm(NUM_PAGES).tolist()]
    for index, handle in enumerate(order):
        driver.map(address + index * driver.page_size, handle)
    driver.set_access(address, NUM_PAGES * driver.page_size)
    data = torch.randint(0, 255, (NUM_PAGES * driver.page_size,), dtype=torch.uint8).to(driver.device)
    view(driver, address, NUM_PAGES).copy_(data)
    assert torch.equal(view(driver, address, NUM_PAGES), data)
    drop(driver, address, *order)


def test_fill_and_copy(driver: Driver, address: int) -> None:
    handles = [put(driver, address), put(driver, address + driver.page_size)]
    for place, value in ((address, 3), (address + driver.page_size, 9)):
        driver.fill(place, driver.page_size, value, driver.current_stream())
    driver.copy(address + driver.page_size, address, driver.page_size // 2)
    both = view(driver, address, 2).view(-1, driver.page_size // 2)
    assert both.float().mean(dim=1).tolist() == [3, 3, 3, 9]
    drop(driver, address, *handles)


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


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


@pytest.fixture
def most_mappings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """With a limit that is 3,000 mappings away: how many there may be before drivers add no more."""
    gc.collect()  # what other tests have left
    limit = mappings() + 3000
    monkeypatch.setattr(host, "MAX_MAPPINGS", tmp_path / "max_map_count")
    host.MAX_MAPPINGS.write_text(str(limit))
    host.mapped["allowed"] = 0
    return limit - int(limit * host.SPARE)


@pytest.mark.parametrize(("pages", "step"), [(1, 2), (1, 1), (3000, 1)])
def test_mappings_run_out_before_they_do_for_linux(most_mappings: int, pages: int, step: int) -> None:
    """Pages apart; side by side; and side by side in the file as well, which Linux takes for one until it is cut."""
    driver, own = small_driver("cpu"), int(host.mapped["mappings"])
    size = driver.page_size
    strangers = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(500)]
    handles = [driver.create() for _ in range(pages)]
    address = driver.reserve(6000 * size)
    places: list[int] = []

    def map_until_it_is_refused() -> None:
        for place in range(address, address + 6000 * size, step * size):
            driver.map(place, handles[len(places) % pages])
            places.append(place)

    with pytest.raises(DriverError, match=r"mmap failed with ENOMEM.*larger page_size"):
        map_until_it_is_refused()
    if pages == 1:  # of who else has a driver here up to `own` are counted that Linux may have merged
        assert most_mappings - own - 20 < mappings() < most_mappings + 20  # Python's own come and go
    with pytest.raises(DriverError, match="ENOMEM"):
        small_driver("cpu").reserve(size)
    for place in places[1::2]:
        driver.unmap(place, size)
    assert mappings() < most_mappings + 20
    driver.set_access(places[0], size)
    for place in places[::2]:
        driver.unmap(place, size)
    driver.free(address, 6000 * size)
    for handle in handles:
        driver.release(handle)
    assert int(host.mapped["mappings"]) == own
    small_driver("cpu").reserve(size)
    assert strangers


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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("listed", "files", "found"),
    [
        (
            "0::/a/b\n",
            {"a/memory.max": 3 * GIB, "a/memory.current": GIB, "a/b/memory.max": "max", "a/b/memory.current": 5},
            [(3 * GIB, GIB)],
        ),
        (
            "3:cpu,memory:/a/b\n1:name=systemd:/\n0::/c\n",
            {
                "memory/a/b/memory.limit_in_bytes": 7 * GIB,
                "memory/a/b/memory.usage_in_bytes": GIB,
                "unified/c/memory.max": 5 * GIB,
                "unified/c/memory.current": 4 * GIB,
            },
            [(7 * GIB, GIB), (5 * GIB, 4 * GIB)],
        ),
        ("0::/\n", {}, []),
    ],
    ids=["nested", "version 1 beside 2", "none"],
)
def test_cgroups_limit_memory(tmp_path: Path, listed: str, files: dict, found: list) -> None:
    for name, value in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (tmp_path / "listed").write_text(listed)
    assert list(limits.cgroup_limits(tmp_path / "listed", tmp_path / "mounted")) == found


def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = limits.memory()
    monkeypatch.setattr(
        limits, "cgroup_limits", lambda: [(total * 2, 0), (total // 2, total // 2 - 5), (total // 4, 0)]
    )
    assert limits.memory() == (5, total // 4)
    assert free <= total
