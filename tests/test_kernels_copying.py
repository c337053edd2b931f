"""append and copy_tokens against plain indexing: in Numba's simulator on host memory, or on a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import DEVICE, int32, run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import vmmkv
from vmmkv.kernels import RotateHalf, append, copy_tokens
from vmmkv.kernels.launches import multiprocessors
from vmmkv.kernels.quantized import LARGEST, dequantize, quantize
from vmmkv.kernels.row_append import append_behind, bind_append

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=4),
    heads=st.sampled_from([1, 2, 5]),
    dims=st.sampled_from([(64, 64), (80, 80), (16, 256), (192, 128)]),
    dtype=st.sampled_from(DTYPES),
    ragged=st.booleans(),
    block_size=st.sampled_from([0, 16, 32]),
    way=st.sampled_from(["append", "bound", "behind"]),
    data=st.data(),
)
def test_append(lengths, heads, dims, dtype, ragged, block_size, way, data) -> None:
    """New tokens land where they belong, and nothing else changes, in rows of a cache and in blocks."""
    starts = [start for start, _ in lengths]
    counts = [count if ragged else 1 for _, count in lengths]
    total = sum(counts)
    # A slice of a fused projection: tokens are not contiguous.
    fused = random(total, heads, dims[0] + dims[1], dtype=dtype)
    k, v = fused[..., : dims[0]], fused[..., dims[0] :]
    rows = data.draw(st.permutations(range(len(lengths))))
    cu_seqlens = int32([sum(counts[:index]) for index in range(len(counts) + 1)]) if ragged else None
    if block_size:
        blocks = data.draw(st.permutations(range(2 * len(lengths))))
        block_table = int32(blocks).view(len(lengths), 2)
        caches = [random(2 * len(lengths), block_size, heads, width, dtype=dtype) for width in dims]
        expected = [cache.clone() for cache in caches]
    else:
        layout = vmmkv.KVLayout(3, heads, dims[0], dtype, v_head_dim=dims[1])
        cache = vmmkv.KVCache(layout, len(lengths), 32, max_bytes="64MiB", device=DEVICE)
        sequences = [cache.sequence(32) for _ in lengths]
        for layer in range(3):
            for sequence in sequences:
                sequence.write(layer, *(random(32, heads, width, dtype=dtype) for width in dims))
        block_table, caches = None, list(cache.kv(1))
        everything = [view.clone() for layer in range(3) for view in cache.kv(layer)]
        expected = everything[2:4]
    first = 0
    for row, start, count in zip(rows, starts, counts):
        for index in range(count):
            position = start + index
            place = (blocks[2 * row + position // block_size], position % block_size) if block_size else (row, position)
            expected[0][place], expected[1][place] = k[first], v[first]
            first += 1
    numbers, positions = int32(rows), int32(starts)
    if way == "bound" and not ragged and not block_size:
        write = bind_append(k, v, *caches, numbers)
        write(k.data_ptr(), v.data_ptr(), positions.data_ptr())
    elif way == "behind" and not block_size:
        ends = [start + count for start, count in zip(starts, counts)]
        append_behind(k, v, *caches, numbers, positions, int32([max(ends)]), cu_seqlens)
        assert positions.tolist() == ends
    else:
        append(k, v, *caches, numbers, positions, cu_seqlens, block_table)
    if not block_size:
        caches = [view for layer in range(3) for view in cache.kv(layer)]
        expected = everything
    assert all(map(equal, caches, expected))


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
    never closer. fp32 differs by the roundings of a product and of the sum."""
    exact = rotate_half(x.double(), cos.double(), sin.double())
    error, info = (found.double() - exact).abs(), torch.finfo(x.dtype)
    if x.dtype == torch.float32:
        assert (error <= info.eps * rotate_half(*(each.double().abs() for each in (x, cos, sin)), 1)).all()
    else:
        assert (error <= info.eps * (0.501 * exact.abs() + info.smallest_normal)).all()
        assert error.norm() <= (rotate_half(x, cos, sin).double() - exact).norm()


