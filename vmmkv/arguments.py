"""What a cache is asked for, checked: its shape, sequences of it, and numbers, one for all or one for each."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, KeysView, Mapping, Set, ValuesView
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .core.sequence import Sequence, too_long
from .errors import ArgumentError, DtypeError, LayoutError, OutOfRangeError, ShapeError
from .layout import KVLayout, as_index, shown, whole_number


def check_shape(layout: KVLayout, max_sequences: int, max_seq_len: int, int32_strides: bool) -> tuple[int, int]:
    """Returns the numbers of sequences and of their tokens. Raises `ArgumentError` or `LayoutError`."""
    if not isinstance(layout, KVLayout):
        raise ArgumentError(f"got layout={layout!r}; it must be a vmmkv.KVLayout")
    max_sequences = whole_number("max_sequences", max_sequences, least=1)
    max_seq_len = whole_number("max_seq_len", max_seq_len, least=1)
    if int32_strides and max_seq_len > layout.int32_token_limit:
        raise LayoutError(
            f"asked for max_seq_len={max_seq_len} with int32_strides; a token stride of {max(layout.record_bytes)} "
            f"bytes allows {layout.int32_token_limit}. Lower max_seq_len, or lower layers_per_range in the layout"
        )
    return max_sequences, max_seq_len


def check_size(name: str, value: object, least: int = 1) -> int:
    """Returns a whole number of at least `least`. Raises `ArgumentError` or `LayoutError`."""
    number = as_index(name, value)
    if number < least:
        raise LayoutError(f"asked for {name}={shown(number)}; it is at least {least}")
    return number


def check_flags(**flags: object) -> None:
    """Raises `ArgumentError` where what is to be true or false is neither."""
    for name, value in flags.items():
        if type(value) is not bool and not isinstance(value, np.bool_):
            raise ArgumentError(f"got {name}={value!r}; it is True or False")


Ids = npt.NDArray[np.integer[Any]]
Item = TypeVar("Item")


def one_of(items: list[Item], number: int, kind: str) -> Item:
    """Returns a layer or range of a cache; a negative number counts from the last. Raises `OutOfRangeError`."""
    number = as_index(kind, number)
    try:
        return items[number]
    except IndexError:
        raise OutOfRangeError(f"asked for {kind} {shown(number)}; {kind}s are 0 to {len(items) - 1}") from None


def row_number(row: int, max_sequences: int) -> int:
    """Returns the number of a row. Raises `ArgumentError` or `OutOfRangeError`."""
    row = as_index("row", row)
    if not 0 <= row < max_sequences:
        raise OutOfRangeError(f"asked for row {shown(row)}; rows are 0 to {max_sequences - 1}")
    return row


def batch_of(cache: object, sequences: Iterable[Sequence], *, repeated: bool = False) -> list[Sequence]:
    """Lists sequences of a cache; with `repeated` they may be named several times. Raises `TypeError` or
    `ValueError`."""
    if isinstance(sequences, Sequence):
        raise TypeError(f"got {sequences!r}; give a list of sequences, or call the sequence's own method")
    try:
        batch = list(sequences)
    except TypeError:
        raise TypeError(f"got {sequences!r}; give a list of sequences") from None
    for sequence in batch:
        if not isinstance(sequence, Sequence):
            raise TypeError(f"got {sequence!r} among the sequences; they are what KVCache.sequence() returns")
        if sequence.cache is not cache:
            raise ValueError(f"{sequence!r} belongs to another cache")
    if len({*batch}) == len(batch):
        return batch
    if repeated:
        return list(dict.fromkeys(batch))
    raise ValueError("a sequence is named twice; name each once, and for extend() add its tokens up")


def indices_of(indices: Iterable[int], count: int) -> list[int]:
    """Returns as many indices as there are sequences, of these. Raises `ArgumentError`, `ValueError` or
    `OutOfRangeError`."""
    try:
        each = list(indices)
    except TypeError:
        raise ArgumentError(f"got indices={indices!r}; give a list of them") from None
    chosen = [as_index("index", index) for index in each]
    if len(chosen) != count:
        raise ValueError(f"got {len(chosen)} indices for {count} sequences; give one for each")
    if chosen and not 0 <= min(chosen) <= max(chosen) < count:
        raise OutOfRangeError(f"got indices {chosen}; they are from 0 to {count - 1}, for {count} sequences")
    return chosen


def whole_numbers(
    name: str, numbers: int | Collection[int] | npt.NDArray[np.integer[Any]], count: int, limit: int
) -> npt.NDArray[np.int64]:
    """Returns `[count]` numbers from 0 to `limit`, of as many or of one for all. Raises `TypeError`, `ValueError` or
    `SequenceTooLongError`."""
    if isinstance(numbers, Set | Mapping) and not isinstance(numbers, KeysView):
        raise TypeError(f"got {name}={numbers!r}; numbers in order are needed: give a list")
    try:
        given = np.asarray([*numbers] if isinstance(numbers, KeysView | ValuesView) else numbers)
    except ValueError:  # lists of several lengths
        raise ValueError(f"got {name}={numbers!r}; give one number, or one for each of {count} sequences") from None
    if given.dtype.kind not in "iu":  # also numbers of more than 64 bits
        for number in np.asarray(numbers, object).ravel().tolist():
            check_length(check_tokens(number, name), limit)
    if given.shape not in ((), (count,)):
        raise ValueError(f"got {name} of shape {given.shape} for {count} sequences; give one number or one for each")
    check_tokens(int(given.min(initial=0)), name)
    check_length(int(given.max(initial=0)), limit)
    return np.full(count, given, np.int64)


def check_length(length: int, max_seq_len: int) -> None:
    """Raises `SequenceTooLongError` where a sequence would outgrow its row."""
    if length > max_seq_len:
        raise too_long(length, max_seq_len)


def check_tokens(tokens: int, name: str = "tokens") -> int:
    """A whole number, of tokens or of what is named. Raises `ArgumentError` or `ValueError`."""
    if type(tokens) is int and tokens >= 0:  # each growth comes here
        return tokens
    tokens = as_index(name, tokens)
    if tokens < 0:
        hint = "; to drop tokens use truncate" if name == "tokens" else ""
        raise ValueError(f"asked for {name}={shown(tokens)}; it is at least 0{hint}")
    return tokens


def ids_of(token_ids: npt.ArrayLike) -> Ids:
    """Token ids as integers of 32 or 64 bits, side by side; arrays of such are not copied. Raises `ArgumentError`,
    `ShapeError` or `DtypeError`."""
    if isinstance(token_ids, list) and token_ids and type(token_ids[0]) is int:  # numpy takes three times as long
        with suppress(struct.error, TypeError, ValueError, RuntimeError):  # below it is said why
            return np.frombuffer(struct.pack(f"{len(token_ids)}q", *token_ids), np.int64)
    try:
        ids = np.asarray(token_ids)
    except ValueError:
        raise ShapeError("got token_ids of several lengths; give ids of one sequence, [tokens]") from None
    except TypeError as error:  # a tensor on a GPU
        raise ArgumentError(f"got token_ids that are no array: {error}") from None
    ids = ids if ids.size else ids.astype(np.int64)  # an empty list is one of floats to numpy
    if ids.ndim != 1:
        raise ShapeError(f"got token_ids of shape {ids.shape}; give ids of one sequence, [tokens]")
    if ids.dtype.kind != "i" and (ids.dtype.kind != "u" or not np.can_cast(ids.dtype, np.int64)):
        raise DtypeError(f"got token ids of {ids.dtype}; they are integers below 2**63, which int64 holds")
    return np.ascontiguousarray(ids, np.int32 if ids.dtype == np.int32 else np.int64)
