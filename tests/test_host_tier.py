"""Suspended sequences: the same bytes at the same addresses afterwards, and their pages for others meanwhile."""

from __future__ import annotations

from random import Random

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver
from interruption import interrupted
from random_machine import Late
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.reuse import host_tier

LAYOUTS = {
    "one range": vmmkv.KVLayout(2, 2, 16, torch.float32),
    "ranges": vmmkv.KVLayout(3, [2, 1, 2], 24, torch.float32, layers_per_range=1),
}


def make(
    layout: str = "one range", pages: int = 60, driver: FaultyDriver | None = None, **options: object
) -> tuple[vmmkv.KVCache, FaultyDriver]:
    driver = driver or FaultyDriver(small_driver("cpu"))
    options = {"host_bytes": "1GiB", **options}
    return on_driver(
        driver, vmmkv.KVCache, LAYOUTS[layout], 5, 200, max_bytes=pages * driver.page_size, **options
    ), driver


def states(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    layers = range(sequence.cache.layout.num_layers)
    return [states for layer in layers for states in (sequence.k(layer), sequence.v(layer))]


def write(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    """Writes random numbers; returns them."""
    return [each.copy_(torch.rand_like(each)).clone() for each in states(sequence)]


def holds(sequence: vmmkv.Sequence, values: list[torch.Tensor]) -> bool:
    return all(torch.equal(found, expected) for found, expected in zip(states(sequence), values, strict=True))


@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"zero_tail": True}, {"overread": 9}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_operations_in_any_order(layout: str, options: dict[str, object]) -> None:
    """Every sequence that is here holds its own; those that are away take no page."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    cache, driver = make(layout, **options)
    values: dict[vmmkv.Sequence, list[torch.Tensor]] = {}
    addresses: dict[vmmkv.Sequence, int] = {}
    for _ in range(80):
        what, live = (
            random.choice(["start", "extend", "suspend", "suspend", "resume", "free", "fork", "cut"]),
            [*values],
        )
        one = random.choice(live) if live else None
        try:
            if what == "start" or one is None:
                one = cache.sequence(random.randint(0, 90), expected_tokens=random.choice([0, 120]))
                values[one], addresses[one] = write(one), cache.kv(0)[0][one.row].data_ptr()
            elif what == "resume":
                one.resume()
                assert cache.kv(0)[0][one.row].data_ptr() == addresses[one]
            elif what == "free":
                one.free()
                del values[one]
            elif one.is_suspended:
                for operation in (
                    one.suspend,
                    one.fork,
                    lambda one=one: one.extend(1),
                    lambda one=one: one.truncate(0),
                ):
                    with pytest.raises(vmmkv.SuspendedError):
                        operation()
                with pytest.raises(vmmkv.SuspendedError):
                    one.k(0)
                assert one.length - one.start == len(values[one][0])
                assert f"suspended, {len(values[one][0])} tokens on the host" in repr(one)
            elif what == "suspend":
                extent = one.start, one.length
                one.suspend()
                assert (one.start, one.length) == extent
            elif what == "extend":
                before = one.length - one.start
                one.extend(random.randint(0, 30))
                new = [each[before:].copy_(torch.rand_like(each[before:])) for each in states(one)]
                values[one] = [torch.cat(both) for both in zip(values[one], new)]
            elif what == "fork":
                child = one.fork()
                values[child], addresses[child] = values[one], cache.kv(0)[0][child.row].data_ptr()
            elif what == "cut":
                begin, end = sorted((random.randint(one.start, one.length), random.randint(one.start, one.length)))
                start = one.start
                one.release_before(begin)
                one.truncate(end)
                values[one] = [each[begin - start : end - start] for each in values[one]]
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError, vmmkv.SequenceTooLongError):
            pass
        cache.check()
        here = [sequence for sequence in values if not sequence.is_suspended]
        assert all(holds(sequence, values[sequence]) for sequence in here)
        assert cache.stats().tokens == sum(sequence.length - sequence.start for sequence in here)
    cache.close()
    assert not driver.handles


def test_what_is_away_takes_no_memory() -> None:
    cache, driver = make(pages=20)
    first = cache.sequence(150)
    values = write(first)
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.sequence(150)
    first.suspend()
    second = cache.sequence(150)
    other = write(second)
    with pytest.raises(vmmkv.OutOfPagesError):
        first.resume()
    assert first.is_suspended
    cache.check()
    second.suspend()
    first.resume()
    first.resume()
    assert holds(first, values)
    first.free()
    second.resume()
    assert holds(second, other)
    second.free()
    cache.trim()
    assert not driver.handles


def test_who_is_refused_what_others_have_of_its_pages_has_nothing() -> None:
    """Also of those that lie behind them, and whoever counts meanwhile."""
    cache, _ = make(pages=20, large_frames=False, lookahead=0)
    sequence = cache.sequence(8 * 8)
    fork = sequence.fork()
    sequence.extend(4 * 8)
    values = write(sequence)
    beside = cache.sequence(4 * 8)
    sequence.suspend()
    with pytest.raises(vmmkv.OutOfPagesError):
        sequence.resume()
    cache.check()
    fork.free()
    beside.free()
    sequence.resume()
    assert holds(sequence, values)


def test_what_comes_back_comes_behind_what_went() -> None:
    """On whatever streams a sequence is suspended and resumed."""
    device = SimulatedDevice(Random())
    own, suspending, resuming = device.streams
    device.current = own
    cache = on_driver(device, vmmkv.KVCache, LAYOUTS["one range"], 1, 60, max_bytes=40_000, host_bytes="1MiB")
    sequence = cache.sequence(20)
    gone, back = [], []
    device.current = suspending
    suspending.submit(lambda: bool(gone))
    sequence.suspend()
    device.current = resuming
    sequence.resume()
    resuming.submit(lambda: back.append(sequence))
    device.run(1000)
    assert not back
    gone.append(sequence)
    device.finish()
    assert back


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_what_did_not_go_is_not_copied_any_more(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever stream it was to go: its pages may be others' at once."""
    device, states_of = SimulatedDevice(Random()), host_tier.states_of
    cache, _ = make(driver=device, lookahead=0, host_priority=None)
    host: list[torch.Tensor] = []

    def submit(target: torch.Tensor, source: torch.Tensor) -> None:
        host.append(target)
        monkeypatch.setitem(device.host, target.data_ptr(), target.nbytes)
        device.copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        if how == "interrupted":
            raise KeyboardInterrupt
        device.fail("record", 0)

    monkeypatch.setattr(host_tier, "states_of", lambda *row: [each.as_subclass(Late) for each in states_of(*row)])
    monkeypatch.setattr(Late, "submit", submit, raising=False)
    sequence = cache.sequence(100)
    device.current = device.streams[1]
    with pytest.raises(KeyboardInterrupt if how == "interrupted" else vmmkv.DriverError):
        sequence.suspend()
    device.heal()
    device.current = device.streams[0]
    sequence.free()
    cache.trim()
    device.finish()
    assert host
    cache.check()


def test_the_tier_has_an_end() -> None:
    cache, _ = make(host_bytes=100 * 512)
    first, second = cache.sequence(60), cache.sequence(60)
    values = write(second)
    first.suspend()
    with pytest.raises(vmmkv.OutOfHostMemoryError, match="20480 of 51200 left"):
        second.suspend()
    assert holds(second, values)
    first.free()
    second.suspend()
    second.resume()
    assert holds(second, values)
    cache.check()


def test_no_tier() -> None:
    cache, _ = make(host_bytes=0)
    with pytest.raises(vmmkv.ArgumentError, match="host_bytes"):
        cache.sequence(3).suspend()
    with pytest.raises(vmmkv.BudgetError):
        make(host_bytes="much")


@pytest.mark.parametrize("name", ["suspend", "resume"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interruption_at_any_line(layout: str, name: str) -> None:
    """It is here, or away, and has its tokens."""
    ended, line = None, 0
    while ended is None:
        line += Random().randint(1, 30)  # not at all of them, and at others in each run
        cache, driver = make(layout)
        driver.unmaps_anything = True
        sequence, beside = cache.sequence(100), cache.sequence(50)
        values, others = write(sequence), write(beside)
        if name == "resume":
            sequence.suspend()
            cache.trim()
        ended = interrupted(getattr(sequence, name), line)
        try:
            cache.check()
        except vmmkv.InterruptedChangeError:
            cache.close()
            continue
        assert holds(beside, others)
        sequence.resume()
        assert holds(sequence, values)
        cache.check()
        cache.close()


@pytest.mark.parametrize("name", ["suspend", "resume"])
def test_a_failed_call(name: str) -> None:
    """Any call, once, also of streams and events: nothing has changed, and the same once more is done."""
    for skip in range(1000):
        device = SimulatedDevice(Random())
        cache, _ = make(driver=device)
        sequence, beside = cache.sequence(100), cache.sequence(50)
        values, others = write(sequence), write(beside)
        device.current = device.streams[1]
        if name == "resume":
            sequence.suspend()
            cache.trim()
        for stream in device.streams:  # so that there is something to wait for
            stream.submit(lambda: None)
        sequence.record_stream(device.streams[2])
        device.fail("any", skip)
        try:
            getattr(sequence, name)()
        except vmmkv.DriverError:
            assert sequence.is_suspended == (name == "resume")
            getattr(sequence, name)()
        if device.heal():
            break
        device.finish()
        cache.check()
        sequence.resume()
        device.finish()
        assert holds(sequence, values)
        assert holds(beside, others)
        cache.close()
    assert skip < 100