@settings(max_examples=25)
@given(
    starts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    heads=st.sampled_from([1, 2, 5]),
    dims=st.sampled_from([(64, 64), (80, 16), (16, 256), (192, 128)]),
    dtypes=st.tuples(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.sampled_from(list(LARGEST))),
    ragged=st.booleans(),
    block_size=st.sampled_from([0, 16]),
    way=st.sampled_from(["append", "bound", "behind"]),
    of=st.sampled_from(["token_head", "sequence_head"]),
    data=st.data(),
)
def test_append_quantizes(starts, heads, dims, dtypes, ragged, block_size, way, of, data) -> None:
    """The same bits as torch makes, numbers and scales, and nothing else changes, in rows of a cache and in blocks.
    Scales of whole sequences are read, by the row of a block table, too."""
    new, held = dtypes
    counts = [data.draw(st.integers(0, 4)) if ragged else 1 for _ in starts]
    fused = strange(sum(counts), heads, dims[0] + dims[1], dtype=new)
    k, v = fused[..., : dims[0]], fused[..., dims[0] :]
    rows = data.draw(st.permutations(range(len(starts))))
    cu_seqlens = int32([sum(counts[:index]) for index in range(len(counts) + 1)]) if ragged else None
    layout = vmmkv.KVLayout(3, heads, dims[0], held, dims[1], scales=of)
    cache = vmmkv.KVCache(layout, len(starts), 16, max_bytes="64MiB", device=DEVICE)
    sequences = [cache.sequence(16) for _ in starts]
    assert len({sequence.row for sequence in sequences}) == len(starts)
    whole = of == "sequence_head"
    everything = []
    for layer in range(3):
        everything += cache.scaled_kv(layer)[:2]
        everything += cache.sequence_scales(layer) if whole else cache.scaled_kv(layer)[2:]
    for view in everything:
        view.copy_(strange_scales(*view.shape) if view.ndim == 2 else random(*view.shape, dtype=view.dtype))
    block_table = int32(data.draw(st.permutations(range(len(starts)))))[:, None] if block_size else None
    expected = [view.clone() for view in everything]
    k_numbers, v_numbers, k_scales, v_scales = expected[4:8]
    first = 0
    for row, start, count in zip(rows, starts, counts):
        home = row if block_table is None else int(block_table[row, 0])
        for position in range(start, start + count):
            of_k, of_v = (k_scales[row], v_scales[row]) if whole else (None, None)
            k_numbers[home, position], by_k = quantize(k[first], held, of_k)
            v_numbers[home, position], by_v = quantize(v[first], held, of_v)
            if not whole:
                k_scales[home, position], v_scales[home, position] = by_k, by_v
            first += 1
    caches, scales, numbers, positions = everything[4:6], everything[6:8], int32(rows), int32(starts)
    if way == "bound" and not ragged and not block_size:
        write = bind_append(k, v, *caches, numbers, *scales)
        write(k.data_ptr(), v.data_ptr(), positions.data_ptr())
    elif way == "behind" and not block_size:
        append_behind(k, v, *caches, numbers, positions, int32([16]), cu_seqlens, *scales)
        assert positions.tolist() == [start + count for start, count in zip(starts, counts)]
    else:
        append(k, v, *caches, numbers, positions, cu_seqlens, block_table, None, *scales)
    assert all(map(equal, everything, expected))


