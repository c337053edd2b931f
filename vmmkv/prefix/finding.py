"""Looking up: which frames, and which row, have the first tokens of given ids; and the plan that begins with them."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.access import cache_of, extent_at, pool_of, row_at
from ..core.booking import settle
from ..core.codes import DONE, GONE, RING
from ..core.pages import row_of
from ..core.sharing import next_list, plan_share
from ..core.streams import order_row, unfinished
from ..core.tables import ROW_BITS
from .holders import cut_row, hold_row, read_notes, set_end, tokens_of
from .nodes import node_with, page_of, split, use_path, walk
from .tables import (
    ADOPT, FOUND, NOTHING, SHARE, TOKEN_BITS, held_frame, holders_of, nodes_of, parts_of, shapes_of, slots_of, tree_of,
)  # fmt: skip


@inner
def lowest(tree: int, node: int, tokens: int) -> int:
    """The node below one where the last large frame ends that so many tokens lie on, or as low as there are nodes."""
    t, nodes, end = tree_of(tree), nodes_of(tree), tokens
    frame = t.large * t.page_size
    for part in range(t.ranges):
        record = parts_of(tree)[part].record
        frames = (tokens * record + frame - 1) // frame
        end = max(end, (frames * frame + record - 1) // record)
    while nodes[node].end < end and nodes[node].child:
        head = child = nodes[node].child
        while nodes[child].known == 0 and nodes[child].next != head:
            child = nodes[child].next
        node = child if nodes[child].known else head
    return node


@inner
def gather(tree: int, node: int) -> None:
    """Writes down by page, and by group of pages, what is held for a path."""
    t, nodes, parts = tree_of(tree), nodes_of(tree), parts_of(tree)
    for part in range(t.ranges):
        p = parts[part]
        p.covered = nodes[node].end * p.record // t.page_size
        pages, groups = view(p.pages_at, p.covered, np.int64), view(p.groups_at, p.covered // t.large, np.int64)
        for page in range(p.covered):
            pages[page] = 0
        for group in range(p.covered // t.large):
            groups[group] = 0
    while nodes[node].parent:
        slots = slots_of(tree, node)
        for index in range(t.width if nodes[node].full else 0):
            if slots[index]:
                s, page = shapes_of(tree)[index], page_of(tree, node, index)
                room_at = parts[s.part].pages_at if s.size == 1 else parts[s.part].groups_at
                view(room_at, page // s.size + 1, np.int64)[page // s.size] = slots[index]
        node = nodes[node].parent


@inner
def slot_at(tree: int, part: int, page: int, size: int) -> int:
    """What a gathered path has for a page: a slot of a frame of `size` pages that begins there, or 0."""
    p = parts_of(tree)[part]
    if page % size or page + size > p.covered:
        return 0
    return view(p.pages_at if size == 1 else p.groups_at, page // size + 1, np.int64)[page // size]


@inner
def list_frames(tree: int, part: int, tokens: int, over: int, out: int) -> int:
    """Lists frames of a gathered path for the first tokens in a range: their number, then the frames. With `over` the
    last one may reach behind them. Returns the number of pages."""
    t, bytes_of = tree_of(tree), tokens * parts_of(tree)[part].record
    full, end = bytes_of // t.page_size, (bytes_of + t.page_size - 1) // t.page_size
    wanted, page, count, size = end if over else full, 0, 0, t.large
    numbers = view(out, wanted + 2, np.int64)
    while page < wanted:
        slot = slot_at(tree, part, page, size)
        if slot and page + size > full and size > 1:  # only where single frames do not do
            behind = page
            while behind < wanted and slot_at(tree, part, behind, 1):
                behind += 1
            slot = slot if over and behind < wanted else 0
        if slot == 0:
            size, slot = 1, slot_at(tree, part, page, 1)
        if slot == 0:
            break
        count += 1
        numbers[count] = slot - 1
        page += size
    numbers[0] = count
    return page


@inner
def list_all(tree: int, tokens: int, over: int) -> int:
    """Lists frames of a gathered path for the first tokens in all ranges; `listed` is their number. Returns how many of
    the tokens they hold."""
    t, found = tree_of(tree), tokens
    cursor, t.listed = t.list_at, 0
    for part in range(t.ranges):
        pages = list_frames(tree, part, tokens, over, cursor)
        found = min(found, pages * t.page_size // parts_of(tree)[part].record)
        t.listed += view(cursor, 1, np.int64)[0]
        cursor = next_list(cursor)
    return found


@inner
def may_adopt(tree: int, row: int, tokens: int) -> int:
    """Whether a sequence of so many of a parked row's tokens could grow there without copies."""
    for part in range(tree_of(tree).ranges):
        record = parts_of(tree)[part].record
        if extent_at(tree_of(tree).cache, row, part).shared > tokens * record // tree_of(tree).page_size:
            return 0
    return 1


@inner
def is_below_large(tree: int, tokens: int) -> int:
    """Whether so many tokens fill no large frame in any range, or the cache has none."""
    t, below = tree_of(tree), 1
    for part in range(t.ranges if cache_of(t.cache).large else 0):
        below &= tokens * parts_of(tree)[part].record < t.large * t.page_size
    return below


