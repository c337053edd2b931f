"""Views: zero-copy, the right dtype, the same memory from every library, alive as long as needed."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # which tells ForkingPickler how
from conftest import run_python

import vmmkv
from vmmkv.layout import DTYPES, SCALED_DTYPES


def random(shape: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randn(shape) * 8).to(dtype).to(device)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, for dtypes that cannot be compared."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(dtype, scales) for dtype in DTYPES for scales in (None, "token_head") if not scales or dtype in SCALED_DTYPES],
    ids=str,
)
def test_what_is_written_through_one_view_is_read_through_another(
    device: str, dtype: torch.dtype, scales: str | None
) -> None:
    """Every byte, whichever was written last; scales lie beside their numbers, which do not come without them."""
    heads = [1, 4, 2]
    layout = vmmkv.KVLayout(3, heads, [64, 32, 16], dtype, [16, 32, 64], 2, scales)
    cache = vmmkv.KVCache(layout, 3, 500, max_tokens=5000, device=device)
    sequences = [cache.sequence(n) for n in (1, 300, 77)]
    written = []
    for sequence in sequences:
        for layer in range(3):
            every = cache.scaled_kv(layer) if scales else cache.kv(layer)
            assert [view.dtype for view in every] == [dtype, dtype, *[torch.float32] * 2][: len(every)]
            widths = [layout.head_dim[layer]], [[16, 32, 64][layer]], [], []
            assert [view.shape[2:] for view in every] == [(heads[layer], *width) for width in widths[: len(every)]]
            own = [view[sequence.row, : sequence.length] for view in every]
            assert all(view.data_ptr() % 16 == 0 for view in own[:2])
            new = [random(list(view.shape), view.dtype, device) for view in own]
            for view, states in zip(own if scales else (sequence.k(layer), sequence.v(layer)), new):
                view.copy_(states)
            written += zip(own, new)
    if scales:
        k, v = written[0][1], written[1][1]
        for refused in (
            lambda: cache.kv(0),
            lambda: sequences[0].k(0),
            lambda: sequences[0].v(0),
            lambda: sequences[0].write(0, k, v),
            lambda: vmmkv.KVCache(vmmkv.KVLayout(1, 1, 16, dtype), 1, 1, device=device).scaled_kv(0),
        ):
            with pytest.raises(vmmkv.UnsupportedError, match="scales"):
                refused()
    assert all(torch.equal(raw(view), raw(new)) for view, new in written)


def test_views_are_the_cache_not_copies(make_cache) -> None:
    cache = make_cache()
    sequence = cache.sequence(5)
    view = sequence.k(1)
    sequence.extend(60)
    sequence.k(1)[3] = 7
    assert (view[3] == 7).all()
    assert view.data_ptr() == sequence.k(1).data_ptr() == cache.kv(1)[0][sequence.row].data_ptr()
    sequence.release_before(3)
    assert (sequence.k(1)[0] == 7).all()


def test_dlpack_and_numpy_give_the_same_memory(make_cache) -> None:
    view = make_cache().sequence(5).v(2)
    again = torch.from_dlpack(view)
    again.fill_(3)
    assert again.data_ptr() == view.data_ptr()
    assert (view == 3).all()
    if view.device.type == "cpu":
        view.numpy()[...] = 4
        assert (view == 4).all()


def test_layers_that_there_are_not_are_refused_by_number(make_cache) -> None:
    cache, scaled = make_cache(), make_cache(layout=vmmkv.KVLayout(3, 2, 64, torch.int8, scales="token_head"))
    sequence = cache.sequence(5)
    for ask in (cache.kv, sequence.k, sequence.v, scaled.scaled_kv):
        for layer in (3, -4, 2**70):
            with pytest.raises(vmmkv.OutOfRangeError, match=r"layer .*; layers are 0 to 2"):
                ask(layer)
        assert ask(-1)[0].data_ptr() == ask(2)[0].data_ptr()
    with pytest.raises(vmmkv.OutOfRangeError, match="range 1; ranges are 0 to 0"):
        cache.range(1)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_numba_and_the_cuda_array_interface_see_the_same_memory(make_cache, device: str) -> None:
    from numba import cuda

    view = make_cache().sequence(5).k(0)
    assert view.__cuda_array_interface__["data"][0] == view.data_ptr()
    array = cuda.as_cuda_array(view)

    @cuda.jit
    def set_all(a):
        for token in range(a.shape[0]):
            a[token, 0, 0] = token + 1.0

    set_all[1, 1, cuda.external_stream(torch.cuda.current_stream().cuda_stream)](array)
    assert view[:, 0, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_cache_made_in_inference_mode_can_be_written_outside(device: str) -> None:
    with torch.inference_mode():
        sequence = vmmkv.KVCache(vmmkv.KVLayout(1, 1, 8), 1, 8, max_bytes="4MiB", device=device).sequence(4)
        scaled = vmmkv.KVLayout(1, 1, 16, torch.int8, scales="sequence_head")
        cache = vmmkv.KVCache(scaled, 1, 8, max_bytes="4MiB", device=device)
    sequence.k(0).fill_(2)
    assert (sequence.k(0) == 2).all()
    cache.sequence_scales(0)[0].fill_(2)


def test_views_are_copied_by_clone_only(make_cache) -> None:
    """torch would copy, or save, all of the virtual tensor."""
    view = make_cache().sequence(3).k(0)
    for do in (
        copy.deepcopy,
        pickle.dumps,
        lambda tensor: torch.save({"k": tensor}, io.BytesIO()),
        lambda tensor: torch.save(tensor, io.BytesIO(), _use_new_zipfile_serialization=False),
        lambda tensor: copy.copy(tensor.untyped_storage()),
        lambda tensor: tensor.untyped_storage().clone(),
        lambda tensor: tensor.untyped_storage().tolist(),
    ):
        with pytest.raises(TypeError, match=r"clone\(\) the view"):
            do(view)
        do(view.clone())


@pytest.mark.parametrize("device", ["cpu"])
def test_views_are_shared_by_clone_only(make_cache, device: str) -> None:
    """With other processes; of a GPU's memory torch shares what it has allocated itself."""
    sequence = make_cache().sequence(3)
    module = torch.nn.Module()
    for do in (
        torch.Tensor.share_memory_,
        ForkingPickler.dumps,
        lambda tensor: (module.register_buffer("k", tensor), module.share_memory()),
    ):
        with pytest.raises(TypeError, match=r"share the clone"):
            do(sequence.k(0))
        do(sequence.k(0).clone())
    resource_sharer.stop()  # the thread that hands clones over


