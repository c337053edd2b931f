"""K and V of every awkward kind, for one call of a kernel.

Ordinary tensors have other numbers, or NaN, wherever a kernel is not to read. Virtual ranges have a page boundary right
behind a token, are read-only, or show one small frame at many addresses, so that tokens are gigabytes apart.

Nothing is given back: the process that calls the kernel ends with the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..driver.driver import Driver, open_driver
from ..tensors import export_range
from .answers import Case

SLACK = 1024
"""Tokens behind the last row of an ordinary tensor that may be read as well, and at most behind an end (see `ending`):
what lies behind an end is the matter of that alone."""
FAR_TOKENS, FAR_ROWS = 128, 4
"""Tokens of one sequence, or sequences of `FAR_ROW_TOKENS` tokens, that are spread over gigabytes of addresses."""
FAR_ROW_TOKENS = 32
SPREAD = 1.9
"""Of far apart tokens, or rows: the bytes from the first to the last, over the power of two that half are beyond."""


class Rows(NamedTuple):
    """K and V as a kernel is given them, how many tokens of each sequence it may read, and the same numbers without
    holes, `[batch, tokens, kv_heads, head_dim]`."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: Sequence[int]
    values: tuple[torch.Tensor, torch.Tensor]


class Maker:
    """Makes rows.

    Attributes:
        width: elements of K, or of V, of one token.
        whole: tokens of a row that is a multiple of usual tiles, as far as there are so many.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.driver: Driver = open_driver(case.device, 4096 if case.device == "cpu" else None)
        self.device = self.driver.device
        self.width = case.kv_heads * case.head_dim
        self.whole = 1 << case.tokens.bit_length() - 1
        self._generator = torch.Generator(self.device).manual_seed(case.seed)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.case.dtype)

    # ------------------------------------------------------------------ ordinary tensors

    def strided(
        self,
        lengths: Sequence[int],
        tokens: int,
        strides: Sequence[tuple[int, int] | None] = (None, None),
        behind: float | None = None,
    ) -> Rows:
        """Rows in ordinary tensors.

        Args:
            lengths: tokens of each row.
            tokens: the second dimension of K and V.
            strides: of K and of V: elements from row to row and from token to token; None: as densely as they can be.
            behind: the number behind each length, and in all gaps; None: other normal numbers, four times as large.
        """
        shape = (len(lengths), tokens, self.case.kv_heads, self.case.head_dim)
        values = self.noise(*shape), self.noise(*shape)
        views = []
        for value, each in zip(values, strides):
            row, token = each or (tokens * self.width, self.width)
            size = len(lengths) * row + SLACK * token
            memory = 4 * self.noise(size) if behind is None else torch.full((size,), behind, device=self.device)
            views.append(memory.to(self.case.dtype).as_strided(shape, (row, token, self.case.head_dim, 1)))
            for index, length in enumerate(lengths):
                views[-1][index, :length] = value[index, :length]
        return Rows(views[0], views[1], lengths, values)

    # ------------------------------------------------------------------ virtual ranges

    def reserve(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """The address and the elements of a new range, on which nothing lies."""
        nbytes = self.rounded(nbytes)
        address = self.driver.reserve(nbytes)
        return address, export_range(address, nbytes, self.device, self.driver).view(self.case.dtype)

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.driver.page_size) * self.driver.page_size

    def put(self, nbytes: int, *addresses: int, read_at: int | None = None) -> None:
        """Makes one frame and maps it at some addresses; at `read_at` it may only be read."""
        pages = nbytes // self.driver.page_size
        frame = self.driver.create(pages)
        for address in addresses if read_at is None else (*addresses, read_at):
            self.driver.map(address, frame, pages)
            self.driver.set_access(address, nbytes, writable=address != read_at)

    def ending(self, lengths: Sequence[int], extra: int) -> list[Rows]:
        """One sequence of each length, alone in its batch: its tokens and `extra` more end where a page ends, and the
        next page is not mapped."""
        case, token = self.case, self.width * self.case.dtype.itemsize
        size, capacity = self.rounded((max(lengths) + extra) * token), max(lengths) + SLACK
        ranges = []
        for _ in range(2):
            address, elements = self.reserve(size + capacity * token)
            self.put(size, address)
            elements[: size // case.dtype.itemsize] = 0
            ranges.append(elements)
        made = []
        for length in lengths:
            start = size // case.dtype.itemsize - (length + extra) * self.width
            shape, strides = (1, capacity, case.kv_heads, case.head_dim), (capacity * self.width, self.width)
            k, v = (each.as_strided(shape, (*strides, case.head_dim, 1), start) for each in ranges)
            values = self.noise(1, length, *shape[2:]), self.noise(1, length, *shape[2:])
            made.append(Rows(k, v, [length], values))
        return made

    def read_only_rows(self, extra: int, batch: int = 2) -> Rows:
        """Dense rows that may be read and not written."""
        case, views = self.case, []
        shape = (batch, self.whole, case.kv_heads, case.head_dim)
        values = self.noise(*shape), self.noise(*shape)
        size = self.rounded((batch * self.whole + extra) * self.width * case.dtype.itemsize)
        for value in values:
            (writing, elements), (reading, shown) = self.reserve(size), self.reserve(size)
            self.put(size, writing, read_at=reading)
            elements.fill_(0)
            elements[: value.numel()].view(shape).copy_(value)
            views.append(shown[: value.numel()].view(shape))
        return Rows(views[0], views[1], [self.whole] * batch, values)

    def far(self, power: int, by_rows: bool, extra: int) -> Rows:
        """Tokens of one sequence, or rows, of which the last begin between 2**power and 2**(power + 1) bytes behind the
        first: one frame holds all of them densely, and lies under each of them so that it is where it has to be. K and
        V of a token are neighbours."""
        case, record = self.case, 2 * self.width
        batch, tokens = (FAR_ROWS, min(FAR_ROW_TOKENS, self.whole)) if by_rows else (1, min(FAR_TOKENS, self.whole))
        units, unit = (batch, (tokens + extra) * record) if by_rows else (tokens + extra, record)
        item, page = case.dtype.itemsize, self.driver.page_size
        frame = self.rounded(units * unit * item)
        apart = int(SPREAD * 2**power) // ((batch if by_rows else tokens) - 1) // page * page
        assert apart >= frame
        # Signed offsets that wrap lead to in front of the first token, where nothing is mapped.
        guard, step = self.rounded(2**power), apart // item + unit
        address, elements = self.reserve(guard + units * step * item + frame)
        self.put(frame, *(address + guard + index * apart for index in range(units)))
        first, shape = guard // item, (batch, tokens, case.kv_heads, case.head_dim)
        dense = elements[first : first + frame // item]
        dense.fill_(0)
        values, views = (self.noise(*shape), self.noise(*shape)), []
        for offset, value in enumerate(values):
            dense.as_strided(shape, (unit, record, case.head_dim, 1), first + offset * self.width).copy_(value)
            strides = (step, record) if by_rows else (units * step, step)
            views.append(elements.as_strided(shape, (*strides, case.head_dim, 1), first + offset * self.width))
        return Rows(views[0], views[1], [tokens] * batch, values)
