"""`with_names`: a function of transformers in which global names mean something else; the original stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from ..errors import UnsupportedError


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function in which global names mean something else. Raises `UnsupportedError` if the function does
    not use them."""
    code = function.__code__
    if unused := names.keys() - _names_in(code):
        raise UnsupportedError(f"transformers' {code.co_name} does not use {', '.join(unused)} any more")
    # Code of its own: compilers keep their programs with the code, and these refer to its globals.
    known, defaults = function.__globals__ | names, function.__defaults__
    made = FunctionType(code.replace(), known, code.co_name, defaults, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _names_in(code: CodeType) -> set[str]:
    """Names that a function looks up, in comprehensions too: some Pythons keep these as code of their own."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))