LIFETIME = """
    import gc, os, sys, torch, vmmkv
    from conftest import on_driver, small_driver, small_layout
    device, what = sys.argv[1:]
    driver = small_driver(device)
    cache = on_driver(driver, vmmkv.KVCache, small_layout(driver), 4, 100, max_bytes=30 * driver.page_size)
    sequence = cache.sequence(20)
    view = sequence.k(1)
    view.fill_(1)
    if what == "exit":
        kept = [cache, sequence, view]
        kept.append(kept)
    elif what == "cycle at exit":
        sys.view, sys.cache = view, cache
        del cache, sequence
    elif what == "close":
        cache.close()
        assert repr(sequence) and repr(cache)
    elif what == "collect":
        del cache, view
        gc.collect()
        sequence.extend(5)
    elif what == "lost context":
        other = cache.sequence(1)
        try:
            cache.kv(0)[0][other.row, -1].sum().item()
        except RuntimeError:
            del other, sequence, cache, view
            gc.collect()
        else:
            sys.exit("the stray access was no fault")
    elif what == "lost context, close":
        try:
            cache.kv(0)[0][cache.sequence(1).row, -1].sum().item()
        except RuntimeError:
            cache.close()
    print("done")
"""


@pytest.mark.usefixtures("undebugged")
@pytest.mark.parametrize("what", ["exit", "cycle at exit", "close", "collect"])
def test_the_end_is_silent(device: str, what: str) -> None:
    child = run_python(LIFETIME, device, what)
    assert (child.returncode, child.stdout, child.stderr) == (0, "done\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["lost context", "lost context, close"])
def test_the_end_is_silent_after_a_lost_context(what: str) -> None:
    child = run_python(LIFETIME, "cuda", what)
    assert (child.returncode, child.stdout, child.stderr) == (0, "done\n", "")
