"""A growable tensor: its shape is the maximum, its memory is what is used, and it never moves.

It is the tool under the cache, in general: one row of one arena. See `vmmkv.space` and `vmmkv.memory` for the
invariants.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ..core.addresses import check_address_space
from ..driver.fence import Fence, check_stream
from ..errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
)
from ..invariants import watch
from ..layout import shown, whole_number
from ..memory.accounts import Account
from ..memory.budget import pages_within
from ..memory.monitor import operation
from ..memory.owner import Owner, check_pool_alone, owners
from ..memory.pool import FramePool
from ..space.arena import Arena
from ..space.change import Change
from ..space.undo import Undo
from ..stats import MappedRange
from ..tensors import check_dense, export_range


@dataclass(frozen=True)
class GrowableTensorStats:
    """A snapshot of a `GrowableTensor`.

    Attributes:
        budget_bytes: the most that it may take.
        physical_bytes: what it takes now, in whole pages, also those that a shrinking left behind.
        used_bytes: bytes of its rows.
    """

    budget_bytes: int
    physical_bytes: int
    used_bytes: int


class GrowableTensor(Owner):
    """A contiguous tensor that grows and shrinks in its first dimension, in place.

        history = GrowableTensor((1 << 30, 4096), torch.bfloat16)  # 8 TiB of addresses, no memory
        history.append(rows)  # [n, 4096]
        history.tensor  # [length, 4096]: a view, valid for as long as its rows are

    A view of its rows stays valid while it grows: addresses and strides never change. Methods may be called from
    several threads, and one runs at a time. A finalizer, or a signal handler, that runs in the middle of an operation
    may read its state; all that changes it is refused (`BusyError`).

    Args:
        shape_max: the largest shape, at most 100 TiB of it; the first dimension is the one that grows.
        dtype: of the elements; None is torch's default.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        max_bytes: the budget: bytes, `"20GiB"`, or a share of the memory that is free now, `"80%"` or `0.8`.
        page_size: bytes of a page, as in `KVCache`; None is 2 MiB.
        pool: physical memory shared with others, instead of `device` and `page_size`; `max_bytes` is the most
            of it that this tensor may have.

    Raises:
        LayoutError: the shape has no bytes, or takes more than 100 TiB of addresses; or there is no such page.
        DtypeError: there is no such dtype.
        BudgetError: the budget is no size, below one page, or larger than the device.
        DeviceError: there is no such device.
        DriverError: the driver could not reserve the addresses.
        ArgumentError, TypeError, ValueError: the pool is not a `FramePool`, the shape is none, or something is given
            that the pool determines.
    """

    kind = "GrowableTensor"
    """Among who lies on a pool."""

    def __init__(
        self,
        shape_max: Sequence[int],
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        *,
        max_bytes: float | str = "80%",
        page_size: int | None = None,
        pool: FramePool | None = None,
    ) -> None:
        check_pool_alone(pool, device=device, page_size=page_size)
        self.shape_max = torch.Size(whole_number("shape_max", size) for size in shape_max)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype):
            raise DtypeError(f"got dtype={dtype!r}; it must be a torch.dtype")
        if not self.shape_max or min(self.shape_max) < 1:
            raise LayoutError(f"asked for shape_max={tuple(self.shape_max)}; each dimension is at least 1")
        self._row_bytes = math.prod(self.shape_max[1:]) * self.dtype.itemsize
        owns_pool = pool is None
        pool = pool or FramePool(max_bytes, device=device, page_size=page_size)
        super().__init__(pool, owns_pool)
        size = pool.page_size
        nbytes = -(-self.shape_max[0] * self._row_bytes // size) * size
        check_address_space(nbytes, f"shape_max={tuple(self.shape_max)} of {self.dtype}")
        self._length = 0
        self._fence = Fence()
        self._streams = {self._driver.current_stream()}
        self._is_poisoned = pool.is_debugged and self.dtype.is_floating_point
        """For debugging: new rows are filled with what is no number."""
        self._open(nbytes, None if owns_pool else pages_within(pool, max_bytes))
        with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
            flat = export_range(self._arena.address, nbytes, self.device, owner=self._arena)
            self._whole = flat[: self.shape_max[0] * self._row_bytes].view(self.dtype).view(self.shape_max)
        owners.add(self)

    @operation
    def _open(self, nbytes: int, limit: int | None) -> None:
        """Opens an account of so many pages, and reserves addresses."""
        if self.pool.is_debugged:
            watch(self.pool)
        self._account = Account(limit)
        self._arena = Arena(self.pool, self._account, 1, nbytes)
        self.pool.accounts.open(self._account, self)

    @property
    def tensor(self) -> torch.Tensor:
        """Its rows, `[length, *shape_max[1:]]`: a view, contiguous and zero-copy.

        Raises:
            UseAfterFreeError: it was closed.
        """
        self.check_open()
        return self._whole[: self._length]

    @property
    def shape(self) -> torch.Size:
        """The shape of `tensor`."""
        return torch.Size((self._length, *self.shape_max[1:]))

    @property
    def capacity(self) -> int:
        """The length up to which growing costs no driver call."""
        return min(self._arena.table.ready[0] * self.pool.page_size // self._row_bytes, self.shape_max[0])

    def __len__(self) -> int:
        return self._length

    @operation
    def resize(self, length: int) -> None:
        """Grows or shrinks to `length` rows. Rows that stay keep their values; new ones are undefined.

        Pages behind the new end stay mapped, ready to be grown into again; `trim` gives them back.

        Raises:
            ShapeError: `length` is negative or over the maximum.
            TypeError: it is no whole number.
            OutOfPagesError: the budget cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages would be left behind while a CUDA graph is captured.
            UseAfterFreeError: it was closed. In all cases it is as before.
        """
        length = operator.index(length)
        self._make_room(length)
        if self._pages(length) < self._pages(self._length):
            self._fence_all()
        if self._is_poisoned and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._whole[self._length : length].fill_(math.nan)
        self._length = length

    @operation
    def append(self, rows: torch.Tensor) -> None:
        """Grows by `rows`, `[n, *shape_max[1:]]`, and copies them.

        Raises:
            ArgumentError, ShapeError, DtypeError, DeviceError: they do not fit; and what `resize` raises. It is as
                before.
        """
        check_dense(rows, "rows")
        if rows.shape[1:] != self.shape_max[1:] or not rows.ndim:
            raise ShapeError(f"got {list(rows.shape)}; rows of shape_max={tuple(self.shape_max)} are needed")
        if rows.dtype != self.dtype:
            raise DtypeError(f"got {rows.dtype}; this tensor holds {self.dtype}. Convert with .to()")
        if rows.device != self.device:
            raise DeviceError(f"got rows on {rows.device}; this tensor is on {self.device}")
        start, end = self._length, self._length + len(rows)
        self._make_room(end)
        self._whole[start:end].copy_(rows.detach())  # it is no part of an autograd graph
        self._length = end

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Says that work on `stream` uses it: pages that it leaves behind wait for that work, too.

        Raises:
            ArgumentError: it is no stream.
            DeviceError: the stream is on another device.
        """
        check_stream(stream, self.device)
        self._streams.add(stream)

    @operation
    def trim(self) -> int:
        """Gives the pages behind its last row back to the system; returns their bytes.

        Waits for GPU work that was submitted before it shrank.

        Raises:
            DriverError, UseAfterFreeError: as in `KVCache.trim`.
        """
        return self.pool.trim_holder(self)

    @property
    def kept_pages(self) -> int:
        """Pages that others on its pool cannot have."""
        return self._pages(self._length)

    @property
    def firm_pages(self) -> int:
        """All that are mapped: it grows into them without asking."""
        return self._account.taken

    def reclaim(self, count: int, *, wait: bool = False, firm: bool = False) -> int:
        """Gives up to `count` pages behind its last row to others on its pool; returns how many. All are firm."""
        if wait:
            self._fence.wait()
        return self._arena.unmap_back(0, self._pages(self._length), count) if self._fence.passed() else 0

    def sequences(self) -> tuple[int, int]:
        """None: it has rows, and these are no tokens."""
        return 0, 0

    def known_tenants(self) -> set[int]:
        """None: what it has is nobody's in particular."""
        return set()

    def held(self) -> list[str]:
        """What of it is in use."""
        pages = self._arena.table.mapped_pages()
        return [f"{self._length} rows", *(f"  {line}" for line in self.pool.taken_by(pages))] if self._length else []

    def recover(self) -> None:
        """Works its books out anew, after an interruption."""
        self._fence_all()  # who was interrupted may have begun to write behind the last row
        table, end = self._arena.table, self._pages(self._length)
        if self.pool.tenants and table.unclean(0, end, table.end[0], tenant=0):
            self._fence.wait()
            self._arena.unmap_back(0, end)
        self._account.taken = len(self._arena.table.mapped_pages())

    @operation
    def stats(self) -> GrowableTensorStats:
        """A snapshot: bytes."""
        pool, size = self.pool, self.pool.page_size
        physical = pool.frames.existing if self._owns_pool else self._account.taken
        budget = pool.accounts.limit_of(self._account)
        return GrowableTensorStats(budget * size, physical * size, self._length * self._row_bytes)

    @operation
    def mapped_ranges(self) -> list[MappedRange]:
        """Where its pages are mapped now: nowhere, or one run."""
        table = self._arena.table
        return [table.mapped_range(0, 0, self._length * self._row_bytes, 0)] if table.pages(0) else []

    def _give_back(self) -> None:
        self._length = 0
        self._arena.close()
        self.pool.accounts.close(self._account)

    def _pages(self, length: int) -> int:
        return -(-length * self._row_bytes // self.pool.page_size)

    def _make_room(self, length: int) -> None:
        """Maps the pages of `length` rows, or changes nothing."""
        if not 0 <= length <= self.shape_max[0]:
            raise ShapeError(
                f"asked for {shown(length)} rows; shape_max={tuple(self.shape_max)} has {self.shape_max[0]}"
            )
        arena, pool = self._arena, self.pool
        end, old_end, ready = self._pages(length), arena.table.end[0], arena.table.ready[0]
        if end <= ready:
            return
        missing = max(end - old_end, 0)
        pool.collect()
        pool.accounts.check_allowed(self._account, end)
        pool.accounts.make_headroom(self._account, missing)
        pool.accounts.make_idle(self._account, missing)
        supply = pool.take(self._account, missing)
        change = Change(pool)
        change.map(arena.table, 0, end, supply)
        change.run()
        pool.pages_in_need += change.commit()
        with Undo() as undo:
            undo.push(self._unmap, ready)
            change.check()
            undo.push(self._fence_all)
            for address, nbytes in arena.table.unclean(0, ready, end, tenant=0):
                self._driver.fill(address, nbytes, 0, self._driver.current_stream())
        arena.table.belong(0, ready, end, tenant=0)

    def _unmap(self, ready: int) -> None:
        """Unmaps all behind what was accessible."""
        self._fence.wait()
        self._arena.unmap_back(0, ready)

    def _fence_all(self) -> None:
        """Keeps the pages behind the last row until all work so far has finished."""
        self._fence |= Fence.after(self._driver, {self._driver.current_stream(), *self._streams})

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GrowableTensor owns its memory and cannot be copied or pickled; clone its tensor")

    def __repr__(self) -> str:
        sizes = f"{list(self.shape)} of {list(self.shape_max)}"
        return f"<vmmkv.torch.GrowableTensor on {self.device}: {sizes}, {self.dtype}>"
