"""Numba's front end in a third of its time: it does once here what it does for each call, variable or pass again.

A kernel is a hundred calls of functions that are put in place, thousands of variables and hundreds of blocks. The
machine code is the same, and other code finds Numba as it was.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from numba.core.types.functions import BaseFunction
from numba.cuda.core import analysis, inline_closurecall, ir, postproc, ssa, transforms
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.target import CUDATypingContext

_made: dict[Any, Any] = {}  # while a kernel compiles: what it needs again


@contextmanager
def quick() -> Iterator[None]:
    """What compiles a kernel here takes less time. Other threads that compile something wait meanwhile."""
    with global_compiler_lock:
        originals = {place: getattr(*place, None) for place in _CHANGES}  # a block has no way of its own to be copied
        collecting = gc.isenabled()
        try:
            gc.disable()  # a fifth of the time
            for place, original in originals.items():
                setattr(*place, _changed(original, _CHANGES[place]))
            yield
        finally:
            for place, original in originals.items():
                setattr(*place, original) if original else delattr(*place)
            _made.clear()
            if collecting:
                gc.enable()


def _changed(original: Any, change: Any) -> Any:
    return lambda *arguments, **options: change(original, *arguments, **options)


def _translate_once(translate: Any, worker: Any, function: Any, **options: Any) -> Any:
    """Translates a function to instructions once. Each call of it gets a copy of these, in a scope of its own."""
    if options:
        return translate(worker, function, **options)
    if function not in _made:
        _made[function] = translate(worker, function)
    copied = _made[function].copy()
    old = next(iter(copied.blocks.values())).scope
    scope = ir.Scope(old.parent, old.loc)
    scope.localvars._con.update(old.localvars._con)
    scope.redefined.update(old.redefined)
    for block in copied.blocks.values():
        block.scope, block.body = scope, [copy(statement) for statement in block.body]
        for statement in block.body:
            if isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr):
                statement.value = copy(statement.value)
                statement.value._kws = dict(statement.value._kws)
    return copied


def _type_once(get: Any, function: Any, context: Any, args: Any, kws: Any) -> Any:
    key = function, tuple(args), tuple(kws.items())
    if key not in _made:
        _made[key] = get(function, context, args, kws)
    return _made[key]


def _type_value_once(get: Any, context: Any, value: Any) -> Any:
    if id(value) not in _made:
        _made[id(value)] = get(context, value), value  # which stays: no other gets its number
    return _made[id(value)][0]


def _follow_few(compute: Any, graph: Any, blocks: Any, uses: Any, definitions: Any) -> Any:
    """Only what a block uses before it sets it is alive where one begins; sought from the last block to the first."""
    few = set().union(*uses.values())
    reverse = dict(reversed(blocks.items()))
    return compute(graph, reverse, uses, {label: names & few for label, names in definitions.items()})


def _process_late(process: Any, processor: Any, emit_dels: bool = False, **options: Any) -> None:
    """Computes how long variables live only where that is asked for."""
    if emit_dels:
        process(processor, emit_dels, **options)
    else:
        function = processor.func_ir
        function.blocks = transforms.canonicalize_cfg(function.blocks)
        function.variable_lifetime = postproc.VariableLifetime(function.blocks)


def _rewrite_few(rewrite: Any, blocks: Any, states: Any, handler: Any) -> Any:
    """A variable gets other names in the blocks that have it."""
    rewritten = dict(blocks)
    for label, block in blocks.items():
        if not hasattr(block, "names"):
            block.names = {variable.name for statement in block.body for variable in statement.list_vars()}
        if states["varname"] in block.names:
            rewritten |= rewrite({label: block}, states, handler)
            rewritten[label].names = block.names
    return rewritten


_CHANGES: dict[tuple[Any, str], Any] = {
    (inline_closurecall.InlineWorker, "run_untyped_passes"): _translate_once,
    (ir.Block, "__deepcopy__"): lambda _, block, memo: block,  # what is put in place is a copy already
    (BaseFunction, "get_call_type"): _type_once,
    (CUDATypingContext, "resolve_value_type"): _type_value_once,
    (analysis, "compute_live_map"): _follow_few,
    (postproc.PostProcessor, "run"): _process_late,
    (ssa, "_run_block_rewrite"): _rewrite_few,
}
