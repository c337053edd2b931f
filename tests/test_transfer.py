"""Sequences that go from one process to another: the same bytes there, or an error in both, and nothing changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial, partialmethod
from itertools import permutations
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import on_driver
from faulty import FaultyDriver
from pair import together
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.layout import SCALED_DTYPES, SCALES
from vmmkv.transfer import FIRST, MARK, Head, Peer

SENDER, RECEIVER = 0, 1


def make(
    layout: vmmkv.KVLayout, pages: int = 60, page_size: int = 4096, max_seq_len: int = 200, **options: Any
) -> vmmkv.KVCache:
    driver = open_driver("cpu", page_size)
    return on_driver(driver, vmmkv.KVCache, layout, 5, max_seq_len, max_bytes=pages * page_size, **options)


LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 8 tokens in a page


def states(sequence: vmmkv.Sequence) -> list[torch.Tensor]:
    """K and V of each layer, and scales, if there are any."""
    cache, row, span = sequence.cache, sequence.row, slice(sequence.start, sequence.length)
    layers, scales = range(cache.layout.num_layers), cache.layout.scales
    if scales is None:
        return [states for layer in layers for states in (sequence.k(layer), sequence.v(layer))]
    of_sequence = [each[row] for layer in layers if scales == "sequence_head" for each in cache.sequence_scales(layer)]
    of_tokens = 2 if of_sequence else 4
    return of_sequence + [each[row, span] for layer in layers for each in cache.scaled_kv(layer)[:of_tokens]]


def value(random: Random, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers: the same for the same random numbers, in whichever process."""
    numbers = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(random.randrange(1 << 32)))
    return numbers.to(dtype)


def write(sequence: vmmkv.Sequence, seed: int) -> None:
    random = Random(seed)
    for each in states(sequence):
        each.copy_(value(random, each.shape, each.dtype))


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def check(sequence: vmmkv.Sequence, seed: int) -> None:
    """It holds what `write` writes to a sequence of as many tokens."""
    random = Random(seed)
    for each in states(sequence):
        expected = value(random, each.shape, each.dtype)
        assert torch.equal(each.cpu().double(), expected.double())
    sequence.cache.check()


# ------------------------------------------------------------------ what arrives


RULES: list[dict[str, Any]] = [{}, {"scrub": True}, {"overread": 9}, {"large_frames": False}]


def exchange(rank: int, seed: int) -> None:
    """Sequences of any geometry, between caches of any pages and rules, back and forth."""
    for number in range(20):
        random = Random(f"{seed} {number}")  # in both processes the same
        layers = random.randint(1, 4)
        heads, width = random.choice([2, [random.randint(1, 3) for _ in range(layers)]]), random.choice([None, 8])
        dtype = random.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
        scales = random.choice([None, *SCALES]) if dtype in SCALED_DTYPES else None
        per_range = random.choice([None, 1, 2])
        layout = vmmkv.KVLayout(layers, heads, 24, dtype, width, layers_per_range=per_range, scales=scales)
        length = random.choice([0, 1, 199, 200, random.randint(0, 200)])
        start = random.choice([0, 0, length, random.randint(0, length)])
        caches = [make(layout, 400, random.choice([4096, 8192, 20480]), **random.choice(RULES)) for _ in range(2)]
        cache = caches[rank]
        beside = cache.sequence(77)
        write(beside, number + 1000)
        if rank == number % 2:
            sequence = cache.sequence(length)
            sequence.release_before(start)
            write(sequence, number)
            sent = sequence.fork() if random.random() < 0.5 else sequence
            sent.send(1 - rank)
            check(sent, number)
        else:
            with cache.sequence(random.randint(0, 200)) as before:
                write(before, number + 2000)  # what the row held
            sequence = cache.receive(1 - rank)
            assert (sequence.start, sequence.length, sequence.cached_tokens) == (start, length, 0)
        check(sequence, number)
        check(beside, number + 1000)
        sequence.free()
        check(beside, number + 1000)


def test_what_is_sent_arrives(seed: int) -> None:
    together(exchange, seed)


