"""Sequences that go from one process to another, as messages of torch.distributed.

    sender      what it is: layout, first token and length, token ids -->
    receiver    <-- the token from which on it lacks K and V, or why it refuses
    sender      these tokens: a message for each range of the layout -->
                scales of the sequence, where the layout has any: another one -->

A row is contiguous, so its tokens in a range, K and V of all layers, are one message, whatever the pages under them
are, here and there. No K or V moves before the receiver has memory for all of it: then both know how much that is.

NCCL works in the order of the current stream, and with gloo all is done when a call returns. Only for what is said
before K and V the host waits.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .arguments import Ids
from .errors import ArgumentError, LayoutError, TransferError, TransferRefusedError
from .events.naming import Name
from .layout import KVLayout

MARK = b"vmmkv 2\n"
"""What a letter begins with; the number is that of how sequences are sent."""
FIRST = 4096
"""Bytes of a letter's first message: its mark, its length, and what there is room for."""
BEGIN = len(MARK) + 8
"""Where that begins."""
NOT_UNDERSTOOD = ValueError, SyntaxError, TypeError, MemoryError, RecursionError
"""What reading a letter, or a literal in it, fails with."""


@dataclass(frozen=True)
class Head:
    """What a receiver is told of a sequence.

    Attributes:
        geometry: of its layout: see `geometry_of`.
        start: the first token that it keeps.
        length: its tokens.
        key: salt and adapter that its tokens may be known under; None where they may not.
        ids: what its first tokens are known to be.
    """

    geometry: str
    start: int
    length: int
    key: tuple[Name, Name] | None
    ids: Ids

    def packed(self) -> bytes:
        """As bytes: a line each of geometry, tokens, and key, and ids. A key is a literal of Python, which keeps text,
        bytes and numbers apart and runs nothing."""
        facts = f"{self.geometry}\n{self.start} {self.length}\n{self.key!r}\n"
        return facts.encode() + self.ids.astype("<i8", copy=False).tobytes()

    @classmethod
    def unpacked(cls, letter: bytes) -> Head:
        """What was packed. Raises one of `NOT_UNDERSTOOD` where nothing was."""
        geometry, tokens, words, numbers = letter.split(b"\n", 3)
        start, length = map(int, tokens.split())
        key, ids = literal_eval(words.decode()), np.frombuffer(numbers, "<i8")
        is_key = key is None or (isinstance(key, tuple) and len(key) == 2)
        if not (is_key and 0 <= start <= length >= len(ids)) or (start and len(ids)):
            raise ValueError("there is no such sequence")
        return cls(geometry.decode(), start, length, key, ids)

    def check(self, layout: KVLayout) -> None:
        """Raises `LayoutError` where a cache of a layout cannot hold it, and `TransferError` where its own is none."""
        geometry = geometry_of(layout)
        if self.geometry == geometry:
            return
        try:
            theirs, ours = dict(literal_eval(self.geometry)), literal_eval(geometry)
        except NOT_UNDERSTOOD as error:
            raise TransferError(f"got a sequence of layout {self.geometry[:100]!r}, which is something else") from error
        pairs = [(name, theirs.get(name), ours.get(name)) for name in ours | theirs]
        wrong = [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]
        raise LayoutError(
            f"asked to receive a sequence of another layout: {', '.join(wrong)}. Make both caches with the same "
            "KVLayout (pages may differ in size)"
        )


def geometry_of(layout: KVLayout) -> str:
    """What two layouts have to agree on, so that token records do: by name, as a literal, which is the same for all who
    do. So it is compared as it is, and read only to say what differs: K and V wait for the answer."""
    facts: dict[str, Any] = {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "num_layers": layout.num_layers,
        "layers_per_range": min(layout.layers_per_range or layout.num_layers, layout.num_layers),
    }
    for name, attribute in ("num_kv_heads", "num_kv_heads"), ("head_dim", "k_head_dim"), ("v_head_dim", "v_head_dim"):
        values = [getattr(layer, attribute) for layer in layout.layers]
        facts[name] = values[0] if len(set(values)) == 1 else values
    if layout.scales is not None:
        facts["scales"] = layout.scales
    return repr(facts)


