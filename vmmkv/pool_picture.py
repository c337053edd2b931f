"""Picture of a frame pool and its accounts, for Jupyter.

A bar for the pool, and a bar for each account, all to one scale. A colour is an account: full for what is used, pale
for what is mapped and may be taken by other accounts. The line below a bar is what is reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .stats import AccountStats, format_bytes
from .svg import WIDTH, Drawing, colour, named, rectangle

BAR = 12
"""Pixels of a bar, from top to bottom."""
PALE = 'fill-opacity=".4"'
FREE = 'fill="none" stroke="#888"'
VACANT = f'{FREE} stroke-dasharray="1 3"'
RESERVED = 'fill="currentColor"'
LEGEND = [
    (f'fill="{colour(0)}"', "full colour: used"),
    (f'fill="{colour(0)}" {PALE}', "pale: mapped, not used; others can have it"),
    (FREE, "free"),
    (VACANT, "may be taken"),
    (RESERVED, "reserved"),
]
Part = tuple[str, int, str]
"""A part of a bar: its name, its bytes, and its looks."""


def draw_accounts(title: str, limit: int, free: int, accounts: Sequence[AccountStats]) -> str:
    """Draws a pool and its accounts.

    Args:
        title: what the pool is called.
        limit: bytes that it may take.
        free: bytes that it has taken and that are not mapped.
        accounts: the accounts of the pool.
    """
    mapped = sum(account.mapped_bytes for account in accounts)
    reserved = sum(account.reserved_bytes for account in accounts)
    parts = [_parts(account, number) for number, account in enumerate(accounts)]
    drawing = Drawing()
    drawing.text(
        f"{title}: {format_bytes(mapped + free)} of {format_bytes(limit)} taken, {format_bytes(free)} of that free; "
        f"{format_bytes(reserved)} reserved",
        bold=True,
    )
    _bar(drawing, WIDTH / limit, limit, [*chain(*parts), ("free", free, FREE)])
    for account, own in zip(accounts, parts):
        drawing.text(_describe(account))
        _bar(drawing, WIDTH / limit, account.limit_bytes, own, account.reserved_bytes)
    drawing.legend(LEGEND)
    return drawing.svg()


def _parts(account: AccountStats, number: int) -> list[Part]:
    fill = f'fill="{colour(number)}"'
    idle = account.mapped_bytes - account.used_bytes
    return [
        (f"{account.name}, used", account.used_bytes, fill),
        (f"{account.name}, mapped and not used", idle, f"{fill} {PALE}"),
    ]


def _describe(account: AccountStats) -> str:
    facts = [f"{format_bytes(account.used_bytes)} used", f"{format_bytes(account.mapped_bytes)} mapped"]
    if account.reserved_bytes:
        facts.append(f"{format_bytes(account.reserved_bytes)} reserved")
    facts.append(f"{format_bytes(account.limit_bytes)} at most")
    if account.sequences:
        facts.append(f"{account.tokens:,} tokens of {account.sequences:,} live sequences")
    return f"{account.name}: {', '.join(facts)}"


def _bar(drawing: Drawing, scale: float, limit: int, parts: Sequence[Part], reserved: int = 0) -> None:
    """A bar of so many bytes at most, with parts side by side from the left on.

    Args:
        scale: pixels of a byte.
    """
    x, y = 0.0, drawing.y + 2
    drawing.put('<g class="bar">')
    drawing.put(named(f"at most: {format_bytes(limit)}", rectangle(0, y, limit * scale, BAR, VACANT)))
    for what, nbytes, looks in parts:
        if nbytes:
            drawing.put(named(f"{what}: {format_bytes(nbytes)}", rectangle(x, y, nbytes * scale, BAR, looks)))
        x += nbytes * scale
    if reserved:
        below = rectangle(0, y + BAR + 2, reserved * scale, 2, RESERVED)
        drawing.put(named(f"reserved: {format_bytes(reserved)}", below))
    drawing.put("</g>")
    drawing.y += BAR + 8