def extend_on(rank: int, device: str) -> None:
    """A chat that goes on in the other process after each turn, on streams of its own."""
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    cache = vmmkv.KVCache(vmmkv.KVLayout(3, 2, 64, torch.bfloat16), 3, 21_000, max_bytes="256MiB", device=place)
    sequence = cache.sequence(3000)
    for turn in range(6):
        tokens = 3000 * (turn + 1)
        if rank == turn % 2:
            write(sequence, turn)
            sequence.send(1 - rank)
            sequence.free()  # and whoever comes next writes over it, behind what is on its way
            write(cache.sequence(tokens), turn + 1000)
        else:
            sequence = cache.receive(1 - rank, expected_tokens=tokens + 3000)
            check(sequence, turn)
            sequence.extend(3000)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=[pytest.mark.gpu, TWO_GPUS])]
)
def test_a_sequence_goes_on_wherever_it_is(device: str, backend: str) -> None:
    together(extend_on, device, backend=backend)


# ------------------------------------------------------------------ what is known


STATES = value(Random(0), torch.Size([1000, 2, 16]), torch.float32)
"""K and V by token id, of a model in which they depend on that alone."""


def compute(sequence: vmmkv.Sequence, ids: np.ndarray) -> None:
    """Writes the last tokens."""
    for layer in range(2):
        sequence.write(layer, STATES[ids], -STATES[ids])


def is_right(sequence: vmmkv.Sequence, ids: np.ndarray) -> bool:
    found = zip(states(sequence), [STATES[ids], -STATES[ids]] * 2, strict=True)
    return sequence.length == len(ids) and all(torch.equal(each, expected) for each, expected in found)


def sizes_received() -> list[int]:
    """Of messages that come to this process from now on."""
    sizes: list[int] = []
    receive = RECEIVE

    def recv(tensor: torch.Tensor, *args: Any) -> None:
        sizes.append(tensor.nbytes)
        receive(tensor, *args)

    dist.recv = recv
    return sizes


KEYS: list[dict[str, Any]] = [
    {},
    {"salt": "a"},
    {"salt": b"b\n", "adapter": "französisch\n\0"},
    {"salt": -1, "adapter": 1 << 100},
    {"salt": "long" * 2000},
]


def known(rank: int, seed: int) -> None:
    for which in range(len(KEYS)):
        known_with(rank, Random(f"{seed} {which}"), which)
        dist.barrier()


def known_with(rank: int, random: Random, which: int) -> None:
    ids = np.array([random.randrange(1000) for _ in range(190)])
    key, other_key = KEYS[which], KEYS[which - 1]
    length, cache = random.randint(120, 180), make(LAYOUT)
    if rank == SENDER:
        with cache.sequence(token_ids=ids[:100], **key) as sequence:
            compute(sequence, ids[:100])
            sequence.send(RECEIVER)
            sequence.commit(ids[:100])
            sequence.send(RECEIVER)
            sequence.extend(length - 100)
            compute(sequence, ids[100:length])
            sequence.commit(ids[: length - 5])
            for _ in range(4):
                sequence.send(RECEIVER)
            sequence.truncate(50)
            sequence.send(RECEIVER)
            assert is_right(sequence, ids[:50])
        return
    sizes = sizes_received()

    def receive(tokens: int, **options: Any) -> vmmkv.Sequence:
        sequence = cache.receive(SENDER, **options)
        assert is_right(sequence, ids[:tokens])
        assert sizes[-1] == (tokens - sequence.cached_tokens) * LAYOUT.token_bytes
        cache.check()
        return sequence

    def found(**key: Any) -> int:
        """How much a sequence of these ids would begin with."""
        with cache.sequence(token_ids=ids[:100], **key) as sequence:
            return sequence.cached_tokens

    sequence = receive(100)
    assert (sequence.cached_tokens, found(**key)) == (0, 0)  # what nobody has committed nobody knows
    sequence.commit(ids[:100])  # but it can be made known here
    assert found(**key) == 99  # but for the last one, which is computed in any case
    sequence.free()
    cache.trim()

    first = receive(100)
    assert (first.cached_tokens, found(**key), found(**other_key)) == (0, 99, 0)
    second = receive(length)
    assert second.cached_tokens == 100
    cache.free([first, second])
    with receive(length) as third:
        assert third.cached_tokens == length - 6  # on the second one's row: all of the committed but the last
    for options in {"reuse": False}, {"tenant": "another"}:
        with receive(length, **options) as apart:
            assert apart.cached_tokens == 0
    with receive(50) as beginning:
        assert beginning.cached_tokens >= 48


def test_what_is_known_there_is_not_sent_again(seed: int) -> None:
    together(known, seed)


# ------------------------------------------------------------------ when it is read


