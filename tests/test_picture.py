"""What caches and sequences show of themselves in Jupyter: every page once, with its owner, whatever happens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from conftest import ROOT, on_driver, run_python, small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.core import entries
from vmmkv.core.mapper import FRAMES
from vmmkv.core.pool import Ask
from vmmkv.picture import MAX_PAGES, MAX_ROWS, colour
from vmmkv.snapshot import mapped_rows, pages_in

SVG = "{http://www.w3.org/2000/svg}"
STATES = {
    "free": vmmkv.FREE_PAGE,
    "surplus": vmmkv.SURPLUS_PAGE,
    "kept": vmmkv.KEPT_PAGE,
    "lookahead": vmmkv.LOOKAHEAD_PAGE,
    "given back": vmmkv.VACANT_PAGE,
    "shared": vmmkv.SHARED_PAGE,
}


LARGE_FRAMES = {"lookahead": 20, "large_frames": True, "max_seq_len": 240, "pages": 90}
"""Rows of up to two large frames, and no longer than can be drawn page by page."""


class Square(NamedTuple):
    """What a square says and looks like: the page, its entry in the page map, the colour, and which part is filled."""

    page: int
    state: int
    colour: str
    part: float


def squares(picture: str, where: str) -> Iterator[list[Square]]:
    """The squares of each of a picture's rows, or of its physical pages."""
    for group in ElementTree.fromstring(picture).iterfind(f"{SVG}g[@class='{where}']"):
        yield [square(each) for each in group.iterfind(f"{SVG}g")]


def square(drawn: ElementTree.Element) -> Square:
    page, state, number = re.fullmatch(
        r"page (\d+): (?:(free|surplus|kept|lookahead|given back|shared).*|sequence (\d+))",
        drawn.findtext(f"{SVG}title") or "",
    ).groups()
    boxes = drawn.findall(f"{SVG}rect")
    (looks,) = {box.get(key) for box in boxes for key in ("fill", "stroke")} - {None, "none"}
    if number:
        assert looks == colour(int(number))
    assert (drawn.find(f"{SVG}path") is not None) == (state == "shared" and looks != "currentColor")
    part = float(boxes[-1].get("width")) / float(boxes[0].get("width"))
    return Square(int(page), int(number) if number else STATES[state], looks, part)


def drawn_pages(picture: str, where: str) -> list[tuple[int, int]]:
    """Pages, and what they are, of all squares."""
    return [(each.page, each.state) for line in squares(picture, where) for each in line]


def make_observed(make_cache: Callable[..., vmmkv.KVCache], device: str, **options) -> vmmkv.KVCache:
    """A cache whose mapper, if there is one, works only when it is told to."""
    cache = make_cache(driver=FaultyDriver(small_driver(device)), **options)
    if cache.pool.mapper:
        cache.pool.mapper.ring = lambda: None
    return cache


def map_ahead(cache: vmmkv.KVCache) -> None:
    """Does what the mapper does, a few times."""
    for _ in range(20):
        if cache.pool.word("hungry"):
            cache.pool.change(Ask(), entries.plan_ahead, cache.pool.address, FRAMES)


def change(cache: vmmkv.KVCache, live: dict[vmmkv.Sequence, int]) -> None:
    """One random operation; `live` are the sequences, and the tokens that they expect."""
    sequence = random.choice(list(live)) if live else None
    operations = ["start", "start", "fork", "extend", "extend", "truncate", "release", "free", "trim", "map ahead"]
    operation = random.choice(operations)
    some = cache.max_seq_len * 2 // 3
    try:
        if operation == "start":
            tokens, expected = random.randint(0, some), random.choice([0, random.randint(0, some)])
            live[cache.sequence(tokens, expected_tokens=expected)] = expected
        elif operation == "trim":
            cache.trim()
        elif operation == "map ahead":
            map_ahead(cache)
        elif sequence and operation == "fork":
            live.update(dict.fromkeys(cache.fork_many(sequence, random.randint(1, 2)), 0))
        elif sequence and operation == "extend":
            sequence.extend(random.randint(0, some // 2))
        elif sequence and operation == "truncate":
            sequence.truncate(random.randint(sequence.start, sequence.length))
        elif sequence and operation == "release":
            sequence.release_before(random.randint(sequence.start, sequence.length))
        elif sequence:
            del live[sequence]
            sequence.free()
    except (vmmkv.OutOfRowsError, vmmkv.OutOfPagesError, vmmkv.SequenceTooLongError):
        pass


@pytest.mark.parametrize("options", [{}, {"layers_per_range": 1}, LARGE_FRAMES], ids=str)
def test_every_page_is_drawn_once_with_its_owner(
    make_cache: Callable[..., vmmkv.KVCache], device: str, options: dict[str, object]
) -> None:
    cache = make_observed(make_cache, device, **options)
    live: dict[vmmkv.Sequence, int] = {}
    for _ in range(60):
        change(cache, live)
        owners, picture = cache.page_map(), cache._repr_html_()
        assert drawn_pages(picture, "physical") == list(enumerate(owners.tolist()))
        drawn = drawn_pages(picture, "row")
        assert sorted(drawn) == sorted((number, owners[number]) for number in pages_of_frames(cache))
        for sequence in live:
            own = [each for line in squares(sequence._repr_html_(), "row") for each in line]
            used = [each for each in own if each.colour == colour(sequence.number)]
            tokens = sequence.length - sequence.start
            filled = sum(each.part for each in used) * cache.page_size
            assert filled == pytest.approx(tokens * cache.layout.token_bytes, rel=0.05, abs=64)


def pages_of_frames(cache: vmmkv.KVCache) -> list[int]:
    """The physical pages on all rows."""
    return [n for row, part in mapped_rows(cache) for n in pages_in(cache, row, part)[1].tolist()]


def test_pictures_of_large_caches_are_bounded() -> None:
    driver = small_driver("cpu")
    layout = vmmkv.KVLayout(num_layers=1, num_kv_heads=1, head_dim=driver.page_size // 4)  # a token a page
    cache = on_driver(driver, vmmkv.KVCache, layout, 64, 20_000, max_bytes="32MiB")
    sequences = [cache.sequence(tokens) for tokens in (5000, *[30] * 63)]
    owners = cache.page_map()
    drawn = dict(drawn_pages(cache._repr_html_(), "physical"))
    assert MAX_PAGES // 2 < len(drawn) <= MAX_PAGES
    assert all(owners[page] == owner for page, owner in drawn.items())
    assert f"and {64 - MAX_ROWS} more rows" in cache._repr_html_()
    for shown in (cache, sequences[0]):
        picture = shown._repr_html_()
        assert "a square stands for" in picture
        assert len(picture) < 300_000


def test_what_is_gone_says_so(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache()
    assert not drawn_pages(cache._repr_html_(), "physical")
    assert "0 tokens" in cache.sequence()._repr_html_()
    kept, freed = cache.sequence(10), cache.sequence(10)
    freed.free()
    assert "gone" in freed._repr_html_()
    cache.close()
    assert "gone" in kept._repr_html_()
    assert "&lt;vmmkv.KVCache" in cache._repr_html_()


def test_the_picture_in_the_readme_is_what_is_drawn_now() -> None:
    code = "import runpy, sys; print(end=runpy.run_path(sys.argv[1])['picture']())"
    drawn = run_python(code, str(ROOT / "docs/assets/page_map.py")).stdout  # where sequences count from 0
    assert (ROOT / "docs/assets/page_map.svg").read_text() == drawn
