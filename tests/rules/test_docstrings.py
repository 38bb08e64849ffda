"""Docstrings: many parameters are explained one by one."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.sources import module_name, room_of, show, sources

MANY_PARAMETERS = 4
UNEXPLAINED: dict[str, int] = {
    "baselines": 3, "campaign": 4, "cli": 10, "compare": 1, "config": 1, "emulation": 4, "launch": 8, "records": 1,
    "report": 1, "simulate": 1, "sizing": 1, "stats": 1,
}  # fmt: skip
"""By room: how many functions may still lack `Args:`. Counts go down; a room that has come to 0 leaves the table."""


def test_a_function_of_many_parameters_explains_each() -> None:
    found = {path: list(unexplained(tree)) for path, tree in sources().items()}
    counts = Counter(dict.fromkeys(UNEXPLAINED, 0))
    for path, functions in found.items():
        counts[room_of(module_name(path))] += len(functions)
    wrong = [
        show(path, line, f"{name} needs Args:")
        for path, functions in found.items()
        for line, name in functions
        if counts[room := room_of(module_name(path))] > UNEXPLAINED.get(room, 0)
    ]
    assert not wrong, "\n".join(wrong)


def unexplained(tree: ast.AST, where: str = "", explained: str = "") -> Iterator[tuple[int, str]]:
    """Yields line and name of each public function of many parameters whose docstring has no `Args:`.

    A constructor may leave them to the docstring of its class.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from unexplained(node, f"{where}{node.name}.", ast.get_docstring(node) or "")
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        text = (ast.get_docstring(node) or "") + (explained if node.name == "__init__" else "")
        if len(parameters(node)) >= MANY_PARAMETERS and "Args:\n" not in text:
            yield node.lineno, f"{where}{node.name}"


def parameters(function: ast.FunctionDef) -> list[str]:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls")]


@pytest.mark.parametrize(
    ("code", "is_wrong"),
    [
        ("def f(a, b, c, d): ...", True),
        ("def f(a, b, *, c, d=1):\n    'Adds.'", True),
        ("class A:\n    def __init__(self, a, b, c, d): ...", True),
        ("class A:\n    'Adds.\\n\\nArgs:\\n    a: one.'\n    def __init__(self, a, b, c, d): ...", False),
        ("def f(a, b, c, d):\n    'Adds.\\n\\nArgs:\\n    a: one.'", False),
        ("def f(a, b, c): ...", False),
        ("class A:\n    def f(self, a, b, c): ...", False),
        ("def _f(a, b, c, d): ...", False),
        ("class _A:\n    def f(self, a, b, c, d): ...", False),
    ],
)
def test_functions_without_explanations_are_found(code: str, is_wrong: bool) -> None:
    assert bool(list(unexplained(ast.parse(code)))) is is_wrong


def test_a_room_without_exceptions_leaves_the_table() -> None:
    rooms = {room_of(module_name(path)) for path in sources()}
    assert UNEXPLAINED.keys() <= rooms
    assert all(count > 0 for count in UNEXPLAINED.values())