def test_what_is_sent_is_read_before_others_have_its_pages(random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that run late, whichever stream it is sent, freed and followed on, and whichever call fails. A byte
    tells whose a token is."""
    layout = vmmkv.KVLayout(1, 1, 128, torch.int8, layers_per_range=1)  # 16 tokens in a page
    reads: list[bool] = []
    sent = 0
    for _ in range(100):
        device = SimulatedDevice(random)
        cache = on_driver(device, vmmkv.KVCache, layout, 2, 40, max_bytes=3 * 4096)

        def on(tensor: torch.Tensor, work: Callable[[], object], device: SimulatedDevice = device) -> None:
            device.current.submit(lambda: device.touch(tensor.data_ptr(), tensor.nbytes, work))

        class Late:
            """A peer that takes everything, in the order of the current stream."""

            number = 0

            def __init__(self, *_: object) -> None: ...

            def ask(self, head: Head) -> int:
                return head.start

            def send(self, states: list[torch.Tensor]) -> None:
                nonlocal sent
                sent += len(states)
                for each in states:
                    on(each, lambda each=each, expected=self.number: reads.append(bool((each == expected).all())))

        monkeypatch.setattr("vmmkv.transfer.Peer", Late)
        for number in range(6):
            Late.number, device.current = number, random.choice(device.streams)
            with cache.sequence(random.randint(1, 40)) as sequence:
                for each in (sequence.k(0), sequence.v(0)):
                    on(each, lambda each=each, number=number: each.fill_(number))
                device.run(random.randint(0, 3))
                device.current = random.choice(device.streams)
                device.fail(random.choice(["record", "wait", "any"]), random.randrange(6))
                with suppress(vmmkv.DriverError):
                    sequence.send(RECEIVER)
                device.heal()
                device.current = random.choice(device.streams)
            device.run(random.randint(0, 3))
        device.finish()
    assert len(reads) == sent > 0
    assert all(reads)


# ------------------------------------------------------------------ what is refused


def of_layout(*args: Any, ours: vmmkv.KVLayout = LAYOUT, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """What another layout is refused with."""
    return "LayoutError", vmmkv.KVLayout(*args, dtype, **options), ours, {}, {}


REFUSED: dict[str, tuple[str, vmmkv.KVLayout, vmmkv.KVLayout, dict[str, Any], dict[str, Any]]] = {
    "dtype bfloat16 there, float32 here": of_layout(2, 2, 16, dtype=torch.bfloat16),
    "num_layers 3 there, 2 here": of_layout(3, 2, 16),
    r"num_kv_heads \[2, 1\] there, 2 here": of_layout(2, [2, 1], 16),
    "head_dim 8 there, 16 here, v_head_dim 8 there, 16 here": of_layout(2, 2, 8),
    "layers_per_range 1 there, 2 here": of_layout(2, 2, 16, layers_per_range=1),
    **{
        f"scales {there} there, {here} here": of_layout(
            2, 2, 16, dtype=torch.int8, scales=there, ours=vmmkv.KVLayout(2, 2, 16, torch.int8, scales=here)
        )
        for there, here in permutations((None, *SCALES), 2)
    },
    "": ("OutOfRowsError", LAYOUT, LAYOUT, {}, {"full": True}),
    "1[45][09]": ("SequenceTooLongError", LAYOUT, LAYOUT, {"max_seq_len": 149}, {}),
    "149": ("SequenceTooLongError", LAYOUT, LAYOUT, {"max_seq_len": 149, "start": 40}, {}),
    "201": ("SequenceTooLongError", LAYOUT, LAYOUT, {}, {"expected_tokens": 201}),
    "page": ("OutOfPagesError", LAYOUT, LAYOUT, {"pages": 10}, {}),
    "pages": ("OutOfPagesError", LAYOUT, LAYOUT, {"pages": 10, "start": 40}, {}),
}
"""By what is said of it: the error, the layouts there and here, and what the receiver has and asks for."""


def refuse(rank: int) -> None:
    """In both processes, and all is as before: the same sequence may be sent to another cache."""
    for says, (reason, theirs, ours, options, asked) in REFUSED.items():
        start, full = options.pop("start", 0), asked.pop("full", False)
        if rank == SENDER:
            sequence = make(theirs).sequence(150)
            sequence.release_before(start)
            write(sequence, 1)
            with pytest.raises(
                vmmkv.TransferRefusedError, match=f"rank 1 refused 150 tokens: {reason}.*{says}"
            ) as raised:
                sequence.send(RECEIVER)
            assert raised.value.reason == reason
            check(sequence, 1)
            sequence.send(RECEIVER)
            continue
        cache = make(ours, **options)
        beside = [cache.sequence(15) for _ in range(5 if full else 1)]
        for each in beside:
            write(each, 3)
        before = cache.stats().rows, cache.stats().pages["used"]
        with pytest.raises(getattr(vmmkv, reason), match=says):
            cache.receive(SENDER, **asked)
        assert (cache.stats().rows, cache.stats().pages["used"]) == before
        for each in beside:
            check(each, 3)
        check(make(theirs).receive(SENDER), 1)
    same = vmmkv.KVLayout(2, [2, 2], 16, torch.float32, [16, 16], layers_per_range=7)  # in other words
    if rank == SENDER:
        write(sequence := make(same).sequence(30), 2)
        sequence.send(RECEIVER)
    else:
        check(make(LAYOUT).receive(SENDER), 2)


def test_who_cannot_hold_it_refuses() -> None:
    together(refuse)


def listen_and_fail(peer: Peer, listen: Callable[[Peer], Head], driver: SimulatedDevice, skip: int) -> Head:
    head = listen(peer)  # from now on the sender waits for an answer
    driver.fail("any", skip)
    return head


def fail_once(rank: int, known: int) -> None:
    """Any call of the receiver's driver, also of streams and events, which knows so many of the tokens."""
    ids, is_over = np.arange(100) * 7 % 1000, torch.zeros(1)
    for skip in range(1000):
        if rank == SENDER:
            sequence = make(LAYOUT).sequence(token_ids=ids)
            compute(sequence, ids)
            sequence.commit(ids)
            with suppress(vmmkv.TransferRefusedError):
                sequence.send(RECEIVER)
                dist.recv(is_over, RECEIVER)
                if is_over:
                    break
                continue
            sequence.send(RECEIVER)
            assert is_right(sequence, ids)
            continue
        driver, listen = SimulatedDevice(Random()), Peer.listen
        cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 5, 200, max_bytes="1MiB")
        with cache.sequence(token_ids=ids[:known]) as before:
            compute(before, ids[:known])
            before.commit(ids[:known])
            beside = before.fork()
        driver.finish()
        driver.current = driver.streams[1]
        is_refused = False
        try:
            with mock.patch.object(Peer, "listen", partialmethod(listen_and_fail, listen, driver, skip)):
                sequence = cache.receive(SENDER)
        except vmmkv.DriverError:
            is_refused = True
            assert cache.stats().rows["live"] == 1
            sequence = cache.receive(SENDER)
        driver.finish()
        assert sequence.cached_tokens >= known // 8 * 8
        assert is_right(sequence, ids)
        assert is_right(beside, ids[:known])
        cache.check()
        is_over[:] = driver.heal()
        if not is_refused:  # no call has failed, or one that was not needed
            dist.send(is_over, SENDER)
        if is_over:
            break
    assert 3 < skip < 100