class Peer:
    """Another process of a group: messages to it, and from it.

    Args:
        rank: in the default group, as `torch.distributed.send` takes it.
        group: None is the default one.
        device: where messages are.

    Raises:
        ArgumentError: there is no such process, or no group.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError("there are no other processes: call torch.distributed.init_process_group() first")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"got group={group!r}; it must be a process group that this process is in")
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        if rank not in ranks or rank == own:
            raise ArgumentError(f"got rank={rank!r}; it must be another one than {own}, among {ranks}")
        self.rank, self._group, self._device = int(rank), group, device

    # ------------------------------------------------------------------ sequences

    def ask(self, head: Head) -> int:
        """Sends what there is to be told of a sequence; returns from which token on it is wanted.

        Raises:
            TransferRefusedError: it is not.
            TransferError: the other process is gone, or has said something else.
        """
        self._post(head.packed())
        with self._understood():
            token, reason, why = self._fetch().decode().split("\n", 2)
            first = int(token)
            if not (reason or head.start <= first <= head.length):
                raise ValueError("there is no such token")
        if reason:
            raise TransferRefusedError(f"rank {self.rank} refused {head.length} tokens: {reason}: {why}", reason)
        return first

    def listen(self) -> Head:
        """What the other process has to tell of a sequence; `accept` follows, or an error within `told`.

        Raises:
            TransferError: it is gone, or has said something else.
        """
        with self._understood():
            return Head.unpacked(self._fetch())

    def accept(self, first: int) -> None:
        """Asks for all tokens from the first one that is wanted.

        Raises:
            TransferError: the other process is gone.
        """
        self._post(f"{first}\n\n".encode())

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells the other process, which waits, why a sequence is refused: what is raised inside."""
        try:
            yield
        except BaseException as error:
            with suppress(TransferError):
                self._post(f"0\n{type(error).__name__}\n{error}".encode(errors="backslashreplace"))
            raise

    def send(self, states: Sequence[torch.Tensor]) -> None:
        """Sends tokens, a message for each tensor.

        Raises:
            TransferError: the other process is gone.
        """
        for each in states:
            self._send(each.view(torch.uint8))

    def receive(self, states: Sequence[torch.Tensor]) -> None:
        """Receives what `send` sends, of tensors of the same sizes.

        Raises:
            TransferError: the other process is gone.
        """
        for each in states:
            self._receive(each.view(torch.uint8))

    # ------------------------------------------------------------------ letters

    def _post(self, letter: bytes) -> None:
        """Sends bytes: one message, or two if they are many."""
        whole = bytearray((MARK + len(letter).to_bytes(8, "little") + letter).ljust(FIRST))
        message = torch.frombuffer(whole, dtype=torch.uint8).to(self._device)
        self._send(message[:FIRST])
        self._send(message[FIRST:])

    def _fetch(self) -> bytes:
        """The bytes that the other process posts; the host waits for them."""
        first = self._arrived(FIRST)
        if not first.startswith(MARK):
            raise ValueError(f"a letter begins with {MARK!r}")
        length = int.from_bytes(first[len(MARK) : BEGIN], "little")
        rest = length - (FIRST - BEGIN)
        return first[BEGIN : BEGIN + length] + (self._arrived(rest) if rest > 0 else b"")

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Says that a letter is none of ours, where it cannot be read."""
        try:
            yield
        except NOT_UNDERSTOOD as error:
            raise TransferError(
                f"rank {self.rank} has sent something else than a sequence of this version of vmmkv"
            ) from error

    def _arrived(self, nbytes: int) -> bytes:
        with self._explained("received from"):  # also where nobody has room for what is said to come
            message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._receive(message)
        return message.cpu().numpy().tobytes()

    # ------------------------------------------------------------------ messages

    def _send(self, message: torch.Tensor) -> None:
        if message.numel():
            with self._explained("sent to"):
                dist.send(message, self.rank, self._group)

    def _receive(self, message: torch.Tensor) -> None:
        if message.numel():
            with self._explained("received from"):
                dist.recv(message, self.rank, self._group)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Makes one type of all that torch raises."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"nothing could be {what} rank {self.rank}: {error}") from error
