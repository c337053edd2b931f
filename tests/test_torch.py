"""What torch users hold: memory pools, growable tensors, and accounts that agree with the memory system's."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from conftest import run_python

import vmmkv
from vmmkv.torch import GrowableTensor, memory_allocated, memory_pool

MIB = 1 << 20

AFTER_THE_END = """
    import ctypes
    from numba import cfunc, types
    from vmmkv.compiled.code import keep
    from vmmkv.driver.host import NullDriver
    from vmmkv.torch.allocator import Allocator

    word, number, libc = ctypes.c_int64, types.int64, ctypes.CDLL(None)
    libc._exit.restype, libc._exit.argtypes = None, [ctypes.c_int]
    leave = libc._exit

    @cfunc(types.int32(types.CPointer(number), number, number, number, number))
    def give(out, a, b, c, d):
        out[0] = 1 << 20
        return 0

    @cfunc(types.int32())
    def succeed():
        return 0

    driver = NullDriver(1 << 30, 4096)
    for name in ("release", "map", "set_access", "unmap", "push", "pop", "synchronize", "free"):
        driver.table[name] = succeed.address
    driver.table["reserve"] = driver.table["create"] = give.address
    allocator = Allocator(driver, 20)
    allocate = ctypes.CFUNCTYPE(word, word, ctypes.c_int32, word)(allocator.allocate)
    deallocate = ctypes.CFUNCTYPE(None, word, word, ctypes.c_int32, word)(allocator.deallocate)

    @cfunc(types.void(types.voidptr))
    def at_exit(argument):
        segment = allocate(5000, 0, 0)
        deallocate(segment, 5000, 0, 0)
        leave(42 if segment else 1)

    for each in (give, succeed, at_exit):
        keep(each)
    libc.__cxa_atexit(ctypes.c_void_p(at_exit.address), None, None)
    del allocator
    print("end")
"""


def test_segments_can_be_given_back_after_the_interpreter_has_ended() -> None:
    """torch's own destructors run then."""
    child = run_python(AFTER_THE_END)
    assert child.returncode == 42, child.stderr


# ---------------------------------------------------------------------- memory pools


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_memory_pool_needs_cuda() -> None:
    with pytest.raises(vmmkv.DeviceError, match="CUDA devices only, and sees 0"):
        memory_pool()


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


def mapped(address: int, nbytes: int) -> int:
    """Bytes of a range under which there are pages, by the driver's account. Other processes have no part in it."""
    import cuda.bindings.driver as cu

    pages = 0
    for page in range(address, address + nbytes, 2 * MIB):
        status, handle = cu.cuMemRetainAllocationHandle(page)
        if status == cu.CUresult.CUDA_SUCCESS:
            assert cu.cuMemRelease(handle) == (cu.CUresult.CUDA_SUCCESS,)
            pages += 1
    return pages * 2 * MIB


