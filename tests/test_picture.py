"""What caches and sequences show of themselves in Jupyter: every page once, with its owner, whatever has happened."""

from __future__ import annotations

import random
import re
import runpy
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

import pytest
from conftest import ROOT, small_driver

import vmmkv
from vmmkv.picture import MAX_PAGES, MAX_ROWS, colour

SVG = "{http://www.w3.org/2000/svg}"
STATES = {"free": vmmkv.FREE_PAGE, "surplus": vmmkv.SURPLUS_PAGE, "given back": vmmkv.VACANT_PAGE}


def squares(picture: str, where: str) -> Iterator[tuple[int, int, float]]:
    """Page, entry in the page map, and filled part of each square in a picture's rows, or of its physical pages."""
    for group in ElementTree.fromstring(picture).iterfind(f"{SVG}g[@class='{where}']"):
        for square in group.iterfind(f"{SVG}g"):
            page, state, number = re.fullmatch(
                r"page (\d+): (?:(free|surplus|given back).*|sequence (\d+))", square.findtext(f"{SVG}title") or ""
            ).groups()
            boxes = square.findall(f"{SVG}rect")
            if number:
                colours = {box.get(key) for box in boxes for key in ("fill", "stroke")} - {None, "none"}
                assert colours == {colour(int(number))}
                yield int(page), int(number), float(boxes[-1].get("width")) / float(boxes[0].get("width"))
            else:
                yield int(page), STATES[state], 0.0


def change(cache: vmmkv.KVCache, live: list[vmmkv.Sequence]) -> None:
    """One random operation."""
    sequence = random.choice(live) if live else None
    operation = random.choice(["start", "start", "extend", "extend", "truncate", "release", "free", "trim"])
    try:
        if operation == "start":
            live.append(cache.sequence(random.randint(0, 60)))
        elif operation == "trim":
            cache.trim()
        elif sequence and operation == "extend":
            sequence.extend(random.randint(0, 30))
        elif sequence and operation == "truncate":
            sequence.truncate(random.randint(sequence.start, sequence.length))
        elif sequence and operation == "release":
            sequence.release_before(random.randint(sequence.start, sequence.length))
        elif sequence:
            live.remove(sequence)
            sequence.free()
    except (vmmkv.OutOfRowsError, vmmkv.OutOfPagesError, vmmkv.SequenceTooLongError):
        pass


@pytest.mark.parametrize("layers_per_range", [None, 1])
def test_every_page_is_drawn_once_with_its_owner(
    make_cache: Callable[..., vmmkv.KVCache], layers_per_range: int | None
) -> None:
    cache = make_cache(layers_per_range=layers_per_range)
    live: list[vmmkv.Sequence] = []
    for _ in range(100):
        change(cache, live)
        owners = cache.page_map()
        picture = cache._repr_html_()
        drawn = [(page, owner) for page, owner, _ in squares(picture, "physical")]
        assert drawn == list(enumerate(owners.tolist()))
        mapped = {page: int(owner) for page, owner in enumerate(owners) if owner >= 0 or owner == vmmkv.SURPLUS_PAGE}
        in_rows = [(page, owner) for page, owner, _ in squares(picture, "row")]
        assert sorted(in_rows) == sorted(mapped.items())
        for sequence in live:
            own = [page for page, owner, _ in squares(sequence._repr_html_(), "row") if owner == sequence.number]
            assert sorted(own) == [page for page, owner in mapped.items() if owner == sequence.number]


def test_what_is_filled_is_tokens(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache()
    sequence = cache.sequence(random.randint(1, 90))
    sequence.release_before(random.randint(0, sequence.length - 1))
    picture = sequence._repr_html_()
    filled = sum(part for *_, part in squares(picture, "row"))
    tokens = sequence.length - sequence.start
    assert filled * cache.page_size == pytest.approx(tokens * cache.layout.token_bytes, rel=0.02)
    for facts in (f"{tokens} token", f"waste {cache.stats().waste:.1%}", f"room for {sequence.capacity} tokens"):
        assert facts in picture


def test_pictures_of_large_caches_are_bounded() -> None:
    driver = small_driver("cpu")
    layout = vmmkv.KVLayout(num_layers=1, num_kv_heads=1, head_dim=driver.page_size // 4)  # a token a page
    cache = vmmkv.KVCache(layout, 64, 20_000, max_bytes="32MiB", driver=driver)
    sequences = [cache.sequence(tokens) for tokens in (5000, *[30] * 63)]
    owners = cache.page_map()
    drawn = {page: owner for page, owner, _ in squares(cache._repr_html_(), "physical")}
    assert MAX_PAGES // 2 < len(drawn) <= MAX_PAGES
    assert all(owners[page] == owner for page, owner in drawn.items())
    assert f"and {64 - MAX_ROWS} more rows" in cache._repr_html_()
    for shown in (cache, sequences[0]):
        picture = shown._repr_html_()
        assert "a square stands for" in picture
        assert len(picture) < 300_000


def test_what_is_gone_says_so(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache()
    kept, freed = cache.sequence(10), cache.sequence(10)
    freed.free()
    assert "gone" in freed._repr_html_()
    cache.close()
    assert "gone" in kept._repr_html_()
    assert "gone" in cache._repr_html_()
    assert "&lt;vmmkv.KVCache" in cache._repr_html_()


def test_an_empty_cache_has_a_picture(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache()
    assert not list(squares(cache._repr_html_(), "physical"))
    assert "0 tokens" in cache.sequence()._repr_html_()


def test_colours_tell_sequences_apart() -> None:
    """Any twelve that are started one after the other: by more than an eighth of red, green or blue."""

    def channels(number: int) -> list[int]:
        return list(bytes.fromhex(colour(number)[1:]))

    for number in range(1000):
        for other in range(number + 1, number + 12):
            assert max(abs(a - b) for a, b in zip(channels(number), channels(other))) > 32


def test_the_picture_in_the_readme_is_what_is_drawn_now() -> None:
    script = runpy.run_path(str(ROOT / "docs/assets/page_map.py"))
    assert (ROOT / "docs/assets/page_map.svg").read_text() == script["picture"]()
