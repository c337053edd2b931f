"""What `zero_tail=True` promises: stock attention may read a live row to its very end."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from conftest import on_driver, run_python, small_driver
from faulty import FaultyDriver

import vmmkv


def poison(sequence: vmmkv.Sequence) -> None:
    """Fills a sequence with NaN."""
    for layer in range(3):
        sequence.k(layer).fill_(float("nan"))
        sequence.v(layer).fill_(float("nan"))


def row_is_zero(sequence: vmmkv.Sequence) -> bool:
    """Reads the whole row, to its end."""
    return not any(whole[sequence.row].any() for layer in range(3) for whole in sequence.cache.kv(layer))


def test_masked_attention_over_whole_rows_equals_attention_over_the_tokens(make_cache) -> None:
    cache = make_cache(pages=40, zero_tail=True)
    gone = [cache.sequence(100), cache.sequence(100)]
    for sequence in gone:
        poison(sequence)
    cache.free(gone)
    sequences = [cache.sequence(tokens) for tokens in (5, 70, 1)]
    cache.extend(sequences, [30, 0, 20])
    sequences[1].truncate(40)
    rows = torch.tensor([sequence.row for sequence in sequences], device=cache.device)
    for sequence in sequences:
        k, v = torch.randn(2, *sequence.k(1).shape).to(cache.device)
        sequence.write(1, k, v)
    q = torch.randn(3, 2, 1, cache.layout.head_dim).to(cache.device)
    k, v = (whole[rows].transpose(1, 2) for whole in cache.kv(1))
    lengths = torch.tensor([sequence.length for sequence in sequences], device=cache.device)
    mask = torch.arange(100, device=cache.device) < lengths[:, None, None, None]
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for index, sequence in enumerate(sequences):
        k, v = sequence.k(1).transpose(0, 1), sequence.v(1).transpose(0, 1)
        expected = torch.softmax(q[index] @ k.mT / cache.layout.head_dim**0.5, dim=-1) @ v
        torch.testing.assert_close(found[index], expected, atol=1e-4, rtol=1e-4)


def test_the_zero_page_counts_once_and_stays(make_cache) -> None:
    cache = make_cache(zero_tail=True)
    kept = [cache.sequence(1) for _ in range(4)]
    for sequence in kept:
        assert row_is_zero(sequence)
    assert cache.stats().physical_bytes == 5 * cache.page_size
    kept.pop().free()
    cache.trim()
    assert cache.stats().pages == {"used": 3, "surplus": 0, "free": 0, "zero": 1}
    assert (cache.page_map() == vmmkv.ZERO_PAGE).sum() == 1


@pytest.mark.parametrize("how", ["start", "one", "batch", "resume"])
def test_what_one_range_has_too_much_another_may_lack(make_cache, how: str) -> None:
    """A row without tokens has lost pages of one range: there is room, if those behind its claim in others go."""
    cache = make_cache(pages=16, layers_per_range=1, zero_tail=True, host_bytes=1 << 26)
    tokens = cache.page_size // cache.layout.record_bytes[0]
    first = cache.sequence(5 * tokens, row=0)
    if how == "resume":
        first.truncate(4 * tokens)
        first.suspend()
    else:
        first.free()
    other = cache.sequence(tokens, row=1)
    assert cache.available_pages == 4 * 3
    if how == "resume":
        first.resume()
    elif how == "start":
        first = cache.sequence(4 * tokens, row=0)
    else:
        first = cache.sequence(row=0)
        first.extend(4 * tokens) if how == "one" else cache.extend([other, first], [0, 4 * tokens])
    cache.check()
    assert first.length == 4 * tokens


def test_tokens_of_the_budget_fit_beside_the_zero_page() -> None:
    driver = small_driver("cpu")
    layout = vmmkv.KVLayout(3, 2, 16, dtype=torch.float32)
    cache = on_driver(driver, vmmkv.KVCache, layout, 4, 100, max_tokens=100, zero_tail=True)
    kept = [cache.sequence(tokens) for tokens in (1, 97, 1, 1)]
    assert sum(sequence.length for sequence in kept) == 100
    with pytest.raises(vmmkv.BudgetError, match="1 pages of"):
        on_driver(driver, vmmkv.KVCache, layout, 4, 100, max_bytes=driver.page_size, zero_tail=True)


@pytest.mark.parametrize("what", ["extend", "sequence", "adopt"])
def test_one_failed_driver_call_changes_nothing(device: str, make_cache, what: str) -> None:
    """Whichever call it is: `extend` and `sequence` are tried with each of their driver calls failing."""
    for skip in itertools.count():
        driver = FaultyDriver(small_driver(device))
        cache = make_cache(driver=driver, layers_per_range=1, zero_tail=True)
        sequences = [cache.sequence(20), cache.sequence(1)]
        if what == "adopt":
            with cache.sequence(30) as gone:
                poison(gone)
        before = driver.mapped.copy(), driver.accessible.copy(), driver.writable.copy()
        driver.fail("any", skip)
        try:
            cache.extend(sequences, 60) if what == "extend" else sequences.append(cache.sequence(60))
        except vmmkv.DriverError:
            if what == "extend":
                assert (driver.mapped, driver.accessible, driver.writable) == before
        else:
            break
        assert [sequence.length for sequence in sequences] == [20, 1]
        assert all(map(row_is_zero, sequences))
        cache.check()
        cache.extend(sequences, 60)
    assert skip > 10
    assert driver.heal()


def test_a_hole_that_could_not_be_closed_is_closed_by_the_next_growth(device: str, make_cache) -> None:
    driver = FaultyDriver(small_driver(device))
    cache = make_cache(driver=driver, zero_tail=True)
    sequence = cache.sequence(20)
    mapped = len(driver.mapped)
    driver.fail("map", skip=2)
    driver.fail("map", skip=3)  # the first that restores the tail
    with pytest.raises(vmmkv.DriverError):
        sequence.extend(50)
    assert len(driver.mapped) < mapped
    cache.check()
    assert sequence.capacity == sequence.length == 20
    sequence.extend(1)
    assert len(driver.mapped) == mapped
    assert row_is_zero(sequence)


def test_after_failed_calls_the_next_growth_makes_the_row_whole(device: str, make_cache) -> None:
    """Any two calls fail, or several in a row, so that what undoes the growth fails as well."""
    runs = [range(first, first + count) for first in range(12) for count in range(3, 7)]
    for skips in [*itertools.product(range(12), repeat=2), *runs]:
        driver = FaultyDriver(small_driver(device))
        cache = make_cache(driver=driver, pages=21, zero_tail=True)
        gone, sequence = cache.sequence(100), cache.sequence(1)
        poison(gone)
        gone.free()
        for skip in skips:
            driver.fail("any", skip)
        with contextlib.suppress(vmmkv.DriverError):
            sequence.extend(25)  # takes pages of the parked row
        driver.heal()
        cache.check()
        for tokens in (10, 30):
            sequence.extend(tokens)
            assert row_is_zero(sequence)
            cache.check()
        cache.close()
        assert not driver.mapped


def test_driver_calls_for_tails_are_counted(device: str, make_cache) -> None:
    class Counting(FaultyDriver):
        def _call(self, name, *args):
            counts[name] = counts.get(name, 0) + 1
            return super()._call(name, *args)

    counts: dict[str, int] = {}
    cache = make_cache(driver=Counting(small_driver(device)), layers_per_range=2, zero_tail=True)
    cache.sequence(1).extend(80)
    cache.trim()
    assert counts.pop("fill") > 0
    assert {name: call.count for name, call in cache.stats().driver_calls.items()} == counts


WRITE = """
    import resource, sys, torch, vmmkv
    from conftest import on_driver, small_driver, small_layout
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    driver = small_driver(sys.argv[1])
    memory = 9 * driver.page_size
    cache = on_driver(driver, vmmkv.KVCache, small_layout(driver), 4, 100, max_bytes=memory, zero_tail=True)
    sequence = cache.sequence(5)
    print("read", cache.kv(0)[0][sequence.row].sum().item(), flush=True)
    try:
        cache.kv(0)[0][sequence.row, 50] = 1
        driver.synchronize()
    except RuntimeError as error:
        sys.exit(str(error))
"""


def test_a_write_to_the_tail_is_a_fault(device: str) -> None:
    child = run_python(WRITE, device)
    assert child.stdout == "read 0.0\n"
    assert child.returncode == (-11 if device == "cpu" else 1)
    assert device == "cpu" or "illegal memory access" in child.stderr or "ILLEGAL_ADDRESS" in child.stderr


@pytest.mark.parametrize("device", ["cpu"])
def test_who_shares_can_be_read_to_the_end_after_any_failure(make_cache, device: str) -> None:
    """Also where a page was had alone in one range, and then a call failed in the next."""
    for skip in itertools.count():
        driver = FaultyDriver(small_driver(device))
        cache = make_cache(driver=driver, pages=60, layers_per_range=1, zero_tail=True)
        sequence = cache.sequence(90)
        child = sequence.fork()
        child.truncate(20)
        fault = driver.fail("any", skip)
        with contextlib.suppress(vmmkv.DriverError):
            child.extend(1)
        driver.heal()
        for row in (sequence.row, child.row):
            for arena, _ in cache._rows.ranges:
                address = arena.table.address_of(row, 0)
                assert driver.accessible.issuperset(range(address, address + arena.row_bytes, driver.page_size))
        if not fault.was_met:
            break
    assert skip > 10
