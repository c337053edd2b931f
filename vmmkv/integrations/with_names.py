"""`with_names`: a function of transformers for which global names mean something else, and for nobody beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from ..errors import UnsupportedError


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A function for which global names mean something else.

    Raises:
        UnsupportedError: it does not use them.
    """
    code = function.__code__
    if unused := names.keys() - _names_in(code):
        raise UnsupportedError(f"transformers' {code.co_name} does not use {', '.join(unused)} any more")
    known = function.__globals__ | names
    defaults, closure = function.__defaults__, function.__closure__
    # Code of its own: what a compiler makes of it is kept with the code, and names functions among these globals.
    made = FunctionType(code.replace(), known, code.co_name, defaults, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _names_in(code: CodeType) -> set[str]:
    """Names that a function looks up, comprehensions in it included: not all Pythons have these in its own code."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))
