"""What caches, sequences and pools show of themselves in Jupyter: every page once, with its owner, whatever happens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from math import ceil, floor
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from conftest import ROOT, on_driver, run_python, small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.core import entries
from vmmkv.core.mapper import FRAMES
from vmmkv.core.pool import Ask
from vmmkv.picture import MAX_NAMED, MAX_PAGES, MAX_ROWS
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


class Page(NamedTuple):
    """What is to be drawn of a mapped page: its frame, its entry in the page map, who shares it, and whose it is drawn
    as, or else that entry."""

    frame: int
    entry: int
    sharers: list[int]
    owner: int


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


def pages_by_row(cache: vmmkv.KVCache, live: dict[vmmkv.Sequence, int], lookahead: int) -> dict[int, list[Page]]:
    """What there is to be drawn of each row, in the order of addresses, by what the driver was told."""
    sequences = {sequence.row: sequence for sequence in live}
    mapped: dict[int, list[int]] = {}
    users: dict[int, set[int]] = {}
    ahead: set[int] = set()
    for run in cache.mapped_ranges():
        arenas = [cache.range(index) for index in range(len(cache.layout.record_bytes))]
        index, arena = next(
            (index, arena) for index, arena in enumerate(arenas) if 0 <= run.address - arena.data_ptr() < arena.nbytes
        )
        row = arena.data_ptr() + run.row * (arena.nbytes // cache.max_sequences)
        addresses = range(run.address, run.address + run.nbytes, cache.page_size)
        frames = [cache.pool.driver.mapped[address] for address in addresses]
        mapped.setdefault(run.row, []).extend(frames)
        if (sequence := sequences.get(run.row)) is not None:
            record, length = cache.layout.record_bytes[index], sequence.length
            wanted = min(max(length + lookahead, live[sequence]), cache.max_seq_len) if length or live[sequence] else 0
            begin = row + sequence.start * record // cache.page_size * cache.page_size
            for frame, address in zip(frames, addresses):
                if begin <= address < row + length * record:
                    users.setdefault(frame, set()).add(sequence.number)
                if begin <= address < row + wanted * record:
                    ahead.add(frame)

    def page(frame: int, row: int) -> Page:
        numbers = sorted(users.get(frame, ()))
        entry = vmmkv.LOOKAHEAD_PAGE if frame in ahead else vmmkv.SURPLUS_PAGE
        if numbers:
            entry = numbers[0] if len(numbers) == 1 else vmmkv.SHARED_PAGE
        own = sequences[row].number if row in sequences else None
        return Page(frame, entry, numbers if len(numbers) > 1 else [], own if own in numbers else entry)

    return {row: [page(frame, row) for frame in frames] for row, frames in mapped.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers_per_range": 1},
        LARGE_FRAMES,
    ],
    ids=str,
)
def test_every_page_is_drawn_once_with_its_owner(
    make_cache: Callable[..., vmmkv.KVCache], device: str, options: dict[str, object]
) -> None:
    cache = make_observed(make_cache, device, **options)
    sizes = cache.pool.driver.sizes
    live: dict[vmmkv.Sequence, int] = {}
    for _ in range(60):
        change(cache, live)
        owners = cache.page_map()
        picture = cache._repr_html_()
        assert drawn_pages(picture, "physical") == list(enumerate(owners.tolist()))
        mapped = pages_by_row(cache, live, options.get("lookahead", 0))
        lines = list(squares(picture, "row"))
        order = sorted(mapped, key=lambda row: row not in {sequence.row for sequence in live})
        drawn = [line for line in lines if line]
        assert [[each.owner for each in line] for line in drawn] == [
            [each.owner for each in mapped[row]] for row in order
        ]
        for line, row in zip(drawn, order):
            followers = [*mapped[row][1:], None]
            for each, page, follower in zip(line, mapped[row], followers):
                assert owners[each.page] == page.entry
                assert each.sharers == page.sharers
                assert (each.frame is not None) == (sizes[page.frame] > 1)
                assert each.is_joined == (follower is not None and follower.frame == page.frame)
                assert each.frame is None or each.frame[0] <= each.page <= each.frame[1]
        for sequence in live:
            own = [each for line in squares(sequence._repr_html_(), "row") for each in line]
            expected = mapped.get(sequence.row, [])
            assert [(each.owner, each.sharers) for each in own] == [(page.owner, page.sharers) for page in expected]
            assert [owners[each.page] for each in own] == [page.entry for page in expected]


def test_large_frames_and_what_is_mapped_ahead_are_drawn_so(
    make_cache: Callable[..., vmmkv.KVCache], device: str
) -> None:
    cache = make_observed(make_cache, device, **LARGE_FRAMES)
    begun = random.randint(1, 40)  # on one large frame
    sequence = cache.sequence(begun, expected_tokens=200)
    map_ahead(cache)
    (line,) = squares(cache._repr_html_(), "row")
    assert [each.owner for each in line] == [sequence.number] * 16 + [vmmkv.LOOKAHEAD_PAGE] * (len(line) - 16)
    assert sum(each.is_joined for each in line) == len(line) // 16 * 15
    for what in ("2 large frames", f"{len(line) - 16} lookahead"):
        assert what in cache._repr_html_()


def test_what_forks_share_is_drawn_so(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    count = random.randint(MAX_NAMED + 1, 2 * MAX_NAMED)
    cache = make_cache(max_sequences=1 + count, pages=200)
    parent = cache.sequence(random.randint(12, 90))
    full, all_pages = (pages(parent.length * cache.layout.token_bytes / cache.page_size) for pages in (floor, ceil))
    family = [parent, *cache.fork_many(parent, count)]
    for line, sequence in zip(squares(cache._repr_html_(), "row"), family):
        assert [each.owner for each in line] == [sequence.number] * all_pages
        assert [each.sharers for each in line] == [
            [each.number for each in family[:MAX_NAMED]] if index < full else [] for index in range(all_pages)
        ]
    (physical,) = squares(cache._repr_html_(), "physical")
    assert sum(each.owner == vmmkv.SHARED_PAGE for each in physical) == full
    for picture in (cache._repr_html_(), family[-1]._repr_html_()):
        assert picture.count(f" and {count + 1 - MAX_NAMED} more<") >= full
        assert f">{full} shared by several sequences" in picture
    cache.free(family[1:])
    assert "shared by" not in cache._repr_html_()


def test_what_is_kept_is_drawn_so_on_its_row_and_on_none(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache(max_sequences=2, large_frames=False)
    tokens = random.randint(12, 60)
    with cache.sequence(token_ids=range(tokens)) as chat:
        all_pages = cache.stats().pages["used"]
        chat.commit(range(tokens))
        assert vmmkv.KEPT_PAGE not in cache.page_map()
    kept = cache.stats().prefix_pages
    assert 0 < kept <= all_pages
    picture = cache._repr_html_()
    (line,) = squares(picture, "row")
    assert [each.owner for each in line] == [vmmkv.KEPT_PAGE] * kept + [vmmkv.SURPLUS_PAGE] * (all_pages - kept)
    assert ">0: retired<" in picture
    others = [cache.sequence(1), cache.sequence(1)]  # which take all rows
    assert (cache.page_map() == vmmkv.KEPT_PAGE).sum() == kept
    (physical,) = squares(cache._repr_html_(), "physical")
    assert sum(each.owner == vmmkv.KEPT_PAGE for each in physical) == kept
    cache.free(others)
    cache.trim()
    assert vmmkv.KEPT_PAGE not in cache.page_map()


def test_what_is_filled_is_tokens(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache()
    sequence = cache.sequence(random.randint(1, 90))
    sequence.release_before(random.randint(0, sequence.length - 1))
    picture = sequence._repr_html_()
    filled = sum(each.part for line in squares(picture, "row") for each in line)
    tokens = sequence.length - sequence.start
    assert filled * cache.page_size == pytest.approx(tokens * cache.layout.token_bytes, rel=0.02)
    for facts in (f"{tokens} token", f"waste {cache.stats().waste:.1%}", f"room for {sequence.capacity} tokens"):
        assert facts in picture


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
    kept, freed = cache.sequence(10), cache.sequence(10)
    freed.free()
    assert "gone" in freed._repr_html_()
    cache.close()
    assert "gone" in kept._repr_html_()
    assert "gone" in cache._repr_html_()
    assert "&lt;vmmkv.KVCache" in cache._repr_html_()


def test_an_empty_cache_has_a_picture(make_cache: Callable[..., vmmkv.KVCache]) -> None:
    cache = make_cache()
    assert not drawn_pages(cache._repr_html_(), "physical")
    assert "0 tokens" in cache.sequence()._repr_html_()


def test_colours_tell_sequences_apart() -> None:
    """Any twelve that are started one after the other: by more than an eighth of red, green or blue."""

    def channels(number: int) -> list[int]:
        return list(bytes.fromhex(colour(number)[1:]))

    for number in range(1000):
        for other in range(number + 1, number + 12):
            assert max(abs(a - b) for a, b in zip(channels(number), channels(other))) > 32


def test_the_picture_in_the_readme_is_what_is_drawn_now() -> None:
    code = "import runpy, sys; print(end=runpy.run_path(sys.argv[1])['picture']())"
    drawn = run_python(code, str(ROOT / "docs/assets/page_map.py")).stdout  # where sequences count from 0
    assert (ROOT / "docs/assets/page_map.svg").read_text() == drawn
