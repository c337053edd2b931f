"""What caches, sequences and pools show of themselves in Jupyter: every page once, with its owner, whatever happens."""

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
from vmmkv.picture import MAX_PAGES, MAX_ROWS
from vmmkv.svg import colour

SVG = "{http://www.w3.org/2000/svg}"
STATES = {
    "free": vmmkv.FREE_PAGE,
    "surplus": vmmkv.SURPLUS_PAGE,
    "kept": vmmkv.KEPT_PAGE,
    "lookahead": vmmkv.LOOKAHEAD_PAGE,
    "given back": vmmkv.VACANT_PAGE,
}


LARGE_FRAMES = {"lookahead": 20, "large_frames": True, "max_seq_len": 240, "pages": 90}
"""Rows of up to two large frames, and no longer than can be drawn page by page."""


class Square(NamedTuple):
    """What a square says and looks like: the sequence whose colour it has, or the entry in the page map; who is said to
    share it; which part is filled, the first and the last page of the large frame if it is in one, and whether nothing
    parts it from the next one."""

    page: int
    owner: int
    sharers: list[int]
    part: float
    frame: tuple[int, int] | None
    is_joined: bool


def squares(picture: str, where: str) -> Iterator[list[Square]]:
    """The squares of each of a picture's rows, or of its physical pages."""
    for group in ElementTree.fromstring(picture).iterfind(f"{SVG}g[@class='{where}']"):
        drawn = group.findall(f"{SVG}g")
        yield [square(each, following) for each, following in zip(drawn, [*drawn[1:], None])]


def square(drawn: ElementTree.Element, following: ElementTree.Element | None) -> Square:
    page, begin, end, state, number, shared = re.fullmatch(
        r"page (\d+)(?:, in the large frame (\d+) to (\d+))?: "
        r"(?:(free|surplus|kept|lookahead|given back).*|sequence (\d+)|shared by sequences (\d.*))",
        drawn.findtext(f"{SVG}title") or "",
    ).groups()
    boxes = drawn.findall(f"{SVG}rect")
    left, width = (float(boxes[0].get(key)) for key in ("x", "width"))
    right = next((float(box.get("x")) for box in (following or ())[1:2]), None)
    colours = {box.get(key) for box in boxes for key in ("fill", "stroke")} - {None, "none"}
    sharers = [int(each) for each in shared.split(" and ")[0].split(", ")] if shared else []
    if shared:
        owner = next(
            (each for each in range(sharers[0], sharers[-1] + 200) if colours == {colour(each)}), vmmkv.SHARED_PAGE
        )
        assert owner >= 0 or colours == {"currentColor"}
        assert owner in (*sharers, vmmkv.SHARED_PAGE) or "more" in shared
    else:
        owner = int(number) if number else STATES[state]
        assert colours == {colour(owner)} or not number
    assert (drawn.find(f"{SVG}path") is not None) == (shared is not None and owner >= 0)
    return Square(
        int(page),
        owner,
        sharers,
        float(boxes[-1].get("width")) / width if owner >= 0 else 0.0,
        (int(begin), int(end)) if begin else None,
        left + width == right,
    )


def drawn_pages(picture: str, where: str) -> list[tuple[int, int]]:
    """Pages, and what they are, of all squares."""
    return [(each.page, each.owner) for line in squares(picture, where) for each in line]


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
        drawn = [line for line in squares(picture, "row") if line]
        assert sum(map(len, drawn)) == sum(run.nbytes for run in cache.mapped_ranges()) // cache.page_size
        for each in (each for line in drawn for each in line):
            assert owners[each.page] == (vmmkv.SHARED_PAGE if each.sharers else each.owner)
            assert each.frame is None or each.frame[0] <= each.page <= each.frame[1]
        for sequence in live:
            own = [each for line in squares(sequence._repr_html_(), "row") for each in line]
            used = [each for each in own if each.owner == sequence.number]
            tokens = sequence.length - sequence.start
            filled = sum(each.part for each in used) * cache.page_size
            assert filled == pytest.approx(tokens * cache.layout.token_bytes, rel=0.05, abs=64)


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