def test_a_failed_call_is_a_refusal() -> None:
    together(fail_once, 60)


def misuse(rank: int) -> None:
    cache = make(LAYOUT, host_bytes="1MiB")
    alone = dist.new_group([SENDER])
    if rank == RECEIVER:
        for options in {}, {"group": alone}:
            with pytest.raises(vmmkv.ArgumentError):
                cache.receive(RECEIVER, **options)
        check(cache.receive(SENDER), 1)
        return
    with cache.sequence(30) as freed:
        pass
    write(suspended := cache.sequence(30), 1)
    suspended.suspend()
    with pytest.raises(vmmkv.UseAfterFreeError):
        freed.send(RECEIVER)
    with pytest.raises(vmmkv.SuspendedError):
        suspended.send(RECEIVER)
    suspended.resume()
    for rank_given, group in ((SENDER, None), (2, None), ("1", None), (RECEIVER, alone), (RECEIVER, "default")):
        with pytest.raises(vmmkv.ArgumentError):
            suspended.send(rank_given, group=group)
    suspended.send(RECEIVER)  # nothing of all that was sent
    check(suspended, 1)


def test_misuse_sends_nothing() -> None:
    cache = make(LAYOUT)
    with pytest.raises(vmmkv.ArgumentError, match="init_process_group"):
        cache.sequence(3).send(1)
    with pytest.raises(vmmkv.ArgumentError, match="init_process_group"):
        cache.receive(0)
    together(misuse)