@pytest.mark.gpu
def test_tensors_of_a_pool_lie_on_its_pages() -> None:
    pool = memory_pool("512MiB")
    with pool:
        tensors = [torch.empty(nbytes // 4, device="cuda") for nbytes in (1000, 3 * MIB, 50 * MIB, 120 * MIB)]
    stats = pool.stats()
    assert stats.physical_bytes >= 173 * MIB
    assert stats.budget_bytes == 512 * MIB
    segments = pool._mem_pools[0].snapshot()
    assert sum(mapped(segment["address"], segment["total_size"]) for segment in segments) == stats.physical_bytes
    for tensor in tensors:
        assert any(0 <= tensor.data_ptr() - segment["address"] < segment["total_size"] for segment in segments)
        tensor.normal_()
    copies = [tensor.cpu() for tensor in tensors]
    with pool:
        product = tensors[1] * 2 + tensors[1]  # a temporary comes from the pool, too
    filled(150 * MIB, 7)
    assert torch.allclose(product.cpu(), copies[1] * 3)
    assert all(torch.equal(tensor.cpu(), copy) for tensor, copy in zip(tensors, copies))


@pytest.mark.gpu
def test_release_gives_back_what_no_tensor_holds() -> None:
    pool = memory_pool("512MiB")
    with pool:
        kept, gone = filled(64 * MIB, 3), filled(256 * MIB, 5)
    address = gone.data_ptr()
    assert mapped(address, 256 * MIB) == 256 * MIB
    torch.cuda._sleep(100_000_000)
    gone.fill_(6)  # still to run when its memory is given back
    del gone
    assert pool.release() == 256 * MIB
    assert pool.stats().physical_bytes == mapped(kept.data_ptr(), 64 * MIB) == 64 * MIB
    assert mapped(address, 256 * MIB) == 0
    assert (kept == 3).all()
    with pool:  # it can be used again
        again = filled(256 * MIB, 9)
    assert (again == 9).all()
    addresses = kept.data_ptr(), again.data_ptr()
    del kept, again
    torch.cuda.empty_cache()  # takes what a tensor held after a release
    pool.release()
    assert pool.stats().physical_bytes == pool.stats().segments == 0
    assert [mapped(address, 64 * MIB) for address in addresses] == [0, 0]


@pytest.mark.gpu
def test_a_pool_keeps_to_its_budget_and_says_so() -> None:
    with memory_pool("64MiB") as other:
        beside = filled(32 * MIB, 5)
    pool = memory_pool("64MiB")
    with pool:
        tensor = filled(40 * MIB, 3)
        with pytest.raises(torch.OutOfMemoryError):
            filled(40 * MIB, 4)
    with pytest.raises(torch.OutOfMemoryError) as caught, pool:
        filled(40 * MIB, 4)
    assert "segment of 40 MiB; 40 of its 64 MiB are taken" in caught.value.__notes__[0]
    assert pool.stats().physical_bytes == 40 * MIB
    assert other.stats().physical_bytes == 32 * MIB
    assert (tensor == 3).all()
    assert (beside == 5).all()
    assert (filled(40 * MIB, 4) == 4).all()  # outside of the pool all is as before


@pytest.mark.gpu
def test_pools_end_when_no_other_is_in_use() -> None:
    """torch aborts the process otherwise."""
    first, second, lost = (memory_pool("128MiB") for _ in range(3))
    addresses = []
    for pool in first, lost:
        with pool:
            addresses.append(filled(64 * MIB, 1).data_ptr())
    with second:
        with pytest.raises(RuntimeError, match="is in a with block"):
            second.release()
        with pytest.raises(RuntimeError, match="is in a with block"):
            second.__enter__()
        assert first.release() == 0
        del lost, pool
        tensor = filled(MIB, 2)
    assert first.release() == 64 * MIB
    assert (tensor == 2).all()
    del tensor
    second.release()
    assert [mapped(address, 64 * MIB) for address in addresses] == [0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pool_on_another_device() -> None:
    with memory_pool("64MiB", device="cuda:1") as pool:
        here = torch.ones(MIB, device="cuda:0")
        there = torch.ones(MIB, device="cuda:1")
    assert pool.stats().physical_bytes == 20 * MIB
    assert here.sum().item() == there.sum().item() == MIB


@pytest.mark.gpu
def test_threads_with_pools_beside_busy_python() -> None:
    child = run_python(
        """
        import faulthandler, random, threading, torch
        from vmmkv.torch import memory_pool
        faulthandler.dump_traceback_later(300, exit=True)
        pools = [memory_pool("1GiB") for _ in range(4)]
        wrong = []

        def work(pool, number):
            stream = torch.cuda.Stream()
            for round in range(30):
                with torch.cuda.stream(stream), pool:
                    sizes = [random.randrange(1, 8 << 20) for _ in range(6)]
                    tensors = [torch.full((size,), number, dtype=torch.uint8, device="cuda") for size in sizes]
                    sums = [int(tensor.sum(dtype=torch.int64)) for tensor in tensors]
                if sums != [size * number for size in sizes]:
                    wrong.append(number)
                del tensors
                stream.synchronize()
                if round % 5 == 0:
                    pool.release()

        threads = [threading.Thread(target=work, args=(pool, number)) for number, pool in enumerate(pools, 1)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            sum(range(1000))
        for pool in pools:
            pool.release()
        print(wrong, [pool.stats().physical_bytes for pool in pools])
        """
    )
    assert child.stdout == "[] [0, 0, 0, 0]\n", child.stderr


# ---------------------------------------------------------------------- accounts


def test_memory_of_every_owner_counts(device: str, make_cache) -> None:
    gc.collect()
    before = memory_allocated(device)
    cache = make_cache()
    sequences = [cache.sequence(tokens) for tokens in (20, 50)]
    sequences[0].free()
    grown = GrowableTensor((1 << 20, 5), torch.float64, device)
    grown.resize(70_000)
    assert memory_allocated(device) - before == cache.stats().physical_bytes + 4 * MIB > 4 * MIB
    assert memory_allocated() >= memory_allocated(device)
    cache.close()
    grown.close()
    assert memory_allocated(device) == before


def test_importing_vmmkv_torch_imports_no_numba_nor_extras_and_leaves_torch_alone() -> None:
    code = """
        import sys, vmmkv.torch, torch
        print({"numba", "prometheus_client"} & {*sys.modules}, torch.ones(1).item(), vmmkv.torch is torch)
    """
    assert run_python(code).stdout == "set() 1.0 False\n"
    assert sys.modules["torch"] is torch
