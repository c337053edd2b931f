"""Looking up: which frames, and which row, have the first tokens of given ids; and the plan that begins with them."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..core.booking import settle
from ..core.rows import row_of
from ..core.sharing import plan_share
from ..core.streams import hold_slot, order_slots, pending_slots
from ..core.tables import (
    CACHE,
    CAPTURED,
    DONE,
    EXTENT,
    FAILED,
    FRAME,
    GONE,
    LISTS,
    POOL,
    RING,
    ROW,
    ROW_BITS,
)
from ..driver.running import captured, enter, leave
from .holders import cut_row, hold_row, holder_below, read_notes, set_end, tokens_of
from .nodes import node_with, split, use_path, walk
from .tables import ADOPT, FOUND, HOLDER, NODE, NOTHING, PART, SHARE, TOKEN_BITS, TREE


@inner
def lowest(tree: int, node: int, tokens: int) -> int:
    """The node below one where the last large frame ends that so many tokens lie on, or as low as there are nodes."""
    t = view(tree, 1, TREE)[0]
    nodes, end = view(t.nodes_at, t.nodes, NODE), tokens
    for part in range(t.ranges):
        p = view(t.parts_at, t.ranges, PART)[part]
        frame = t.large * t.page_size
        frames = (tokens * p.record + frame - 1) // frame
        end = max(end, (frames * frame + p.record - 1) // p.record)
    while nodes[node].end < end and nodes[node].child:
        head = child = nodes[node].child
        while nodes[child].known == 0 and nodes[child].next != head:
            child = nodes[child].next
        node = child if nodes[child].known else head
    return node


@inner
def gather(tree: int, node: int) -> None:
    """Writes down by page what is held for a path."""
    t = view(tree, 1, TREE)[0]
    nodes, parts = view(t.nodes_at, t.nodes, NODE), view(t.parts_at, t.ranges, PART)
    for part in range(t.ranges):
        parts[part].covered = nodes[node].end * parts[part].record // t.page_size
    while nodes[node].parent:
        n = nodes[node]
        slots = view(t.slots_at + 8 * node * t.width, t.width, np.int64)
        for part in range(t.ranges):
            p = parts[part]
            first, end = n.begin * p.record // t.page_size, n.end * p.record // t.page_size
            if first == end:
                continue
            pages, groups = view(p.pages_at, end, np.int64), view(p.groups_at, end // t.large, np.int64)
            for page in range(first, end):
                pages[page] = slots[p.single + page - first]
                if page % t.large == t.large - 1:
                    group = page // t.large
                    groups[group] = slots[p.large + group - first // t.large]
        node = n.parent


@inner
def list_frames(tree: int, part: int, tokens: int, over: int, out: int) -> int:
    """Lists frames of a gathered path for the first tokens in a range: their number, then the frames. With `over` the
    last one may reach behind them. Returns the number of pages."""
    t = view(tree, 1, TREE)[0]
    p = view(t.parts_at, t.ranges, PART)[part]
    full, end = tokens * p.record // t.page_size, (tokens * p.record + t.page_size - 1) // t.page_size
    wanted, page, count, singles = end if over else full, 0, 0, 0
    pages, groups = view(p.pages_at, p.covered, np.int64), view(p.groups_at, p.covered // t.large, np.int64)
    numbers = view(out, wanted + 2, np.int64)
    while page < wanted:
        group = page // t.large
        can_be_large = singles == 0 and page % t.large == 0 and page + t.large <= p.covered and groups[group] > 0
        if can_be_large and page + t.large > full:  # only where single frames do not do
            behind = page
            while behind < min(wanted, p.covered) and pages[behind]:
                behind += 1
            can_be_large = over > 0 and behind < wanted
        if can_be_large:
            numbers[count + 1] = groups[group] - 1
            page += t.large
        elif page < p.covered and pages[page]:
            numbers[count + 1] = pages[page] - 1
            page += 1
            singles = 1
        else:
            break
        count += 1
    numbers[0] = count
    return page


@inner
def list_all(tree: int, tokens: int, over: int) -> int:
    """Lists frames of a gathered path for the first tokens in all ranges. Returns how many of the tokens they hold."""
    t = view(tree, 1, TREE)[0]
    cursor, found = t.list_at, tokens
    for part in range(t.ranges):
        record = view(t.parts_at, t.ranges, PART)[part].record
        pages = list_frames(tree, part, tokens, over, cursor)
        found = min(found, pages * t.page_size // record)
        cursor += 8 * (1 + view(cursor, 1, np.int64)[0])
    return found


@inner
def held_tokens(tree: int, node: int, tokens: int, over: int) -> int:
    """How many tokens of a path the frames hold that are held for it; lists these frames."""
    gather(tree, lowest(tree, node, tokens) if over else node)
    found = list_all(tree, tokens, over)
    while found < tokens:
        tokens = found
        found = list_all(tree, tokens, over)
    return tokens


@inner
def may_adopt(tree: int, row: int, tokens: int) -> int:
    """Whether a sequence of so many of a parked row's tokens could grow there without copies."""
    t = view(tree, 1, TREE)[0]
    c = view(t.cache, 1, CACHE)[0]
    for part in range(t.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        if e.shared > tokens * view(t.parts_at, t.ranges, PART)[part].record // t.page_size:
            return 0
    return 1


@inner
def find(tree: int, key: int, ids_at: int, count: int, wide: int, over: int, found: int) -> int:
    """Finds most of the first tokens: in frames, and in a row where that has more. Lists the frames, and writes what
    was found. Returns the node with the last token."""
    t, f = view(tree, 1, TREE)[0], view(found, 1, FOUND)[0]
    nodes, holders = view(t.nodes_at, t.nodes, NODE), view(t.holders_at, t.num_rows, HOLDER)
    f.action, f.tokens, f.row, f.last, f.frames = NOTHING, 0, -1, 0, 0
    while True:
        packed = walk(tree, key, ids_at, wide, count)
        node, tokens, row = packed >> TOKEN_BITS, packed & (1 << TOKEN_BITS) - 1, -1
        while nodes[node].parent and nodes[node].known == 0 and nodes[node].rows == 0:  # it lies on the host alone
            node, tokens = nodes[node].parent, nodes[node].begin
        if tokens == 0:
            return 0
        at = node
        while nodes[at].rows == 0 and nodes[at].parent:
            at = nodes[at].parent
        if nodes[at].rows == 0 or nodes[at].end == 0:
            break
        row = holder_below(tree, at)
        there = tokens_of(tree, row)
        if there >= nodes[holders[row].node].end:
            break
        cut_row(tree, row, there)
    tokens_there = min(tokens, nodes[at].end) if row >= 0 else 0
    if tokens_there < tokens:
        tokens = held_tokens(tree, node, tokens, over)
        row = -1 if tokens >= tokens_there else row
    if row >= 0:
        node, tokens = at, tokens_there
        gather(tree, node)
        others = nodes[holders[row].node].end - tokens
        is_all = list_all(tree, tokens, 0) == tokens
        frames = count_frames(tree)
        f.row, f.last = row, holders[row].owner
        if holders[row].parked and others <= frames and may_adopt(tree, row, tokens):
            f.action = ADOPT
        elif is_all:
            row = -1
    if tokens == 0:
        return 0
    f.action, f.tokens, f.frames = max(f.action, SHARE), tokens, count_frames(tree)
    if f.action == SHARE:
        f.row, f.last = row, holders[row].owner if row >= 0 else 0
    node = node_with(tree, node, tokens)
    use_path(tree, node)
    return node


@inner
def count_frames(tree: int) -> int:
    """The number of frames that are listed."""
    t = view(tree, 1, TREE)[0]
    cursor, total = t.list_at, 0
    for _ in range(t.ranges):
        total += view(cursor, 1, np.int64)[0]
        cursor += 8 * (1 + view(cursor, 1, np.int64)[0])
    return total


@entry
def look_up(tree: int, key: int, ids_at: int, count: int, wide: int, found: int) -> int:
    """Finds what a sequence of these ids can begin with, and writes it to `found`. Returns `NOTHING`, `SHARE` or
    `ADOPT`. `wide` says that ids have 64 bits, and not 32."""
    read_notes(tree)
    find(tree, key, ids_at, count, wide, 1, found)
    return view(found, 1, FOUND)[0].action


@entry
def shared_pages(tree: int, key: int, ids_at: int, count: int, wide: int, found: int) -> int:
    """The pages that a sequence of these ids would share with live ones: of frames that hold its first tokens alone."""
    t, f = view(tree, 1, TREE)[0], view(found, 1, FOUND)[0]
    p, shared = view(view(t.cache, 1, CACHE)[0].pool, 1, POOL)[0], 0
    read_notes(tree)
    if find(tree, key, ids_at, count, wide, 1, found) == 0:
        return 0
    cursor = t.list_at
    for part in range(t.ranges):
        full, page = f.tokens * view(t.parts_at, t.ranges, PART)[part].record // t.page_size, 0
        numbers = view(cursor, full + 2, np.int64)
        for index in range(numbers[0]):
            frame = view(p.frames_at, p.capacity, FRAME)[numbers[index + 1]]
            page += frame.pages
            if page <= full and frame.users:
                shared += frame.pages
        cursor += 8 * (1 + numbers[0])
    return shared


@inner
def follow_writes(tree: int, row: int, ask: int) -> int:
    """Makes a row's stream wait for the work that has written what is held. Returns `DONE`, `CAPTURED` or `FAILED`."""
    t = view(tree, 1, TREE)[0]
    c = view(t.cache, 1, CACHE)[0]
    driver, code = view(c.pool, 1, POOL)[0].driver, DONE
    stream = view(c.rows_at, c.num_rows + LISTS, ROW)[row].stream
    if t.slots == 0 or stream == 0:
        return DONE
    if enter(driver, ask):
        return FAILED
    t.slots = pending_slots(driver, t.slots, t.tick)
    if t.slots:
        slot = hold_slot(driver, stream, 0, ask)
        if slot < 0:
            code = slot
        elif captured(driver, stream, ask):
            code = CAPTURED
        elif order_slots(driver, t.slots, t.tick, slot):
            code = FAILED
    leave(driver, ask)
    return code


@entry
def plan_hit(
    tree: int, ticket: int, key: int, ids_at: int, count: int, wide: int, length: int, expected: int, over: int,
    found: int, ask: int,
) -> int:  # fmt: skip
    """Plans that a new sequence without tokens begins with what is there of these ids, and has room for `length` tokens
    then; but where its last frame reaches behind these tokens (`over` allows that), for no more than them. Writes what
    was found to `found`. Returns a serial, `DONE` where there is nothing, or what `plan_share` returns."""
    t, f = view(tree, 1, TREE)[0], view(found, 1, FOUND)[0]
    pool = view(t.cache, 1, CACHE)[0].pool
    settle(pool, ask)
    read_notes(tree)
    row = row_of(t.cache, ticket)
    if row < 0:
        return GONE
    set_end(tree, row, 0)
    view(view(t.cache, 1, CACHE)[0].rows_at, row + 1, ROW)[row].expected = expected
    node = find(tree, key, ids_at, count, wide, over, found)
    if node == 0:
        return DONE
    f.action = SHARE
    code = follow_writes(tree, row, ask)
    if code != DONE:
        return code
    given = f.last << ROW_BITS | f.row if f.row >= 0 else -1
    whole = f.tokens
    if f.row >= 0 or list_all(tree, f.tokens, 0) == f.tokens:
        whole = max(length, f.tokens)
    else:
        list_all(tree, f.tokens, over)
    code = plan_share(t.cache, ticket, given, f.tokens, whole, t.list_at, ask)
    if code > RING:
        hold_row(tree, row, ticket >> ROW_BITS, split(tree, node, f.tokens))
    return code
