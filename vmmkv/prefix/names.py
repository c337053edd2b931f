"""Tenants as keys of pages."""

from __future__ import annotations

from hashlib import blake2b
from os import urandom

from ..events.naming import Name, name_of

_salt = urandom(16)


def tenant_key(tenant: Name) -> int:
    """The key of a tenant's pages: 0 for None, else 61 bits of a digest that differs from process to process.

    Raises:
        ArgumentError: it is neither text, bytes, a whole number, nor None.
    """
    name = name_of("tenant", tenant)
    if name is None:
        return 0
    kind, content = ("b", name) if isinstance(name, bytes) else (type(name).__name__, str(name).encode())
    return 1 + (int.from_bytes(blake2b(kind.encode() + b":" + content, key=_salt, digest_size=8).digest()) >> 3)