# ------------------------------------------------------------------ who is gone


class Ending:
    """What ends a process in the middle of its n-th message: of one that it sends, a part may be on its way."""

    def __init__(self, messages: int) -> None:
        self.left = messages

    def __call__(self, whole: Callable[..., None], tensor: torch.Tensor, rank: int, group: Any) -> None:
        if not self.left:
            if whole is SEND:
                dist.isend(tensor, rank, group)
            os._exit(0)
        self.left -= 1
        whole(tensor, rank, group)


SEND, RECEIVE = dist.send, dist.recv


def vanish(rank: int, who: int, when: str) -> None:
    """A process ends in the middle: the other one has an error, and what it had.

    Args:
        when: it calls this method of its peer, or comes to this message: 0 and 1 are letters, and K and V follow, of a
            layer each.
    """
    driver = FaultyDriver(open_driver("cpu"))
    layout = vmmkv.KVLayout(4, 8, 128, torch.float32, layers_per_range=1)
    cache = on_driver(driver, vmmkv.KVCache, layout, 2, 4000, max_bytes="256MiB")
    write(sequence := cache.sequence(2000 if rank == SENDER else 50), 1)  # 64 MiB: more than sockets hold
    if rank == who and when.isdecimal():
        ending = Ending(int(when))
        dist.send, dist.recv = partial(ending, SEND), partial(ending, RECEIVE)
    elif rank == who:
        setattr(Peer, when, lambda *_: os._exit(0))
    with pytest.raises(vmmkv.TransferError) as raised:
        sequence.send(RECEIVER) if rank == SENDER else cache.receive(SENDER)
    assert type(raised.value) is vmmkv.TransferError
    check(sequence, 1)
    sequence.free()
    assert cache.stats().rows["live"] == 0
    cache.trim()
    assert not driver.handles
    os._exit(0)  # nobody is there for a barrier


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("who", "when"),
    [
        (SENDER, "ask"),
        (SENDER, "send"),
        (RECEIVER, "listen"),
        (RECEIVER, "accept"),
        (RECEIVER, "receive"),
        (SENDER, "2"),
        (SENDER, "4"),
        (RECEIVER, "1"),
        (RECEIVER, "4"),
    ],
)
def test_a_process_that_disappears(who: int, when: str) -> None:
    together(vanish, who, when)


NO_LETTERS = [
    len(text).to_bytes(8, "little") + text
    for text in (
        b"nonsense", b"({}, 1, ())\n", b"({}, 1, 2, (\n", b"\xff\n\n", b"({}, 1, 2, 5)\n", b"({}, 1, 2, {[]: 1})\n",
        b"({}, -1, 2, None)\n", b"({}, 3, 2, None)\n", b"({}, 0, 0, None)\n" + bytes(8), b"(-1, '', '')\n",
        b"(4, '', '')\n", b"({}, 1, 1, (None, None))\n" + bytes(8), b"(5, 0, 1, None)\n", b"({}, 0, 1.0, None)\n",
        b"(" * 3000 + b"\n", b"-" * 3000 + b"1\n",
    )
] + [(1 << 62).to_bytes(8, "little")]  # fmt: skip
"""They begin as letters do, and end otherwise."""


def talk_of_something_else(rank: int) -> None:
    cache = make(LAYOUT)
    letters = [bytes(range(256)) * (FIRST // 256), *((MARK + letter).ljust(FIRST) for letter in NO_LETTERS)]
    for letter in letters:
        if rank == SENDER:
            dist.send(torch.frombuffer(bytearray(letter), dtype=torch.uint8), RECEIVER)
        else:
            with pytest.raises(vmmkv.TransferError, match=r"something else|nothing could be"):
                cache.receive(SENDER)
    for letter in letters:  # as an answer
        if rank == SENDER:
            with pytest.raises(vmmkv.TransferError, match=r"something else|nothing could be"):
                cache.sequence(3).send(RECEIVER)
        else:
            dist.recv(torch.empty(FIRST, dtype=torch.uint8), SENDER)
            dist.send(torch.frombuffer(bytearray(letter), dtype=torch.uint8), SENDER)
    assert cache.stats().rows["live"] == 0


def test_something_else_is_no_sequence() -> None:
    together(talk_of_something_else)
