"""Drawings for notebooks, as SVG: lines of text and shapes, from top to bottom, seen on black and on white."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from html import escape

WIDTH = 768
"""Pixels from left to right."""
KEY = 10
"""Pixels of a square in a legend."""


def colour(number: int) -> str:
    """The colour of a sequence, or of an account, by its number, `#rrggbb`: always the same, unlike its neighbours',
    seen on black and on white."""
    hue = number * 0.381966 % 1  # the golden angle: as far as can be from the numbers before
    red, green, blue = colorsys.hls_to_rgb(hue, (0.54, 0.4, 0.66)[number % 3], 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def rectangle(x: float, y: float, width: float, height: float, looks: str) -> str:
    """A rectangle with SVG attributes for its looks."""
    return f'<rect x="{x:.4g}" y="{y:.6g}" width="{width:.4g}" height="{height:g}" {looks}/>'


def stripe(x: float, y: float, width: float, height: float) -> str:
    """A line along the middle of a rectangle."""
    return f'<path d="M{x:.4g} {y + height / 2:.6g}h{width:.4g}" stroke="currentColor" stroke-width="2"/>'


def named(what: str, shape: str) -> str:
    """A shape that shows a text under the pointer."""
    return f"<g><title>{escape(what)}</title>{shape}</g>"


class Drawing:
    """A drawing that grows downwards; `y` is where it ends so far."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.y = 0

    def text(self, text: str, bold: bool = False) -> None:
        """Adds a line of text."""
        self.y += 20
        self.write(0, self.y - 5, text, 'font-weight="bold"' if bold else "")

    def write(self, x: float, y: float, text: str, looks: str = "") -> None:
        """Adds text at a position."""
        if text:
            self.put(f'<text x="{x:g}" y="{y:g}" fill="currentColor" {looks}>{escape(text)}</text>')

    def put(self, shape: str) -> None:
        """Adds a shape."""
        self._parts.append(shape)

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """Adds lines of squares, each with its looks and what it stands for."""
        x = 0
        self.y += 8
        for looks, text in entries:
            width = 7 * len(text) + 36
            if x and x + width > WIDTH:
                x, self.y = 0, self.y + KEY + 6
            self.put(rectangle(x + 1, self.y + 1, KEY, KEY, looks))
            self.write(x + KEY + 4, self.y + KEY, text)
            x += width
        self.y += KEY + 6

    def svg(self) -> str:
        """The SVG of the drawing."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.y}" '
            f'viewBox="0 0 {WIDTH} {self.y}" style="max-width:100%;height:auto" font-family="sans-serif" '
            f'font-size="11">{"".join(self._parts)}</svg>'
        )
