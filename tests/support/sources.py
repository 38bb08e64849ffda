"""The project's modules as syntax trees, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"capricorn": "capricorn", "baselines": "capricorn.baselines", "cli": "capricorn.cli"}


@cache
def sources() -> dict[Path, ast.Module]:
    """Our modules by path relative to the root."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join([FOLDERS[parts[0]], *(part for part in parts[1:] if part != "__init__")])


def room_of(module: str) -> str:
    """The part of a name that has a layer: `planner` of `capricorn.planner.plan`, `capricorn` of the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else module


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(node: ast.AST, *, functions: bool = True, types: bool = False) -> Iterator[ast.AST]:
    """All nodes that run, with or without those inside functions, and those for type checkers too if asked for."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child) and not types:
            continue
        if not functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from walk(child, functions=functions, types=types)


def imports(path: Path, tree: ast.Module, *, functions: bool = True, types: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import; `from a import b` is `a.b`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in walk(tree, functions=functions, types=types):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def external(*, functions: bool = True) -> Iterator[tuple[Path, int, str]]:
    """Path, line and top-level name of each import."""
    for path, tree in sources().items():
        for line, name in imports(path, tree, functions=functions):
            yield path, line, name.split(".")[0]


def show(path: Path, line: int, what: str) -> str:
    return f"{path}:{line}: {what}"
