"""The layout: rooms in layers, no circle of files, one meaning for each name; and what each part may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from capricorn.systems.registry import SYSTEMS
from tests.support.sources import FOLDERS, ROOT, external, imports, module_name, room_of, show, sources

LAYERS = (
    {"units", "errors"},
    {"hooks", "topology", "process", "files"},
    {"config"},
    {"records"},
    {"planner", "systems", "emulation"},
    {"sizing"},
    {"runtime"},
    {"loads", "trainer", "faults", "stats"},
    {"launch"},
    {"machines", "compare"},
    {"campaign", "conformance", "simulate"},
    {"report", "baselines"},
    {"cli"},
)
LAYER_OF = {room: number for number, layer in enumerate(LAYERS) for room in layer}
VOCABULARY = LAYERS[0] | LAYERS[1]
TORCH_FREE = {*VOCABULARY, "config", "records", "sizing", "planner", "systems", "simulate", "stats", "cli", "capricorn"}
OF_RANKS = {"capricorn.systems.flat_state", "capricorn.systems.small_values", "capricorn.systems.tensor_bytes"}
"""What only ranks import, in rooms that the command imports."""
PANDAS_USERS = {"compare", "report"}
ENTRY = "capricorn.__main__"
"""`python -m capricorn`, which is the command: the one module at the root that looks up."""

NO_SYSTEMS = {
    "capricorn.systems.registry": "the one table of them",
    "capricorn.launch.preflight": "names of distributions, whose versions a record has",
    "capricorn.config.scenario": "sections of records of version 0.1",
    "capricorn.simulate.policy": "names of bounds that a replay is compared with",
}
"""Modules in which such words do not list systems, and why."""
MAX_MODULES = 20
MANY_LINES = 400
"""A file this long is looked at: is it one concept? If so, it gets a line below."""
LONG_FILES: dict[str, str] = {
    "baselines/file_checkpoints.py": "the two classes of a system that writes files, which are subclassed together",
    "baselines/lm_resiliency.py": "what is around one library",
    "capricorn/systems/flat_state.py": "a state: how it is laid out, looked up again, captured and loaded",
    "capricorn/runtime/store/node_store.py": "a node's store, and the locked folder of the run that it lies in",
}

NOT_A_NAME = {"__init__", "__main__", "conftest"}


def files() -> dict[str, Path]:
    return {module_name(path): path for path in sources()}


def arrows() -> Iterator[tuple[Path, int, str, str]]:
    """Path, line, importing and imported module of each import of our own, also of those for type checkers alone."""
    known = files()
    for path, tree in sources().items():
        for line, name in imports(path, tree, types=True):
            target = name if name in known else name.rpartition(".")[0]
            if target in known and target not in ("capricorn", module_name(path)):
                yield path, line, module_name(path), target


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(name) for name in files()} - {"capricorn", "__main__"}
    assert rooms == LAYER_OF.keys(), "give a new room its layer in LAYERS"


def test_nothing_stands_at_the_root_but_vocabulary() -> None:
    modules = {path.stem for path in (ROOT / "capricorn").glob("*.py")} - NOT_A_NAME
    assert modules == VOCABULARY, "give it a room"


def test_imports_go_downwards_only() -> None:
    wrong = [
        show(path, line, f"{importer} imports {target}")
        for path, line, importer, target in arrows()
        if importer != ENTRY and LAYER_OF[room_of(target)] > LAYER_OF[room_of(importer)]
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for _, _, importer, target in arrows():
        if room_of(importer) != room_of(target):
            graph.setdefault(room_of(importer), set()).add(room_of(target))
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_nothing_of_ours_goes_through_the_root_which_looks_up() -> None:
    wrong = [
        show(path, node.lineno, alias.name)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "capricorn" and not node.level
        for alias in node.names
        if alias.name != "__version__" and not any(name.startswith(f"capricorn.{alias.name}") for name in files())
    ]
    assert not wrong, "import it from its own module:\n" + "\n".join(wrong)


def test_files_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for _, _, importer, target in arrows():
        graph.setdefault(importer, set()).add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_folder_has_more_modules_than_one_can_see_at_once() -> None:
    counts = Counter(path.parent for path in sources() if path.stem not in NOT_A_NAME)
    crowded = {str(folder): count for folder, count in counts.items() if count > MAX_MODULES}
    assert not crowded, "split it by concepts"


def test_no_file_name_means_two_things() -> None:
    counts = Counter(path.stem for path in sources() if path.stem not in NOT_A_NAME)
    assert not [str(path) for path in sources() if counts[path.stem] > 1], "give each a name of its own"


def test_no_class_name_means_two_things() -> None:
    named = [(node.name, str(path)) for path, tree in sources().items() for node in tree.body if is_class(node)]
    counts = Counter(name for name, _ in named)
    assert not [(name, path) for name, path in named if counts[name] > 1]


def is_class(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef)


@pytest.mark.parametrize(
    "code",
    [
        "A = {'gemini', 'capricorn'}",
        "A = {'none': 1, 'dcp': 2}",
        "f(('dcp', 'dcp-async'))",
        "A = 'gemini capricorn torchsnapshot'.split()",
        "name == 'gemini' or name == 'capricorn'",
        "match name:\n    case 'gemini' | 'capricorn':\n        pass",
    ],
)
def test_a_second_list_of_systems_is_found(code: str) -> None:
    assert any(len(systems_in(node)) > 1 for node in ast.walk(ast.parse(code)))


def test_facts_about_systems_stand_in_the_registry_alone() -> None:
    wrong = [
        show(path, node.lineno, f"a list of {', '.join(names)}")
        for path, tree in sources().items()
        if module_name(path) not in NO_SYSTEMS
        for node in ast.walk(tree)
        if len(names := systems_in(node)) > 1
    ]
    assert not wrong, "make it a field of SystemEntry:\n" + "\n".join(wrong)


def systems_in(node: ast.AST) -> list[str]:
    """The systems that a list, a set, the keys of a table, a pattern, a condition or a text of words names."""
    if isinstance(node, ast.Constant):
        words = node.value.split() if isinstance(node.value, str) else []
        return words if all(word in SYSTEMS for word in words) else []
    values = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    if isinstance(node, ast.MatchOr):
        values = [pattern.value for pattern in node.patterns if isinstance(pattern, ast.MatchValue)]
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        values = [each for test in node.values if isinstance(test, ast.Compare) for each in test.comparators]
    return [value.value for value in values if isinstance(value, ast.Constant) and value.value in SYSTEMS]


def test_pandas_and_matplotlib_are_for_comparisons_and_reports() -> None:
    wrong = [
        show(path, line, name)
        for path, line, name in external()
        if (name == "pandas" and room_of(module_name(path)) not in PANDAS_USERS)
        or (name == "matplotlib" and room_of(module_name(path)) != "report")
    ]
    assert not wrong, "\n".join(wrong)


def test_what_the_command_starts_with_imports_no_torch() -> None:
    wrong = [
        show(path, line, name)
        for path, line, name in external(functions=False)
        if name in ("torch", "fairscale", "torchsnapshot")
        and room_of(module_name(path)) in TORCH_FREE
        and module_name(path) not in OF_RANKS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["capricorn.launch.launcher", "capricorn.stats.run_summary"])
def test_a_run_is_started_and_ended_without_pandas(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({{'pandas', 'matplotlib'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_mapped_folders_are_imported_by_their_full_name() -> None:
    folders = [ROOT / name for name in (*FOLDERS, "tests", "benchmarks", "examples")]
    wrong = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            wrong += [
                show(path.relative_to(ROOT), node.lineno, name)
                for name in names
                if name.split(".")[0] in ("baselines", "cli", "results")
            ]
    assert not wrong, "a second copy of each class; write capricorn.NAME:\n" + "\n".join(wrong)


def test_siblings_in_a_mapped_folder_are_imported_relatively() -> None:
    # mypy knows these folders by their place, so to it the full name is a module without types.
    wrong = [
        show(path, node.lineno, node.module)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and path.parts[0] in ("baselines", "cli")
        if node.module.startswith(FOLDERS[path.parts[0]])
    ]
    assert not wrong, "\n".join(wrong)


def test_a_long_file_is_one_concept() -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources()}
    long = {str(path) for path, count in lines.items() if count > MANY_LINES}
    assert long == LONG_FILES.keys(), "say in LONG_FILES why it is one concept, or split it by concepts"
