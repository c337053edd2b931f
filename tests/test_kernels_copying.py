"""append and copy_tokens against plain indexing: in Numba's simulator on host memory, or on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import DEVICE, int32, run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import vmmkv
from vmmkv.kernels import RotateHalf, append, copy_tokens
from vmmkv.kernels.launches import multiprocessors
from vmmkv.kernels.quantized import LARGEST, quantize
from vmmkv.kernels.row_append import append_behind, bind_append

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


MANY = 4 * multiprocessors(torch.device(DEVICE))
"""From several times so many tokens on, blocks of threads move several each."""


@settings(max_examples=15)
@given(
    cuts=st.lists(st.floats(0, 1), max_size=3),
    total=st.integers(2 * MANY, 18 * MANY),
    heads=st.sampled_from([1, 3, 9]),
    dims=st.sampled_from([(64, 64), (80, 16), (128, 256)]),
    way=st.sampled_from(["in rows", "in blocks", "behind", "one each"]),
)
def test_append_of_many_tokens(cuts, total, heads, dims, way) -> None:
    """Tokens that share a block of threads go where each belongs; those that are nobody's stay away."""
    ends = [*range(total)] if way == "one each" else [0, *sorted(int(cut * total) for cut in cuts)]
    counts = torch.tensor([*ends, total]).diff()
    nobodys = 0 if way == "one each" else 5
    new = [random(total + nobodys, heads, width, dtype=torch.bfloat16) for width in dims]
    rows, starts = torch.randperm(len(counts)), torch.randint(0, 16, counts.shape)
    blocks = torch.randperm(len(counts) * ((int(counts.max()) + 14) // 16 + 1)).view(len(counts), -1)
    caches = [random(blocks.numel(), 16, heads, width, dtype=torch.bfloat16) for width in dims]
    if way != "in blocks":
        blocks = torch.arange(blocks.numel()).view(len(counts), -1)
        caches = [cache.view(len(counts), -1, *cache.shape[2:]) for cache in caches]
    inside = torch.arange(total) - torch.tensor(ends).repeat_interleave(counts) + starts.repeat_interleave(counts)
    places = blocks[rows.repeat_interleave(counts), inside // 16] * 16 + inside % 16
    expected = [cache.clone() for cache in caches]
    for states, tokens in zip(expected, new):
        states.flatten(0, 1)[places] = tokens[:total]
    cu_seqlens = None if way == "one each" else int32([*ends, total])
    numbers, positions = int32(rows.tolist()), int32(starts.tolist())
    if way == "behind":
        append_behind(*new, *caches, numbers, positions, int32([total + 16]), cu_seqlens)
    else:
        append(*new, *caches, numbers, positions, cu_seqlens, int32(blocks.tolist()) if way == "in blocks" else None)
    assert all(map(equal, caches, expected))


@pytest.mark.parametrize("dim", [8, 16, 40])
def test_append_of_many_narrow_tokens(dim: int) -> None:
    """Of which a block of threads could move more than it has threads."""
    tokens = 1100 * multiprocessors(torch.device(DEVICE))
    k, v = (random(tokens, 1, dim, dtype=torch.bfloat16) for _ in "kv")
    caches = [random(1, tokens + 5, 1, dim, dtype=torch.bfloat16) for _ in "kv"]
    expected = [torch.cat((cache[0, :3], states, cache[0, -2:]))[None] for cache, states in zip(caches, (k, v))]
    append(k, v, *caches, int32([0]), int32([3]), int32([0, tokens]))
    assert all(map(equal, caches, expected))


def strange(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads of any size; some are zero, or hold what is no number."""
    heads = torch.randn(shape) * torch.exp2(torch.randint(-20, 10, shape[:-1]))[..., None]
    chosen = torch.rand(shape[:-1])
    heads[chosen < 0.1] = 0
    heads[..., 3].masked_fill_((chosen > 0.1) & (chosen < 0.2), torch.nan)
    heads[..., 7].masked_fill_((chosen > 0.15) & (chosen < 0.3), -torch.inf)
    return heads.to(DEVICE, dtype)


def strange_scales(*shape: int) -> torch.Tensor:
    """Of any size; some are zero, negative, or no numbers."""
    scales = torch.exp2(torch.randint(-12, 6, shape)) * torch.rand(shape)
    for number, share in enumerate((0.0, -1.0, 2.0**-101, 2.0**-100, torch.inf, torch.nan)):
        scales[torch.rand(shape) < 0.3 / (6 - number)] = share
    return scales.to(DEVICE)


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int = -1) -> torch.Tensor:
    """As transformers does, in the dtype of what it is given."""
    turned, passed = x.split((cos.shape[1], x.shape[2] - cos.shape[1]), 2)
    first, second = turned.chunk(2, 2)
    turned = turned * cos[:, None] + torch.cat((sign * second, first), 2) * sin[:, None]
    return torch.cat((turned, passed), 2)


def check_rotated(found: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """16-bit floats are the exact ones, rounded once (but for what fp32 has lost): torch, which rounds three times, is
    never closer. fp32 differs by the roundings of a product and of the sum. Of heads that are no numbers nothing is
    said."""
    exact, info = rotate_half(x.double(), cos.double(), sin.double()), torch.finfo(x.dtype)
    finite = exact.isfinite().all(-1, keepdim=True)
    errors = [(each.double() - exact).where(finite, 0).abs() for each in (found, rotate_half(x, cos, sin))]
    if x.dtype == torch.float32:
        most = info.eps * rotate_half(*(each.double().abs() for each in (x, cos, sin)), 1)
    else:
        most = info.eps * (0.501 * exact.abs() + info.smallest_normal)
        assert errors[0].norm() <= errors[1].norm()
    assert ((errors[0] <= most) | ~finite).all()


@settings(max_examples=60)
@given(
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 5), (6, 1)]),
    dims=st.sampled_from([(64, 64), (80, 80), (80, 16), (16, 256), (192, 128)]),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from([None, *LARGEST])),
    rotary_dim=st.sampled_from([0, 32, 64, 80]),
    ragged=st.booleans(),
    block_size=st.sampled_from([0, 16, 32]),
    way=st.sampled_from(["append", "bound", "behind"]),
    whole=st.booleans(),
    in_place=st.booleans(),
    data=st.data(),
)
def test_append(starts, heads, dims, dtypes, rotary_dim, ragged, block_size, way, whole, in_place, data) -> None:
    """New tokens land where they belong, and nothing else is read, nor changes, in rows of a cache and in blocks.

    K that is rotated is as exact as can be, and so are queries beside it. In 8 bits they are the bits that torch makes
    of that, numbers and scales; scales of whole sequences are read, by the row of a block table, too."""
    (query_heads, kv_heads), (new, held), batch = heads, dtypes, len(starts)
    held = None if new == torch.float8_e4m3fn else held
    turns = 0 < rotary_dim <= dims[0] and new != torch.float8_e4m3fn
    counts = [data.draw(st.integers(0, 6)) if ragged else 1 for _ in starts]
    total, nobodys = sum(counts), 2 * ragged
    make = strange if held else random
    # Slices of projections: tokens are not contiguous.
    fused = make(total + nobodys, kv_heads, sum(dims), dtype=new)
    k, v = fused.split(dims, 2)
    given = fused.clone()
    rows = data.draw(st.permutations(range(batch)))
    num_rows, places = (2 * batch, data.draw(st.permutations(range(2 * batch)))) if block_size else (batch, [])
    of = ("sequence_head" if whole else "token_head") if held else None
    layout = vmmkv.KVLayout(3, kv_heads, dims[0], held or new, dims[1], scales=of)
    cache = vmmkv.KVCache(layout, num_rows, block_size or 32, max_bytes="64MiB", device=DEVICE)
    sequences = [cache.sequence(block_size or 32) for _ in range(num_rows)]
    assert len({sequence.row for sequence in sequences}) == num_rows
    everything = []
    for layer in range(3):
        everything += cache.scaled_kv(layer)[: 2 if whole else 4] if held else cache.kv(layer)
        everything += cache.sequence_scales(layer) if held and whole else []
    for view in everything:
        view.copy_(strange_scales(*view.shape) if view.ndim == 2 else random(*view.shape, dtype=view.dtype))
    expected = [view.clone() for view in everything]
    per_layer = len(everything) // 3
    caches, expected_kv = everything[per_layer : 2 * per_layer], expected[per_layer : 2 * per_layer]
    if held and whole:  # those of sequences, whose blocks have none
        caches[2:] = [scales[:batch] for scales in caches[2:]]
    cu_seqlens = int32([sum(counts[:index]) for index in range(batch + 1)]) if ragged else None
    rotary, states = None, [k[:total], v[:total]]
    if turns:
        query = random(total + nobodys, query_heads + 1, dims[0], dtype=new)[:, :query_heads]
        cos, sin = random(2, total + nobodys, rotary_dim + 16, dtype=new)[..., 8 : 8 + rotary_dim]
        given_query, rotated = query.clone(), query if in_place else torch.empty_like(query)
        kept = [torch.empty(1, total, kv_heads, width, dtype=new, device=DEVICE) for width in dims]
        alone = RotateHalf(query, torch.empty_like(query), cos, sin)
        append(k, v, *kept, int32([0]), int32([0]), int32([0, total]), None, alone)
        states = [each[0] for each in kept]
        check_rotated(states[0], k[:total], cos[:total], sin[:total])
        rotary = RotateHalf(query, rotated, cos, sin)
    token = 0
    for row, start, count in zip(rows, starts, counts):
        for position in range(start, start + count):
            place = (places[2 * row + position // block_size], position % block_size) if block_size else (row, position)
            for which in range(2):
                numbers = states[which][token]
                if held:
                    numbers, scales = quantize(numbers, held, caches[2 + which][row] if whole else None)
                    if not whole:
                        expected_kv[2 + which][place] = scales
                expected_kv[which][place] = numbers
            token += 1
    numbers, positions = int32(rows), int32(starts)
    if way == "bound" and not (ragged or block_size or turns):
        write = bind_append(k, v, *caches[:2], numbers, *caches[2:])
        write(k.data_ptr(), v.data_ptr(), positions.data_ptr())
    elif way == "behind" and not (block_size or turns):
        ends = [start + count for start, count in zip(starts, counts)]
        append_behind(k, v, *caches[:2], numbers, positions, int32([max(ends)]), cu_seqlens, *caches[2:])
        assert positions.tolist() == ends
    else:
        table = int32(places).view(batch, 2) if block_size else None
        append(k, v, *caches[:2], numbers, positions, cu_seqlens, table, rotary, *caches[2:])
    assert all(map(equal, everything, expected))
    assert equal(fused, given)
    if turns:
        check_rotated(rotated, given_query, cos, sin)
        assert in_place or equal(query, given_query)


@settings(max_examples=25)
@given(
    heads=st.sampled_from([1, 3, 9]),
    width=st.sampled_from([64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(st.floats(0, 1.2), max_size=4),
    most=st.integers(0, 5) | st.integers(2 * MANY, 18 * MANY),
    itself=st.booleans(),
)
def test_copy_tokens(heads, width, dtype, parts, most, itself) -> None:
    """Of longer ranges than were announced the rest is not copied."""
    count, record = 2 * len(parts) + 2, (2, heads, 2 * width)
    source = random(count, 2 * most + 2, *record, dtype=dtype)[:, :, 1, :, :width]
    target = source if itself else random(count, 2 * most + 5, *record, dtype=dtype)[..., 1, :, width:]
    expected, rows = target.clone(), torch.randperm(count)[: 2 * len(parts)].view(2, -1).tolist()
    starts = torch.randint(0, most // 2 + 1, (2, len(parts))).tolist()
    lengths = [int(part * most) for part in parts]
    for row, to_row, start, to_start, length in zip(*rows, *starts, lengths):
        copied = min(length, most)
        expected[to_row, to_start : to_start + copied] = source[row, start : start + copied]
    source_rows, target_rows, source_starts, target_starts = map(int32, (*rows, *starts))
    copy_tokens(source, target, source_rows, source_starts, target_rows, target_starts, int32(lengths), most)
    assert equal(target, expected)


def test_append_takes_latents_without_a_v() -> None:
    """Into rows and into blocks, whatever the strides of what is not there."""
    new = random(5, 1, 576, dtype=torch.bfloat16)
    blocks = torch.zeros(4, 16, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    nothing = torch.empty(5, 1, 0, device=DEVICE, dtype=torch.bfloat16)
    table, starts = int32([3, 1]).view(1, 2), int32([13])
    append(new, nothing, blocks, blocks[..., :0], int32([0]), starts, int32([0, 5]), table)
    assert torch.equal(torch.cat([blocks[3, 13:], blocks[1, :2]]), new)
    assert (blocks[[0, 2]] == 0).all()


def new_and_cache() -> tuple[torch.Tensor, ...]:
    k, v = (random(3, 2, 64, dtype=torch.bfloat16) for _ in "kv")
    k_cache, v_cache = (random(3, 8, 2, 64, dtype=torch.bfloat16) for _ in "kv")
    return k, v, k_cache, v_cache, int32([2, 0, 1]), int32([1, 2, 3])


def test_kernels_can_be_part_of_a_compiled_graph() -> None:
    k, v, k_cache, v_cache, rows, starts = new_and_cache()
    numbers, scales = quantize(k_cache, torch.int8)
    others, given_scales = numbers.clone(), scales[rows.long(), 0]
    query, (cos, sin) = random(3, 4, 64, dtype=torch.bfloat16), random(2, 3, 64, dtype=torch.bfloat16)
    given_query, rotated = query.clone(), torch.empty_like(query)

    def step(*tensors: torch.Tensor) -> None:
        append(*tensors)
        append(k, k, numbers, numbers, rows, starts, None, None, None, scales, scales)
        append(k, k, others, others, rows, starts, None, None, None, scales[:, 0], scales[:, 0])
        copy_tokens(k_cache, v_cache, rows, starts, rows, torch.zeros_like(rows), torch.ones_like(rows), 1)
        append(*tensors, rotary=RotateHalf(query, rotated, cos, sin))
        append(*tensors, rotary=RotateHalf(query, query, cos, sin))

    torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, k_cache, v_cache, rows, starts)
    assert equal(v_cache[rows.long(), starts.long()], v)
    assert equal(v_cache[rows.long(), 0], k)
    assert equal(numbers[rows.long(), starts.long()], quantize(k, torch.int8)[0])
    assert equal(others[rows.long(), starts.long()], quantize(k, torch.int8, given_scales)[0])
    assert equal(scales[rows.long(), starts.long()], quantize(k, torch.int8)[1])
    check_rotated(k_cache[rows.long(), starts.long()], k, cos, sin)
    check_rotated(rotated, given_query, cos, sin)
    assert equal(query, rotated)


def append_up_to_the_limit(ragged: bool) -> None:
    """One token more than there is room for, in the end."""
    k, v, k_cache, v_cache, rows, lengths = new_and_cache()
    cu_seqlens = int32([0, 1, 2, 3]) if ragged else None
    for _ in range(2):
        append_behind(k, v, k_cache, v_cache, rows, lengths, int32([4]), cu_seqlens)
        assert lengths.tolist() == [2, 3, 4]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's context would end")
@pytest.mark.parametrize("ragged", [False, True])
def test_no_token_goes_behind_the_limit(ragged: bool) -> None:
    with pytest.raises(RuntimeError, match="trap"):
        append_up_to_the_limit(ragged)


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
def test_a_gpu_stops_at_the_limit(ragged: bool) -> None:
    child = run_python(f"from test_kernels_copying import append_up_to_the_limit as f\nf({ragged})")
    assert "unspecified launch failure" in child.stderr


@pytest.mark.gpu
def test_threads_may_launch_the_same_kernel() -> None:
    """Each on a cache and a stream of its own; the arguments of one launch must not become another's."""

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            k, v, k_cache, v_cache, rows, starts = new_and_cache()
            for _ in range(300):
                k.normal_()
                append(k, v, k_cache, v_cache, rows, starts)
                assert equal(k_cache[rows.long(), starts.long()], k)

    with ThreadPoolExecutor(4) as threads:
        for thread in [threads.submit(work) for _ in range(4)]:
            thread.result()


@pytest.mark.gpu
def test_append_can_be_captured() -> None:
    k, v, k_cache, v_cache, rows, starts = new_and_cache()
    query, angles = random(3, 4, 64, dtype=torch.bfloat16), random(2, 3, 64, dtype=torch.bfloat16)
    rotated = torch.empty_like(query)

    def step() -> None:
        append(k, v, k_cache, v_cache, rows, starts)
        append(v, k, k_cache, v_cache, rows, starts + 1, rotary=RotateHalf(query, rotated, *angles))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tensor in (k, query, angles):
        tensor.normal_()
    starts += 1
    graph.replay()
    first, second = starts.long(), starts.long() + 1
    assert equal(k_cache[rows.long(), first], k)
    assert equal(v_cache[rows.long(), first], v)
    check_rotated(k_cache[rows.long(), second], v, *angles)
    assert equal(v_cache[rows.long(), second], k)
    check_rotated(rotated, query, *angles)