@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    dims=st.sampled_from([(64, 64), (64, 32), (80, 80), (192, 64)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    way=st.sampled_from(["in rows", "in blocks", "one each"]),
    in_place=st.booleans(),
    data=st.data(),
)
def test_append_rotates(lengths, heads, dims, dtype, way, in_place, data) -> None:
    """K lands rotated where it belongs, V as it is, and queries of all tokens beside them; nothing else is read, nor
    changed."""
    (query_heads, kv_heads), (width, rotary_dim) = heads, dims
    counts = [1 if way == "one each" else count for _, count in lengths]
    nobodys = 0 if way == "one each" else 2
    total = sum(counts)
    # Slices of one projection, with something in between.
    fused = torch.full((total + nobodys, query_heads + 2 * kv_heads + 2, width), torch.nan, dtype=dtype, device=DEVICE)
    query, _, k, _, v = fused.split((query_heads, 1, kv_heads, 1, kv_heads), 1)
    for states, tokens in ((query, total + nobodys), (k, total), (v, total)):
        states[:tokens] = random(tokens, *states.shape[1:], dtype=dtype)
    angles = torch.full((2, total + nobodys, rotary_dim + 16), torch.nan, dtype=dtype, device=DEVICE)
    cos, sin = angles[..., 8 : 8 + rotary_dim].copy_(random(2, total + nobodys, rotary_dim, dtype=dtype))
    before, given_query = fused.clone(), query.clone()
    rows = data.draw(st.permutations(range(len(lengths))))
    block_table, shape = None, (len(rows), 12, 3, 2, kv_heads, width)  # token-major
    if way == "in blocks":
        blocks = data.draw(st.permutations(range(len(rows))))
        block_table, shape = int32(blocks).view(-1, 1), (len(rows), 16, 3, 2, kv_heads, width)
    record = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    expected = record.clone()
    cu_seqlens = None if way == "one each" else int32([sum(counts[:index]) for index in range(len(counts) + 1)])
    rotated = query if in_place else torch.full_like(query, torch.nan)
    starts = [start for start, _ in lengths]
    kv = record[:, :, 1, 0], record[:, :, 1, 1]
    append(k, v, *kv, int32(rows), int32(starts), cu_seqlens, block_table, RotateHalf(query, rotated, cos, sin))
    check_rotated(rotated, given_query, cos, sin)
    token = 0
    for row, start, count in zip(rows, starts, counts):
        for position in range(start, start + count):
            place = record[blocks[row] if block_table is not None else row, position, 1]
            check_rotated(place[:1], k[token : token + 1], cos[token : token + 1], sin[token : token + 1])
            assert equal(place[1], v[token])
            place.fill_(torch.nan)
            token += 1
    assert equal(record, expected)
    before[:, :query_heads] = rotated if in_place else given_query
    assert equal(fused, before)


@settings(max_examples=8)
@given(
    starts=st.lists(st.integers(0, 9), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    dims=st.sampled_from([(64, 64), (80, 32), (192, 64)]),
    dtypes=st.tuples(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.sampled_from(list(LARGEST))),
    way=st.sampled_from(["in rows", "in blocks", "one each"]),
    whole=st.booleans(),
    data=st.data(),
)
def test_append_rotates_into_8_bits(starts, heads, dims, dtypes, way, whole, data) -> None:
    """K is as exact as the format; its bits are those of what is rotated into a whole cache, and then quantized, also
    with scales of whole sequences. V and queries are as without the other, and nothing else changes."""
    (query_heads, kv_heads), (width, rotary_dim), (new, held) = heads, dims, dtypes
    counts = [1 if way == "one each" else data.draw(st.integers(0, 2)) for _ in starts]
    total, rows = sum(counts), data.draw(st.permutations(range(len(starts))))
    query, (k, v) = random(total, query_heads, width, dtype=new), strange(2, total, kv_heads, width, dtype=new)
    cos, sin = random(2, total, rotary_dim, dtype=new)
    shape = len(starts), 16, kv_heads, width
    kept, numbers = random(2, *shape, dtype=new), random(2, *shape, dtype=held)
    scales = strange_scales(2, len(starts), kv_heads) if whole else random(2, *shape[:3], dtype=torch.float32)
    expected = numbers.clone(), scales.clone()
    blocks = data.draw(st.permutations(rows)) if way == "in blocks" else range(len(rows))
    block_table = int32(blocks)[:, None] if way == "in blocks" else None
    cu_seqlens = None if way == "one each" else int32([sum(counts[:index]) for index in range(len(counts) + 1)])
    places = int32(rows), int32(starts), cu_seqlens, block_table
    rotated, alone = torch.empty_like(query), torch.empty_like(query)
    append(k, v, *kept, *places, RotateHalf(query, alone, cos, sin))
    append(k, v, *numbers, *places, RotateHalf(query, rotated, cos, sin), *scales)
    assert equal(rotated, alone)
    token = 0
    for row, start, count in zip(rows, starts, counts):
        there = slice(None), blocks[row], slice(start, start + count)
        token += count
        if whole:
            expected[0][there] = quantize(kept[there], held, scales[:, None, row])[0]
            continue
        for into, states in zip(expected, quantize(kept[there], held)):
            into[there] = states
        exact = rotate_half(*(each[token - count : token].double() for each in (k, cos, sin)))
        found = dequantize(numbers[there][0], scales[there][0], torch.float64)
        lost, info = 1 / 254 if held == torch.int8 else 1 / 16, torch.finfo(new)
        top = exact.abs().amax(-1, keepdim=True)
        near = (found - exact).abs() <= lost * top + info.eps * (top + info.smallest_normal)
        assert (near | ~exact.isfinite().all(-1, keepdim=True)).all()
    assert equal(numbers, expected[0])
    assert equal(scales, expected[1])


@settings(max_examples=25)
@given(
    heads=st.sampled_from([1, 3]),
    width=st.sampled_from([64, 80]),
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 5), max_size=4),
    data=st.data(),
)
def test_copy_tokens(heads, width, dtype, lengths, data) -> None:
    source = random(4, 10, heads, width, dtype=dtype)
    target = random(3, 40, heads, 2 * width, dtype=dtype)[..., :width]
    expected = target.clone()
    rows = [(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))) for _ in lengths]
    starts = [(data.draw(st.integers(0, 5)), 10 * index) for index in range(len(lengths))]  # apart from each other
    for (row, to_row), (start, to_start), length in zip(rows, starts, lengths):
        expected[to_row, to_start : to_start + length] = source[row, start : start + length]
    columns = [*zip(*rows), *zip(*starts)] if lengths else [(), (), (), ()]
    source_rows, target_rows, source_starts, target_starts = map(int32, columns)
    copy_tokens(source, target, source_rows, source_starts, target_rows, target_starts, int32(lengths), 5)
    assert equal(target, expected)


