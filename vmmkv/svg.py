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
    """The colour of a sequence by its number, `#rrggbb`: always the same, unlike its neighbours', seen on black and on
    white."""
    hue = number * 0.381966 % 1  # the golden angle: as far as can be from the numbers before
    red, green, blue = colorsys.hls_to_rgb(hue, (0.54, 0.4, 0.66)[number % 3], 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def rectangle(x: float, y: float, width: float, height: float, looks: str) -> str:
    """A rectangle with SVG attributes for its looks."""
    return f'<rect x="{x:.4g}" y="{y:.6g}" width="{width:.4g}" height="{height:g}" {looks}/>'


def stripe(x: float, y: float, width: float, height: float) -> str:
    """A line along the middle of a rectangle."""
    return f'<path d="M{x:.4g} {y + height / 2:.6g}h{width:.4g}" stroke="currentColor" stroke-width="2"/>'


class Drawing:
    """A drawing that grows downwards, below a title and a line; `y` is where it ends so far."""

    def __init__(self, title: str, line: str) -> None:
        self._parts: list[str] = []
        self.y = 0
        self.text(title, 'font-weight="bold"')
        self.text(line)

    def text(self, text: str, looks: str = "") -> None:
        """Adds a line of text."""
        self.y += 20
        self.write(0, self.y - 5, text, looks)

    def write(self, x: float, y: float, text: str, looks: str = "") -> None:
        """Adds text at a position."""
        self.put(f'<text x="{x:g}" y="{y:g}" fill="currentColor" {looks}>{escape(text)}</text>')

    def put(self, shape: str) -> None:
        """Adds a shape."""
        self._parts.append(shape)

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """Adds squares, each with its looks and what it stands for."""
        for looks, text in entries:
            self.put(rectangle(1, self.y + 7, KEY, KEY, looks))
            self.y += 16
            self.write(KEY + 4, self.y, text)
        self.y += 4

    def svg(self) -> str:
        """The SVG of the drawing."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.y}" '
            f'viewBox="0 0 {WIDTH} {self.y}" style="max-width:100%;height:auto" font-family="sans-serif" '
            f'font-size="11">{"".join(self._parts)}</svg>'
        )
