"""What a user of the cache relies on: growth, adoption, reclaim, accounting, and errors that leave it usable."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from itertools import count, product

import numpy as np
import pytest
import torch
from conftest import on_driver, run_python, small_driver, small_layout
from faulty import FaultyDriver
from interruption import interrupted
from torch._subclasses.fake_tensor import FakeTensorMode

import vmmkv
from vmmkv.torch import GrowableTensor


def driver_calls(cache: vmmkv.KVCache) -> int:
    return sum(call.count for call in cache.stats().driver_calls.values())


# ---------------------------------------------------------------------- growth


def test_growing_inside_the_last_page_makes_no_driver_call(make_cache) -> None:
    sequence = make_cache().sequence()
    assert sequence.cache.stats().physical_bytes == 0
    sequence.extend(1)
    assert sequence.cache.stats().physical_bytes == sequence.cache.page_size
    before = driver_calls(sequence.cache)
    sequence.extend(sequence.capacity - 1)
    assert driver_calls(sequence.cache) == before
    sequence.extend(1)
    assert driver_calls(sequence.cache) > before


def test_a_batch_grows_whole_or_not_at_all(make_cache) -> None:
    cache = make_cache(pages=10)
    sequences = [cache.sequence(5) for _ in range(4)]
    before = cache.page_map()
    with pytest.raises(vmmkv.OutOfPagesError) as caught:
        cache.extend(sequences, [0, 1, 60, 0])
    assert caught.value.requested > caught.value.available
    assert [sequence.length for sequence in sequences] == [5, 5, 5, 5]
    assert np.array_equal(before, cache.page_map())
    cache.extend(sequences, 5)


@pytest.mark.parametrize("call", ["create", "map", "set_access"])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_failed_driver_call_changes_nothing(device: str, make_cache, call: str, skip: int) -> None:
    """The third of five creates fails, say."""
    driver = FaultyDriver(small_driver(device))
    cache = make_cache(driver=driver, layers_per_range=1)
    sequences = [cache.sequence(20), cache.sequence(20)]
    mapped = dict(driver.mapped)
    driver.fail(call, skip)
    with pytest.raises(vmmkv.DriverError, match="INJECTED"):
        cache.extend(sequences, 40)
    assert driver.mapped.items() >= mapped.items()
    assert [sequence.length for sequence in sequences] == [20, 20]
    cache.check()
    cache.extend(sequences, 40)


def test_a_device_without_memory_is_pressure_first_and_an_error_last(device: str, make_cache) -> None:
    driver = FaultyDriver(small_driver(device))
    cache = make_cache(driver=driver)
    cache.sequence(60).free()
    other, sequence = cache.sequence(1), cache.sequence(1)
    driver.fail("create", out_of_memory=True)
    sequence.extend(30)
    other.truncate(0)
    for _ in range(2):
        driver.fail("create", out_of_memory=True)
    with pytest.raises(vmmkv.OutOfPagesError, match="create failed with INJECTED"):
        sequence.extend(69)
    assert sequence.length == 31
    cache.check()


# ---------------------------------------------------------------------- shrinking


def test_truncated_tokens_can_be_grown_again_without_a_driver_call(make_cache) -> None:
    sequence = make_cache().sequence(100)
    before = driver_calls(sequence.cache)
    sequence.truncate(3)
    sequence.extend(97)
    assert driver_calls(sequence.cache) == before


def test_a_sequence_that_begins_late_maps_nothing_in_front(make_cache) -> None:
    cache = make_cache(max_seq_len=1000, pages=12)
    late, other = cache.sequence(), cache.sequence()
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.extend([late], 900)
    cache.extend([late, other], [900, 5], starts=[870, 0])
    assert (late.start, late.length, len(late.k(0)), other.length) == (870, 900, 30, 5)
    for sequence, tokens, start in ((late, 5, 1), (cache.sequence(), 6, 7)):
        with pytest.raises(ValueError, match="sequences without tokens"):
            cache.extend([sequence], tokens, starts=[start])


@pytest.mark.parametrize("tokens", [-1, 9, 31])
def test_truncate_and_release_know_which_tokens_there_are(make_cache, tokens: int) -> None:
    sequence = make_cache().sequence(30)
    sequence.release_before(10)
    for operation in (sequence.truncate, sequence.release_before):
        with pytest.raises(ValueError, match="10 to 30"):
            operation(tokens)


# ---------------------------------------------------------------------- adoption and reclaim


@pytest.mark.usefixtures("undebugged")
def test_expected_tokens_find_the_row_that_fits_and_map_nothing(make_cache) -> None:
    cache = make_cache()
    cache.free([cache.sequence(n) for n in (100, 20, 60)])
    before = driver_calls(cache)
    for expected in (58, 95, 18):
        sequence = cache.sequence(expected_tokens=expected)
        assert sequence.length == 0
        assert sequence.capacity >= expected  # any other choice leaves one of them too little
    assert driver_calls(cache) == before
    with pytest.raises(vmmkv.SequenceTooLongError):
        cache.sequence(expected_tokens=cache.max_seq_len + 1)
    with pytest.raises(ValueError, match="-1"):
        cache.sequence(expected_tokens=-1)


def test_pages_that_a_sequence_expects_to_need_are_reclaimed_after_parked_ones(make_cache) -> None:
    cache = make_cache(pages=20)
    first, second, busy = cache.sequence(30), cache.sequence(30), cache.sequence(1)
    cache.free([first, second])
    growing = cache.sequence(expected_tokens=30)
    busy.extend(60)
    assert cache.stats().pages_created == 20
    before = driver_calls(cache)
    growing.extend(30)
    assert driver_calls(cache) == before
    growing.truncate(0)
    busy.extend(39)  # nothing else is left
    assert busy.length == 100


def test_adopting_a_parked_row_makes_no_driver_call(make_cache) -> None:
    cache = make_cache()
    for _ in range(3):
        cache.free([cache.sequence(n) for n in (100, 20, 60)])
    before = driver_calls(cache)
    sequences = [cache.sequence(n) for n in (58, 95, 18)]
    assert driver_calls(cache) == before
    assert cache.stats().adoptions == 9
    assert cache.stats().pages["used"] == sum(cache.layout.pages(s.length, cache.page_size) for s in sequences)


def test_parked_pages_serve_others_under_pressure_oldest_first(make_cache) -> None:
    cache = make_cache(pages=20)
    old, new, busy = cache.sequence(30), cache.sequence(30), cache.sequence(1)
    numbers = new.number
    old_pages = np.flatnonzero(cache.page_map() == old.number)
    old.free()
    new.free()
    busy.extend(60)
    assert (cache.page_map()[old_pages] == busy.number).sum() > 0
    assert cache.stats().pages_created == 20
    assert numbers not in cache.page_map()
    assert cache.stats().pages["surplus"] == 2 + 6  # four of the older row's pages went, none of the newer's


def test_trim_gives_everything_unused_back(make_cache) -> None:
    cache = make_cache()
    kept = cache.sequence(30)
    kept.k(0).fill_(4)
    cache.sequence(100).free()
    before = cache.stats()
    assert cache.trim() == before.physical_bytes - before.pages["used"] * cache.page_size > 0
    assert cache.stats().physical_bytes == before.pages["used"] * cache.page_size
    assert (kept.k(0) == 4).all()
    assert cache.trim() == 0


def test_scrub_zeroes_what_another_sequence_left(make_cache) -> None:
    cache = make_cache(max_sequences=2, pages=25, scrub=True)
    for _ in range(4):
        sequences = [cache.sequence(60), cache.sequence(1)]
        sequences[1].extend(50)
        for sequence in sequences:
            for layer in range(3):
                assert not sequence.k(layer).any()
                assert not sequence.v(layer).any()
                sequence.k(layer).fill_(float("nan"))
                sequence.v(layer).fill_(float("nan"))
        cache.free(sequences)


# ---------------------------------------------------------------------- accounting


def test_waste_is_what_no_token_fills(make_cache) -> None:
    cache = make_cache()
    kept = cache.sequence(1)
    stats = cache.stats()
    assert stats.waste == pytest.approx(1 - cache.layout.token_bytes / cache.page_size)
    assert stats.token_bytes == kept.length * cache.layout.token_bytes


def test_page_map_and_uses_tell_who_has_had_a_page(make_cache) -> None:
    cache = make_cache()
    first, second = cache.sequence(30), cache.sequence(10)
    counts = {number: int((cache.page_map() == number).sum()) for number in (first.number, second.number)}
    assert counts == {first.number: 6, second.number: 2}
    first.free()
    assert (cache.page_map() == vmmkv.SURPLUS_PAGE).sum() == 6
    assert cache.stats().page_uses == 8
    cache.trim()
    assert (cache.page_map() == vmmkv.VACANT_PAGE).sum() == 6


@pytest.mark.usefixtures("undebugged")
def test_driver_calls_are_counted_and_timed(device: str, make_cache) -> None:
    class Counting(FaultyDriver):
        def _call(self, name, *args):
            result = super()._call(name, *args)
            counts[name] = counts.get(name, 0) + 1
            return result

    counts: dict[str, int] = {}
    cache = make_cache(driver=Counting(small_driver(device)), layers_per_range=2)
    sequences = [cache.sequence(40), cache.sequence(1)]
    sequences[0].free()
    cache.trim()
    cache.extend(sequences[1:], 50)
    stats = cache.stats()
    counts.pop("reserve")  # addresses are no memory
    assert {name: call.count for name, call in stats.driver_calls.items()} == counts
    assert stats.driver_seconds == sum(call.seconds for call in stats.driver_calls.values()) > 0


@pytest.mark.parametrize(
    ("size", "pages"),
    [(10 * 4096 + 1, 10), ("40KiB", 10), ("0.04096 MB", 10), ("50%", 50), (0.5, 50), ({"max_tokens": 100}, 19 + 3)],
)
def test_budgets(monkeypatch: pytest.MonkeyPatch, size, pages: int) -> None:
    """100 tokens take 19 pages in one sequence, and up to a page more for each of three others."""
    driver = small_driver("cpu")
    monkeypatch.setattr(driver, "memory_info", lambda: (101 * 4096, 1000 * 4096))
    budget = size if isinstance(size, dict) else {"max_bytes": size}
    cache = on_driver(driver, vmmkv.KVCache, small_layout(driver), 4, 100, **budget)
    assert cache.stats().budget_bytes == pages * 4096


# ---------------------------------------------------------------------- errors


def test_a_certain_row(make_cache) -> None:
    """Whether it is empty, parked, cut in front, or was shared."""
    cache = make_cache()
    one, two, three = (cache.sequence(30, row=row) for row in (2, 0, 3))
    assert [sequence.row for sequence in (one, two, three)] == [2, 0, 3]
    fork = one.fork()
    with pytest.raises(vmmkv.OutOfRowsError, match=f"row 1.*sequence {fork.number}"):
        cache.sequence(row=1)
    for row in (-1, 4, 1 << 70):
        with pytest.raises(vmmkv.OutOfRangeError, match="rows are 0 to 3"):
            cache.sequence(row=row)
    with pytest.raises(vmmkv.ArgumentError, match="row=1 and token_ids"):
        cache.sequence(token_ids=[1, 2], row=1)
    two.release_before(25)
    kept = []
    for sequence in (one, two, three, fork):
        row = sequence.row
        sequence.free()
        kept.append(cache.sequence(40, row=row))
        assert kept[-1].row == row
        cache.check()


def test_more_tokens_than_a_row(make_cache) -> None:
    cache = make_cache()
    sequence = cache.sequence(99)
    for operation in (lambda: sequence.extend(2), lambda: cache.extend([sequence], 2), lambda: cache.sequence(101)):
        with pytest.raises(vmmkv.SequenceTooLongError, match=r"101 tokens.*max_seq_len=100"):
            operation()
    sequence.extend(1)


@pytest.mark.parametrize(("end", "message"), [("free", "was freed"), ("close", "closed")])
def test_use_after_free(make_cache, end: str, message: str) -> None:
    cache = make_cache()
    sequence = cache.sequence(5)
    (sequence if end == "free" else cache).__exit__(None, None, None)
    calls = [
        lambda: sequence.extend(0),
        lambda: cache.extend([sequence], 0),
        lambda: sequence.k(0),
        lambda: sequence.length,
        lambda: sequence.truncate(0),
        lambda: sequence.release_before(0),
        sequence.fork,
    ]
    for call in calls + [cache.sequence, lambda: cache.kv(0), cache.stats, cache.trim] * (end == "close"):
        with pytest.raises(vmmkv.UseAfterFreeError, match=message):
            call()
    for end_again in (sequence.free, *[cache.close] * (end == "close")):
        end_again()
    assert "gone" in repr(sequence)


def test_tokens_that_are_no_whole_numbers_or_not_one_for_each(make_cache) -> None:
    cache = make_cache()
    sequences = [cache.sequence(3), cache.sequence(4)]
    for tokens, error in (
        (2**63 - 1, vmmkv.SequenceTooLongError),
        ([2**64 - 1, 1], vmmkv.SequenceTooLongError),
        (10**5000, vmmkv.SequenceTooLongError),
        (np.array([-1, 1]), ValueError),
        (-(10**5000), ValueError),
        ([1, None], TypeError),
        ([1, 2, 3], ValueError),
        ([[1], [2, 3]], ValueError),
        (1.5, TypeError),
        ({1: 1, 2: 2}, TypeError),
    ):
        with pytest.raises(error, match=r"whole number|tokens|one for each|in order"):
            cache.extend(sequences, tokens)
    assert [sequence.length for sequence in sequences] == [3, 4]
    cache.extend(dict.fromkeys(sequences).keys(), np.int32(2))
    assert [sequence.length for sequence in sequences] == [5, 6]


def test_arguments_of_another_kind_are_refused(make_cache) -> None:
    """By an error of ours, and nothing has changed."""
    cache, stranger = make_cache(), make_cache().sequence(3)
    sequence = cache.sequence(3)
    wrong = {
        "index=0.5": lambda: cache.reorder([sequence], [0.5]),
        "indices=0": lambda: cache.reorder([sequence], 0),
        "tokens=1.5": lambda: sequence.truncate(1.5),
        "token='a'": lambda: sequence.release_before("a"),
        "a number of": lambda: sequence.truncate(10**5000),
        "row='a'": lambda: cache.sequence(row="a"),
        "tokens=True": lambda: cache.sequence(True),
        "reuse=0": lambda: cache.sequence(token_ids=[1], reuse=0),
        "layer='a'": lambda: cache.kv("a"),
        "layer=True": lambda: sequence.v(True),
        "range=None": lambda: cache.range(None),
        "None": lambda: sequence.record_stream(None),
        "scrub=1": lambda: make_cache(scrub=1),
        "large_frames='no'": lambda: make_cache(large_frames="no"),
        "reserved='1MiB' without a pool": lambda: make_cache(reserved="1MiB"),
        "twice": lambda: cache.extend([sequence, sequence], 1),
        "truncate": lambda: sequence.extend(-1),
        "another cache": lambda: cache.extend([stranger], 1),
        "belongs to": lambda: cache.fork_many(stranger, 1),
        "from 4 on": lambda: cache.unshare([sequence], 4),
        "-1": lambda: cache.unshare([sequence], -1),
        "0.5": lambda: cache.unshare([sequence], 0.5),
        "named twice": lambda: cache.unshare([sequence, sequence]),
        "count=-1": lambda: cache.fork_many(sequence, -1),
        "count=1.5": lambda: cache.fork_many(sequence, 1.5),
    }
    for message, call in wrong.items():
        with pytest.raises((vmmkv.ArgumentError, ValueError), match=re.escape(message)):
            call()
    with pytest.raises(ValueError, match="another cache"):
        cache.free([stranger])
    for sequences in (sequence, None, [None], [[sequence]], [0]):
        for call in (lambda sequences=sequences: cache.extend(sequences, 1), lambda each=sequences: cache.free(each)):
            with pytest.raises(TypeError, match=r"a list of sequences|among the sequences"):
                call()
    for name, number in product(("lookahead", "overread", "max_sequences"), (True, -1)):
        with pytest.raises(vmmkv.LayoutError, match=f"{name}={number}"):
            make_cache(**{name: number})
    with pytest.raises(vmmkv.ShapeError, match="several lengths"):
        cache.sequence(token_ids=[[1, 2], [3]])
    assert (sequence.length, sequence.start, stranger.length, cache.stats().rows["live"]) == (3, 0, 3, 1)
    cache.check()


@pytest.mark.parametrize("number", [np.uint8, torch.tensor], ids=["uint8", "tensor"])
def test_whole_numbers_of_other_libraries_are_numbers(make_cache, number) -> None:
    """A tensor is changed in place by `+=`: books that had taken one in would be wrong, one through the other."""
    cache = make_cache()
    sequence = cache.sequence(number(4), expected_tokens=number(9))
    sequence.extend(number(2))
    cache.extend([sequence], number(1))
    sequence.truncate(number(6))
    assert cache.shared_pages([1, 2], expected_tokens=number(5)) == 0
    cache.fork_many(sequence, number(1))
    assert {type(value) for value in cache.stats().pages.values()} == {int}
    assert cache.sequence(row=number(3)).row == 3
    assert cache.kv(number(0))[0].data_ptr() == cache.kv(0)[0].data_ptr()
    for missing in (cache.kv, cache.range, lambda row: cache.sequence(row=row)):
        with pytest.raises(vmmkv.OutOfRangeError, match="200"):
            missing(number(200))
    cache.check()


def test_write_checks_shape_dtype_and_device(make_cache) -> None:
    sequence = make_cache().sequence(4)
    good = torch.randn_like(sequence.k(0))
    sequence.write(0, good, good)
    other = torch.randn_like(good)
    for bad, error in (
        (good[:, :1], vmmkv.ShapeError),
        (good[0], vmmkv.ShapeError),
        (torch.cat([good, good]), vmmkv.ShapeError),
        (good[:2], vmmkv.ShapeError),
        (good.half(), vmmkv.DtypeError),
        (good.to("meta"), vmmkv.DeviceError),
        (FakeTensorMode().from_tensor(good), vmmkv.ArgumentError),
        (good.to_sparse(), vmmkv.ArgumentError),
        (good.cpu().numpy(), vmmkv.ArgumentError),
        (None, vmmkv.ArgumentError),
    ):
        for k, v in ((bad, other), (other, bad)):
            with pytest.raises(error):
                sequence.write(0, k, v)
    assert torch.equal(sequence.k(0), good)
    assert torch.equal(sequence.v(0), good)
    sequence.write(0, good[:2] * 3, good[:2] * 3)
    assert torch.equal(sequence.v(0), torch.cat([good[:2], good[:2] * 3]))


ERRORS = [error for error in vars(vmmkv).values() if isinstance(error, type) and issubclass(error, vmmkv.VmmkvError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_cross_from_process_to_process(kind: type[vmmkv.VmmkvError]) -> None:
    arguments = ("cuMemMap", "INVALID", "why") if issubclass(kind, vmmkv.DriverError) else ("what and why",)
    numbers = {"requested": 3, "available": 1} if kind is vmmkv.OutOfPagesError else {}
    error = kind(*arguments, **numbers)
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is kind
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


def test_what_owns_memory_cannot_be_copied(make_cache) -> None:
    cache = make_cache()
    for owner in (cache, cache.sequence(3), cache.pool):
        for do in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                do(owner)


LAYOUT = vmmkv.KVLayout(1, 1, 8)
HUGE = 10**5000


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: vmmkv.KVLayout(2.0, 1, 8), vmmkv.LayoutError, "num_layers=2.0"),
        (lambda: vmmkv.KVLayout(2, 1, 8, layers_per_range=1.5), vmmkv.LayoutError, "layers_per_range=1.5"),
        (lambda: vmmkv.KVLayout(2, "1", 8), vmmkv.LayoutError, "num_kv_heads='1'"),
        (lambda: vmmkv.KVLayout(2, 1, [8, 8.0]), vmmkv.LayoutError, "head_dim=8.0"),
        (lambda: vmmkv.KVLayout(1, 1, None), vmmkv.LayoutError, "head_dim=None"),
        (lambda: vmmkv.KVLayout(1 << 40, 1, 8), vmmkv.LayoutError, "num_layers"),
        (lambda: vmmkv.KVLayout(1, HUGE, 8), vmmkv.LayoutError, "num_kv_heads"),
        (lambda: GrowableTensor((2, HUGE), device="cpu"), vmmkv.LayoutError, "shape_max"),
        (lambda: GrowableTensor((1 << 62,) * 20, device="cpu"), vmmkv.LayoutError, "TiB"),
        (lambda: GrowableTensor((2, 2), "float32", "cpu"), vmmkv.DtypeError, "torch.dtype"),
        (lambda: vmmkv.KVCache(None, 2, 8, device="cpu"), vmmkv.ArgumentError, "layout=None"),
        (lambda: vmmkv.KVCache(LAYOUT, "2", 8, device="cpu"), vmmkv.LayoutError, "max_sequences='2'"),
        (lambda: vmmkv.KVCache(LAYOUT, HUGE, 8, device="cpu"), vmmkv.LayoutError, "max_sequences"),
        (lambda: vmmkv.KVCache(LAYOUT, 0, 8, device="cpu"), vmmkv.LayoutError, "at least 1"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, None, device="cpu"), vmmkv.LayoutError, "max_seq_len=None"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, HUGE, device="cpu"), vmmkv.LayoutError, "max_seq_len"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, max_bytes=10**400, device="cpu"), vmmkv.BudgetError, "size of 1000"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, max_bytes=HUGE, device="cpu"), vmmkv.BudgetError, "a size of"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, max_tokens=1.5, device="cpu"), vmmkv.BudgetError, "max_tokens=1.5"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, max_tokens=0, device="cpu"), vmmkv.BudgetError, "."),
        *(
            (lambda size=size: vmmkv.KVCache(LAYOUT, 2, 8, max_bytes=size, device="cpu"), vmmkv.BudgetError, ".")
            for size in (0, "lots", "1000TB", "150%")
        ),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, max_bytes=1 << 20, max_tokens=5, device="cpu"), vmmkv.BudgetError, "."),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, max_tokens=HUGE, device="cpu"), vmmkv.BudgetError, "max_tokens"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, page_size=4096.0, device="cpu"), vmmkv.LayoutError, "page_size=4096.0"),
        (lambda: vmmkv.KVCache(LAYOUT, 2, 8, page_size=HUGE, device="cpu"), vmmkv.LayoutError, "page_size"),
    ],
    ids=range(28),
)
def test_arguments_that_are_no_numbers(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_more_addresses_than_there_are(device: str) -> None:
    layout = vmmkv.KVLayout(32, 8, 128)
    with pytest.raises(vmmkv.LayoutError, match=r"max_sequences=8192.*max_seq_len=131072.*128\.0 TiB.*Lower"):
        vmmkv.KVCache(layout, 8192, 131_072, max_bytes="64MiB", device=device)
    vmmkv.KVCache(layout, 4096, 131_072, max_bytes="64MiB", device=device).sequence(1)


# ---------------------------------------------------------------------- forks

WRITES_TO_WHAT_IS_SHARED = """
    import sys
    from conftest import on_driver, small_driver, small_layout
    import vmmkv

    driver = small_driver(sys.argv[1])
    cache = on_driver(driver, vmmkv.KVCache, small_layout(driver), 4, 100, max_bytes=40 * driver.page_size)
    parent = cache.sequence(20)  # 3.75 pages
    fork = parent.fork()
    parent.k(0).fill_(1)
    fork.k(0)[16:].fill_(2)  # in the page that is its own
    cache.pool.driver.synchronize()
    print(parent.k(0)[16:].eq(1).all().item(), fork.k(0)[:16].eq(1).all().item(), flush=True)
    fork.k(0)[15].fill_(2)
    cache.pool.driver.synchronize()
    print("written")
"""


def test_a_write_to_what_forks_share_is_a_fault(device: str) -> None:
    child = run_python(WRITES_TO_WHAT_IS_SHARED, device)
    assert child.stdout == "True True\n"
    assert child.returncode == (-11 if device == "cpu" else 1), child.stderr


def test_an_interrupted_constructor_leaves_nothing_on_the_pool() -> None:
    driver, made = small_driver("cpu"), list[vmmkv.KVCache]()
    pool, layout = vmmkv.FramePool(1 << 20, device="cpu", page_size=driver.page_size), small_layout(driver)
    vmmkv.KVCache(layout, 4, 64, pool=pool, lookahead=0).close()  # what is done once is done
    for line in count(1):
        ended = interrupted(lambda: made.append(vmmkv.KVCache(layout, 4, 64, pool=pool, lookahead=0)), line)
        if ended is not None:
            break
        made.clear()
        gc.collect()  # a finalizer that raises fails the test
        assert not pool.stats().accounts, line
    assert len(pool.stats().accounts) == 1
    made.pop().close()
    pool.close()