@inner
def find(tree: int, key: int, ids_at: int, count: int, over: int, found: int) -> int:
    """Finds most of the first tokens: in frames, which it lists, and in a row where that has more. Writes what was
    found. Returns the node with the last token."""
    f, nodes, holders = view(found, 1, FOUND)[0], nodes_of(tree), holders_of(tree)
    f.action, f.tokens, f.row, f.last = NOTHING, 0, -1, 0
    while True:
        packed = walk(tree, key, ids_at, count)
        node, tokens, row, there = packed >> TOKEN_BITS, packed & (1 << TOKEN_BITS) - 1, -1, 0
        while nodes[node].parent and nodes[node].known == 0 and nodes[node].rows == 0:  # it lies on the host alone
            node, tokens = nodes[node].parent, nodes[node].begin
        if tokens == 0:
            return 0
        at = node
        while nodes[at].rows == 0 and nodes[at].parent:
            at = nodes[at].parent
        if nodes[at].rows == 0 or nodes[at].end == 0:
            break
        lower = at
        while nodes[lower].holder == 0:  # it has rows, or a node below it has
            lower = nodes[lower].child
        row = nodes[lower].holder - 1
        there = tokens_of(tree, row)
        if there >= nodes[holders[row].node].end:
            there = min(tokens, nodes[at].end)
            break
        cut_row(tree, row, there)
    if there < tokens:
        gather(tree, lowest(tree, node, tokens) if over else node)
        held = list_all(tree, tokens, over)
        while held < tokens:  # fewer tokens may be held by other frames
            tokens, held = held, list_all(tree, held, over)
        row = -1 if tokens >= there else row
    if row >= 0:
        node, tokens = at, there
        lost = nodes[holders[row].node].end - tokens  # tokens of the row that others could have found
        if holders[row].parked and lost:
            gather(tree, node)
            list_all(tree, tokens, 0)
        if holders[row].parked and lost <= tree_of(tree).listed and may_adopt(tree, row, tokens):
            f.action = ADOPT
    if tokens == 0:
        return 0
    f.action, f.tokens, f.row, f.last = max(f.action, SHARE), tokens, row, holders[row].owner if row >= 0 else 0
    node = node_with(tree, node, tokens)
    use_path(tree, node)
    return node


@inner
def list_found(tree: int, node: int, over: int, found: int) -> int:
    """Lists the frames of what was found, up to a node. Returns whether they have all of that, and nothing behind."""
    f = view(found, 1, FOUND)[0]
    if f.row >= 0:
        gather(tree, node)
    is_all = 1 if list_all(tree, f.tokens, 0) == f.tokens else 0
    if is_all and not is_below_large(tree, f.tokens):  # few tokens may be copied: see `plan_hit`
        f.row = -1
    if f.row < 0 and not is_all:
        list_all(tree, f.tokens, over)
    return is_all


@entry
def look_up(tree: int, key: int, ids_at: int, count: int, found: int) -> int:
    """Finds what a sequence of these ids can begin with, and writes it to `found`. Returns `NOTHING`, `SHARE` or
    `ADOPT`."""
    read_notes(tree)
    find(tree, key, ids_at, count, 1, found)
    return view(found, 1, FOUND)[0].action


@entry
def shared_pages(tree: int, key: int, ids_at: int, count: int, found: int) -> int:
    """The pages that a sequence of these ids would share with live ones: of frames that hold its first tokens alone."""
    shared, cursor = 0, tree_of(tree).list_at
    read_notes(tree)
    list_found(tree, find(tree, key, ids_at, count, 1, found), 1, found)
    for part in range(tree_of(tree).ranges):
        full, page = view(found, 1, FOUND)[0].tokens * parts_of(tree)[part].record // tree_of(tree).page_size, 0
        numbers = view(cursor, full + 2, np.int64)
        for index in range(numbers[0]):
            frame = held_frame(tree, numbers[index + 1] + 1)
            page += frame.pages
            if page <= full and frame.users:
                shared += frame.pages
        cursor = next_list(cursor)
    return shared


@entry
def plan_hit(
    tree: int, ticket: int, key: int, ids_at: int, count: int, length: int, expected: int, over: int, found: int,
    ask: int,
) -> int:  # fmt: skip
    """Plans that a new sequence without tokens begins with what is there of these ids, and has room for `length` tokens
    then; but where its last frame reaches behind these tokens (`over` allows that), for no more than them. Writes what
    was found to `found`. Returns a serial, `DONE` where there is nothing, or what `plan_share` returns."""
    t, f = tree_of(tree), view(found, 1, FOUND)[0]
    settle(cache_of(t.cache).pool, ask)
    read_notes(tree)
    row = row_of(t.cache, ticket)
    if row < 0:
        return GONE
    set_end(tree, row, 0)
    row_at(t.cache, row).expected = expected
    node = find(tree, key, ids_at, count, over, found)
    if node == 0:
        return DONE
    f.action = SHARE
    t.slots = unfinished(pool_of(cache_of(t.cache).pool).driver, t.slots, t.tick, ask)
    code = order_row(t.cache, row, 0, t.slots, t.tick, ask) if t.slots else DONE
    if code != DONE:
        return code
    whole = max(length, f.tokens) if list_found(tree, node, over, found) or f.row >= 0 else f.tokens
    given = f.last << ROW_BITS | f.row if f.row >= 0 else -1
    if over and f.row >= 0 and is_below_large(tree, f.tokens) and not is_below_large(tree, max(expected, whole)):
        for part in range(t.ranges):  # a copy: behind shared single pages there could be no large frames
            view(t.list_at, t.ranges, np.int64)[part] = 0
    code = plan_share(t.cache, ticket, given, f.tokens, whole, t.list_at, ask)
    if code > RING:
        hold_row(tree, row, ticket >> ROW_BITS, split(tree, node, f.tokens))
    return code
