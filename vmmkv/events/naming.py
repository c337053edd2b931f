"""Salts, adapters and tenants: which values keep sequences apart, and how routers are told of them.

A root is what comes before the first block of a sequence. Its digest is SHA-256 of `vmmkv` and four fields: salt,
adapter, tenant, block size. A field is the letter of its kind (`n` for None, `s` for text, `i` for a whole number), the
length of its bytes in decimal digits, a colon, and its bytes: text in UTF-8, a number in decimal digits. So no two
roots have the same bytes, and they are the same in all versions of Python.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from operator import index

from ..errors import ArgumentError
from ..layout import shown

Name = str | bytes | int | None
"""A salt, an adapter or a tenant."""
Names = tuple[str | None, str | int | None, str | int | None]
"""Salt, adapter and tenant as routers are told of them."""

MAX_BITS = 128


def name_of(kind: str, value: object) -> Name:
    """Returns a salt, an adapter or a tenant, named by `kind` in errors, as a plain value: text, bytes, a whole number
    (also of a subclass, such as an enumeration), or None. Values of different types are never equal: Python's
    `1 == True == 1.0` would let sequences share what is to be kept apart."""
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):
            return str.encode(value).decode()
    elif isinstance(value, bytes):
        return bytes(memoryview(value))
    elif value is None:
        return None
    elif isinstance(value, int) and not isinstance(value, bool) and int.bit_length(value) <= MAX_BITS:
        return index(value)
    given = shown(value) if isinstance(value, int) else f"{value!r}"
    raise ArgumentError(
        f"got {kind}={given} of type {type(value).__name__}; it must be text that UTF-8 can encode, bytes, a whole "
        f"number (no bool) of at most {MAX_BITS} bits, or None"
    )


def told_names(salt: object, adapter: object, tenant: object) -> Names:
    """Returns salt, adapter and tenant as plain values that routers can be told of."""
    salt, adapter, tenant = name_of("salt", salt), name_of("adapter", adapter), name_of("tenant", tenant)
    if (
        not isinstance(salt, str | None)
        or isinstance(adapter, bytes)
        or isinstance(tenant, bytes)
        or (isinstance(adapter, int) and not 0 <= adapter < 1 << 63)
    ):
        raise ArgumentError(
            f"salt={salt!r}, adapter={adapter!r}, tenant={tenant!r}: routers are told of salts that are text, of "
            "adapters that are text or numbers from 0 to 2**63 - 1, and of tenants that are text or numbers. Give "
            "such, or make the cache without event_log"
        )
    return salt, adapter, tenant


def salt_of(salt: str | None, tenant: str | int | None = None) -> str | None:
    """Returns the salt that vLLM's format carries, which has no field for tenants.

    With a tenant it is JSON, `["tenant", "salt"]` or `["tenant", null]`. Without one it is the salt itself; if that
    begins with `[`, as such JSON does, `[null, "salt"]`. So different names stay different.
    """
    salt, _, tenant = told_names(salt, None, tenant)
    if tenant is None and not (salt or "").startswith("["):
        return salt
    return json.dumps([tenant, salt])


def root_digest(salt: str | None, adapter: str | int | None, tenant: str | int | None, block_size: int) -> bytes:
    """Returns the digest that comes before the first block of sequences with these names."""
    found = hashlib.sha256(b"vmmkv")
    for value in (salt, adapter, tenant, block_size):
        kind, data = "n" if value is None else "s" if isinstance(value, str) else "i", str(value).encode()
        data = b"" if value is None else data
        found.update(f"{kind}{len(data)}:".encode() + data)
    return found.digest()
