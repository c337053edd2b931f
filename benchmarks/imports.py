"""What code a module of the project runs: the modules that it imports, and these import, read without running any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

FOLDERS = {"vmmkv.kernels": "kernels", "vmmkv": "vmmkv", "benchmarks": "benchmarks"}
"""Where packages of the project lie."""


class Project:
    """The modules of a project, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trees: dict[str, ast.Module] = {}
        self.needed: dict[str, set[str]] = {}
        self.imported: dict[str, list[tuple[str, str | None]]] = {}

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Of all modules, `__init__.py` for a package."""
        found = {}
        for package, folder in FOLDERS.items():
            for path in (self.root / folder).rglob("*.py"):
                parts = path.relative_to(self.root / folder).with_suffix("").parts
                found[".".join([package, *(part for part in parts if part != "__init__")])] = path
        return found

    def closure(self, module: str) -> set[str]:
        """This module, if it is one of the project's, and all that it needs of the project.

        A name that a package only passes on is where it comes from: the package's other imports are not needed for it.
        """
        found: set[str] = set()
        open_ends = [module] if module in self.paths else []
        while open_ends:
            module = open_ends.pop()
            if module not in found:
                found.add(module)
                open_ends += self.needs(module)
        return found

    def needs(self, module: str) -> set[str]:
        """The modules of the project that a module imports from."""
        if module not in self.needed:
            self.needed[module] = set(filter(None, (self.origin(*each) for each in self.imports(module))))
        return self.needed[module]

    def origin(self, module: str, name: str | None) -> str | None:
        """The module in which something that is imported is defined; None: it is not the project's, or a constant."""
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}"
        if module not in self.paths:
            return None
        if name and self.paths[module].name == "__init__.py":
            for source, bound in self.imports(module):
                if bound == name:
                    return self.origin(source, name)
            if name in constants(self.tree(module)):
                return None
        return module

    def imports(self, module: str) -> list[tuple[str, str | None]]:
        """The modules that a module imports, each with a name that it takes from it, or None."""
        if module not in self.imported:
            self.imported[module] = list(self._imports(module))
        return self.imported[module]

    def _imports(self, module: str) -> Iterator[tuple[str, str | None]]:
        parts = module.split(".")
        package = parts if self.paths[module].name == "__init__.py" else parts[:-1]
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((source, alias.name) for alias in node.names)

    def tree(self, module: str) -> ast.Module:
        if module not in self.trees:
            self.trees[module] = ast.parse(self.paths[module].read_text())
        return self.trees[module]


def constants(tree: ast.Module) -> set[str]:
    """What a module sets to a number or a string, as its version."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


@cache
def code(source: str) -> str:
    """What a module does: two that differ in comments, docstrings and layout alone are the same."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [each for each in body if not is_text(each)])
    return ast.dump(tree)


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
