"""The contract of a memory system: one suite, every driver."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from conftest import run_python, small_driver
from faulty import FaultyDriver

from vmmkv.driver import Driver, open_driver
from vmmkv.errors import DeviceError, DriverError, LayoutError, VmmkvError
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


def test_a_page_keeps_its_bytes_when_it_is_mapped_elsewhere(driver: Driver, address: int) -> None:
    handle = put(driver, address)
    data = torch.randint(0, 255, (driver.page_size,), dtype=torch.uint8).to(driver.device)
    view(driver, address).copy_(data)
    driver.synchronize()
    driver.unmap(address, driver.page_size)
    elsewhere = address + 2 * driver.page_size
    driver.map(elsewhere, handle)
    driver.set_access(elsewhere, driver.page_size)
    assert torch.equal(view(driver, elsewhere), data)
    drop(driver, elsewhere, handle)


def test_one_page_at_two_addresses_is_one_memory(driver: Driver, address: int) -> None:
    handle = put(driver, address)
    alias = address + driver.page_size
    driver.map(alias, handle)
    driver.set_access(alias, driver.page_size, False)
    view(driver, address)[5] = 42
    assert view(driver, alias)[5] == 42
    driver.synchronize()
    driver.unmap(address, 2 * driver.page_size)
    driver.release(handle)


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


def test_an_event_passes_when_the_work_before_it_is_done(driver: Driver) -> None:
    event = driver.record(driver.current_stream())
    event.synchronize()
    assert event.query()


def test_memory_info(driver: Driver) -> None:
    free, total = driver.memory_info()
    assert 0 < free <= total


def test_works_from_a_thread_that_is_new_to_the_device(driver: Driver, address: int) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            drop(driver, address, put(driver, address))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


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
    from conftest import small_driver
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


@pytest.mark.parametrize("call", ["create", "map", "set_access", "unmap", "release", "free", "reserve"])
def test_the_faulty_driver_fails_what_it_is_told_to(device: str, call: str) -> None:
    driver = FaultyDriver(small_driver(device))
    driver.fail(call)

    def everything() -> None:
        address = driver.reserve(driver.page_size)
        drop(driver, address, put(driver, address))  # type: ignore[arg-type]
        driver.free(address, driver.page_size)

    with pytest.raises(VmmkvError, match="INJECTED"):
        everything()