@settings(max_examples=10)
@given(
    heads=st.sampled_from([1, 3, 9]),
    width=st.sampled_from([64, 80, 128]),
    parts=st.lists(st.floats(0, 1.2), min_size=1, max_size=3),
    most=st.integers(2 * MANY, 18 * MANY),
)
def test_copy_many_tokens(heads, width, parts, most) -> None:
    """Of longer ranges than were announced the rest is not copied."""
    record = random(2 * len(parts), 2 * most, 2, heads, width, dtype=torch.bfloat16)[:, :, 1]
    expected, rows = record.clone(), torch.randperm(2 * len(parts)).view(2, -1).tolist()
    starts = torch.randint(0, most // 2, (2, len(parts))).tolist()
    lengths = [int(part * most) for part in parts]
    for row, to_row, start, to_start, length in zip(*rows, *starts, lengths):
        count = min(length, most)
        expected[to_row, to_start : to_start + count] = record[row, start : start + count]
    source_rows, target_rows, source_starts, target_starts = map(int32, (*rows, *starts))
    copy_tokens(record, record, source_rows, source_starts, target_rows, target_starts, int32(lengths), most)
    assert equal(record, expected)


def test_what_does_not_fit_is_refused_before_any_launch() -> None:
    k = random(2, 2, 64, dtype=torch.float16)
    cache = random(2, 8, 2, 64, dtype=torch.float16)
    before = cache.clone()
    rows, starts = int32([0, 1]), int32([0, 0])
    for error, arguments in (
        (ValueError, (k, k[:1], cache, cache, rows, starts)),
        (ValueError, (k, k, cache[..., :32], cache, rows, starts)),
        (ValueError, (k[..., ::2], k[..., ::2], cache[..., ::2], cache[..., ::2], rows, starts)),
        (ValueError, (k[..., 1:57], k[..., 1:57], cache[..., 1:57], cache[..., 1:57], rows, starts)),
        (ValueError, (k[..., :60], k[..., :60], cache[..., :60], cache[..., :60], rows, starts)),
        (ValueError, (k, k, cache[0], cache, rows, starts)),
        (ValueError, (k, k, cache.to("meta"), cache, rows, starts)),
        (TypeError, (k, k, cache.float(), cache, rows, starts)),
        (TypeError, (k, k, cache, cache, rows.long(), starts)),
        (ValueError, (k, k, cache, cache, rows[:1], starts)),
        (ValueError, (k, k, cache, cache, rows, starts, int32([0, 1]))),
        (ValueError, (k[..., :0], k, cache[..., :0], cache, rows, starts)),
        (ValueError, (k[:, :0], k[:, :0], cache[:, :, :0], cache[:, :, :0], rows, starts)),
    ):
        with pytest.raises(error, match=r"must|differ|on "):
            append(*arguments)
    q, angles = random(2, 4, 64, dtype=torch.float16), random(2, 64, dtype=torch.float16)
    for error, rotary in (
        (ValueError, (q[:1], q, angles, angles)),
        (ValueError, (q, q[:, :2], angles, angles)),
        (ValueError, (q[..., :32], q[..., :32], angles, angles)),
        (ValueError, (q, q[:, :1].expand_as(q), angles, angles)),
        (ValueError, (q, q, angles, angles[:, :32])),
        (ValueError, (q, q, angles[:1], angles[:1])),
        (ValueError, (q, q, angles[:, :24], angles[:, :24])),
        (ValueError, (q, q, angles.repeat(1, 2), angles.repeat(1, 2))),
        (ValueError, (q, q, angles, angles.T.contiguous().T)),
        (ValueError, (q, q, angles[:, 1:33], angles[:, 1:33])),
        (ValueError, (q, q, angles, angles.to("meta"))),
        (TypeError, (q, q, angles.float(), angles.float())),
        (TypeError, (q.float(), q.float(), angles, angles)),
    ):
        with pytest.raises(error, match=r"must|on "):
            append(k, k, cache, cache, rows, starts, rotary=RotateHalf(*rotary))
    eights = [each.to(torch.float8_e4m3fn) for each in (k, k, cache, cache)]
    with pytest.raises(TypeError, match="must"):
        append(*eights, rows, starts, rotary=RotateHalf(q, q, angles, angles))
    assert equal(cache, before)


def test_what_cannot_be_copied_is_refused_before_any_launch() -> None:
    cache = random(2, 8, 2, 64, dtype=torch.float16)
    before, ranges = cache.clone(), [int32([each]) for each in (0, 0, 1, 0, 1)]
    many = [each.repeat(65_536) for each in ranges]
    for error, match, arguments in (
        (ValueError, r"\[2, 8, 2, 0\]", (cache[..., :0], cache[..., :0], *ranges, 1)),
        (ValueError, r"\[2, 8, 0, 64\]", (cache[:, :, :0], cache[:, :, :0], *ranges, 1)),
        (TypeError, "lengths None", (cache, cache, *ranges[:4], None, 1)),
        (TypeError, "source_rows None", (cache, cache, None, *ranges[1:], 1)),
        (TypeError, "max_length 1.5", (cache, cache, *ranges, 1.5)),
        (TypeError, "max_length None", (cache, cache, *ranges, None)),
        (ValueError, "max_length -1", (cache, cache, *ranges, -1)),
        (ValueError, "65,536 ranges", (cache, cache, *many, 1)),
        (ValueError, "blocks of threads", (cache, cache, *ranges, 1 << 40)),
    ):
        with pytest.raises(error, match=match):
            copy_tokens(*arguments)
    assert equal(cache, before)


def test_8_bits_without_their_scales_are_refused() -> None:
    k = random(2, 2, 64, dtype=torch.bfloat16)
    cache = random(2, 8, 2, 64, dtype=torch.int8)
    rows, starts, scales = int32([0, 1]), int32([0, 0]), torch.ones(2, 8, 2, device=DEVICE)
    before, ones = cache.clone(), scales.clone()
    for error, given_scales in (
        (TypeError, (None, None)),
        (TypeError, (scales, None)),
        (TypeError, (scales, scales.half())),
        (ValueError, (scales[:, :, :1], scales)),
        (ValueError, (scales.to("meta"), scales)),
        (ValueError, (scales, scales[:, :1].expand(-1, 8, -1))),
        (ValueError, (scales[:, 0], scales)),
        (ValueError, (scales, scales[:, 0])),
        (ValueError, (scales[:, 0], scales[:1, 0])),
        (ValueError, (scales[:, 0, :1], scales[:, 0])),
        (ValueError, (scales[0, 0], scales[0, 0])),
        (TypeError, (scales[:, 0], None)),
    ):
        with pytest.raises(error, match=r"[kv]_scales"):
            append(k, k, cache, cache, rows, starts, None, None, None, *given_scales)
    blocks, table = random(4, 16, 2, 64, dtype=torch.int8), int32([[0], [1]])
    with pytest.raises(ValueError, match=r"k_scales \[4, 2\]; it must be \[2, 2\]"):
        append(k, k, blocks, blocks, rows, starts, None, table, None, *[torch.ones(4, 2, device=DEVICE)] * 2)
    whole = random(2, 8, 2, 64, dtype=torch.bfloat16)
    for caches in ((whole, whole), (cache.view(torch.float8_e5m2), cache), (cache, cache.view(torch.float8_e4m3fn))):
        with pytest.raises(TypeError, match="must be"):
            append(k, k, *caches, rows, starts, None, None, None, scales, scales)
    assert equal(cache, before)
    assert equal(scales, ones)


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
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                k, v, k_cache, v_cache, rows, starts = new_and_cache()
                for _ in range(300):
                    k.normal_()
                    append(k, v, k_cache, v_cache, rows, starts)
                    assert equal(k_cache[rows.long(), starts.long()], k)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


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
