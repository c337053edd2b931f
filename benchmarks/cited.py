"""Finds figures in prose in the result files that their paragraph names.

A figure of three digits or more must be in one of these files, as it is or in other units, to as many digits as are
written: 4,239 for 4239.2, 15.9 ms for 0.01587 s, 12.4 % for 0.1239. Figures of one or two digits, and paragraphs that
name no file, are not checked; but in documents of measurements a figure with a unit needs a file, named in its
paragraph or in the first paragraph of its section.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

UNITS = 1, 1e3, 1e6, 1e-3, 1e-6, 1e-9, 100, 2**-10, 2**-20, 2**-30
CURVE = 64
"""Length of a list of numbers that is a curve of a plot, and is not searched."""
FIGURE = r"(?<![\w.,#-])\d[\d,]*(?:\.\d+)?(?![\w#-]|[.,]\d)"
DIGITS = 3
MEASURED = re.compile(r"(?<![\w.,#-])\d[\d,]*(?:\.\d+)? ?(?:ms|µs|[GT]B/s|TFLOP/s|%|tokens/s|x(?! \d)|times)(?![\w/])")
"""A figure with the unit of something measured."""
NAME = re.compile(r"`(?:benchmarks/results/)?(\w+\.json)`")
GENERATED = re.compile(r"<!-- table: .*?<!-- /table -->", re.DOTALL)
NOT_PROSE = re.compile(r"```.*?```|<!--.*?-->|^\|.*?$|\]\([^)]*\)|^\[[^\]]*\]:.*?$", re.DOTALL | re.MULTILINE)
"""Code, marks, tables, and where links lead."""


def unheld(text: str, results: Path) -> list[str]:
    """Figures that are in none of the files that their paragraph names, and missing files."""
    found = []
    for paragraph in paragraphs(text):
        names = sorted(set(NAME.findall(paragraph)))
        paths = [results / name for name in names if (results / name).exists()]
        found += [f"there is no {name}" for name in names if results / name not in paths]
        words = re.sub(r"`[^`]*`", "", paragraph)
        if paths:
            figures = [figure for figure in re.findall(FIGURE, words) if len(digits(figure)) >= DIGITS]
            found += [
                f"{figure} is not in {', '.join(path.name for path in paths)}"
                for figure in figures
                if not any(holds(path, figure) for path in paths)
            ]
    return found


def nameless(text: str) -> list[str]:
    """Paragraphs with measured figures that name no file, nor does the first paragraph of their section."""
    found = []
    for section in re.split(r"^#+ .*$", GENERATED.sub("", text), flags=re.MULTILINE):
        first, *others = paragraphs(section.strip())
        for paragraph in () if NAME.search(first) else (first, *others):
            figures = [match[0] for match in MEASURED.finditer(re.sub(r"`[^`]*`", "", paragraph))]
            if figures and not NAME.search(paragraph):
                found.append(f"no file is named for {', '.join(figures)}: {' '.join(paragraph.split()[:8])} ...")
    return found


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a document; each point of a list is one."""
    return re.split(r"\n\s*\n|\n(?=- )", NOT_PROSE.sub("", text))


def digits(figure: str) -> str:
    """The significant digits, with zeros at the end."""
    return re.sub(r"[,.]", "", figure).lstrip("0")


def holds(path: Path, figure: str) -> bool:
    """Whether a file has a number that is written like this."""
    written = figure.replace(",", "")
    value, half = float(written), 0.5001 * 10.0 ** -len(written.partition(".")[2])
    numbers = shown(path)
    place = bisect_left(numbers, value - half)
    return place < len(numbers) and numbers[place] <= value + half


@cache
def shown(path: Path) -> list[float]:
    """The numbers of a file in all units, in ascending order."""
    return sorted(number * unit for number in set(numbers_of(json.loads(path.read_text()))) for unit in UNITS)


def numbers_of(value: Any) -> Iterator[float]:
    """All numbers in an object, those in strings included."""
    if isinstance(value, dict):
        yield from numbers_of([*value, *value.values()])
    elif isinstance(value, list):
        if len(value) <= CURVE or not isinstance(value[0], int | float | list):
            for each in value:
                yield from numbers_of(each)
    elif isinstance(value, str):
        yield from (float(figure.replace(",", "")) for figure in re.findall(FIGURE, value))
    elif isinstance(value, int | float):
        yield float(value)
