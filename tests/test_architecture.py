"""The rules of the layout that no linter knows, checked on the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"capricorn": "capricorn", "baselines": "capricorn.baselines", "cli": "capricorn.cli"}

LAYERS = (
    {"units", "errors"},
    {"hooks", "topology", "process"},
    {"values"},
    {
        "presets",
        "cluster",
        "config",
        "faults",
        "schedule",
        "settings",
        "resolve",
        "sizing",
        "workload",
        "scale",
        "profile",
    },
    {"records", "comparison", "drawing", "economics", "verdict"},
    {"planner"},
    {"system"},
    {"registry"},
    {"applies", "campaign", "cases"},
    {"runtime", "loads"},
    {"emulation"},
    {"harness", "baselines", "report", "replay"},
    {"cli"},
)
LAYER_OF = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
TORCH_FREE = set.union(*LAYERS[: LAYER_OF["registry"] + 1], {"replay", "cli", "capricorn"})

MAX_LINES, MAX_BASELINE_LINES = 330, 150

TORCHRUN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
}  # fmt: skip
ENVIRONMENT = {
    "XDG_CACHE_HOME": "where a user keeps caches; tokens are the only thing cached",
    "CUDA_VISIBLE_DEVICES": "the devices torch will see, counted without the cost of importing torch",
}

PICKLE_MODULES = (
    "pickle", "_pickle", "pickletools", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "copyreg",
    "multiprocessing", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process", "xmlrpc",
    "torch.multiprocessing", "torch.package", "torch.hub", "torch.distributed.rpc", "logging.config.listen",
)  # fmt: skip
"""What pickles, or passes on what it is given pickled: also pipes, queues and processes of multiprocessing."""
PICKLE_CALLS = {"torch.load", "torch.save", "read_pickle", "to_pickle", "ProcessPoolExecutor", "SocketHandler"}
PICKLE_ENDS = ("_object", "_object_list")
"""Of the collectives that take any object."""
PICKLE_SWITCHES = {"allow_pickle": "False", "weights_only": "True"}
MAX_LOAD_ARGUMENTS = 2
"""Of numpy.load; the third is whether to unpickle."""
PICKLING = {
    ("baselines/torch_save.py", "torch.save"): "it is the system that it stands for",
    ("baselines/torch_save.py", "torch.load"): "as above, and of weights only",
    ("baselines/sharing.py", "multiprocessing.process"): "the key by which shared memory is handed over is read",
    ("baselines/sharing.py", "multiprocessing.resource_sharer"): "the thread that hands it over is ended",
    ("baselines/dcp_process.py", "multiprocessing.parent_process"): "ends with its trainer",
    ("baselines/dcp_process.py", "multiprocessing.resource_sharer"): "the thread that hands memory over is ended",
}
"""File and name of what may stay, and why; what other people's libraries pickle is not seen here."""


@cache
def sources() -> dict[Path, ast.Module]:
    """Our modules by path relative to the root."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join([FOLDERS[parts[0]], *(part for part in parts[1:] if part != "__init__")])


def unit_of(module: str) -> str:
    """The part of a name that has a layer: `planner` of `capricorn.planner.plan`, `capricorn` of the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else module


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(node: ast.AST, *, functions: bool = True) -> Iterator[ast.AST]:
    """All nodes that run, with or without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if not functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from walk(child, functions=functions)


def imports(path: Path, tree: ast.Module, *, functions: bool = True) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import; `from a import b` is `a.b`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in walk(tree, functions=functions):
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


def internal() -> Iterator[tuple[Path, int, str, str]]:
    """Path, line, importing and imported unit of each import of our own from another unit."""
    for path, tree in sources().items():
        unit = unit_of(module_name(path))
        for line, name in imports(path, tree):
            # The package itself is imported for its version alone; its other names are lazy and for users.
            if name.startswith("capricorn.") and name != "capricorn.__version__" and unit_of(name) != unit:
                yield path, line, unit, unit_of(name)


def show(path: Path, line: int, what: str) -> str:
    return f"{path}:{line}: {what}"


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(module_name(path)) for path in sources()} - {"capricorn"}
    assert units <= LAYER_OF.keys(), "give the new unit its layer in LAYERS"


def test_imports_go_downwards_only() -> None:
    wrong = [
        show(path, line, f"{unit} imports {target}")
        for path, line, unit, target in internal()
        if target not in LAYER_OF or unit == "capricorn" or LAYER_OF[target] > LAYER_OF[unit]
    ]
    assert not wrong, "\n".join(wrong)


def test_units_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for _, _, unit, target in internal():
        graph.setdefault(unit, set()).add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_report_imports_pandas_and_matplotlib() -> None:
    wrong = [
        show(path, line, name)
        for path, line, name in external()
        if name in ("pandas", "matplotlib") and unit_of(module_name(path)) != "report"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_torch_is_imported_up_to_registry_and_in_cli() -> None:
    wrong = [
        show(path, line, name)
        for path, line, name in external(functions=False)
        if name in ("torch", "fairscale", "torchsnapshot") and unit_of(module_name(path)) in TORCH_FREE
    ]
    assert not wrong, "\n".join(wrong)


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


def test_nothing_is_pickled() -> None:
    found = {(str(path), name): line for path, tree in sources().items() for line, name in pickling(path, tree)}
    wrong = [show(Path(path), line, name) for (path, name), line in found.items() if (path, name) not in PICKLING]
    assert not wrong, "\n".join(wrong)
    assert PICKLING.keys() <= found.keys(), "an exception that nobody needs any more"


def pickling(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what pickles or unpickles, or may."""
    for line, name in imports(path, tree):
        if any(f"{name}.".startswith(f"{module}.") for module in PICKLE_MODULES):
            yield line, name
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        last = name.rpartition(".")[2]
        if {name, last} & PICKLE_CALLS or last.endswith(PICKLE_ENDS):
            yield node.lineno, name
        if isinstance(node, ast.keyword) and ast.unparse(node.value) != PICKLE_SWITCHES.get(
            node.arg or "", ast.unparse(node.value)
        ):
            yield node.value.lineno, node.arg or ""
        is_load = isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load")
        if is_load and len(node.args) > MAX_LOAD_ARGUMENTS:
            yield node.lineno, "numpy.load"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import os, multiprocessing.connection",
        "from multiprocessing import Pipe",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch.multiprocessing as mp",
        "import torch\ntorch.load(path)",
        "import torch\nload = torch.load",
        "import torch\ntorch.load(path, weights_only=False)",
        "dist.all_gather_object(a, b)",
        "dist.scatter_object_list(a, b)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=asked)",
        "np.load(path, None, True)",
        "frame.to_pickle(path)",
    ],
)
def test_what_pickles_is_found(code: str) -> None:
    assert list(pickling(Path("capricorn/system.py"), ast.parse(code)))


def test_every_module_says_what_it_is() -> None:
    assert not [str(path) for path, tree in sources().items() if not ast.get_docstring(tree)]


def test_files_are_small() -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources()}
    long = [
        f"{path}: {count} lines"
        for path, count in lines.items()
        if count > (MAX_BASELINE_LINES if path.parts[0] == "baselines" else MAX_LINES)
    ]
    assert not long, "split " + ", ".join(long)


def test_only_known_environment_variables_are_read() -> None:
    known = {*TORCHRUN, *ENVIRONMENT}
    wrong = [
        show(path, line, name)
        for path, tree in sources().items()
        for line, name in environment_reads(tree)
        if name not in known
    ]
    assert not wrong, "make it an option, or give a reason in ENVIRONMENT:\n" + "\n".join(wrong)


def environment_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and variable of each read; passing the whole environment on to a process is none."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environ(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
            of_environ = isinstance(node.func, ast.Attribute) and is_environ(node.func.value)
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "getenv" or (of_environ and name in ("get", "pop", "setdefault")):
                key = node.args[0]
        elif isinstance(node, ast.Compare) and any(map(is_environ, node.comparators)):
            key = node.left
        if key is not None:
            yield node.lineno, str(key.value) if isinstance(key, ast.Constant) else ast.unparse(key)


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def test_no_error_is_swallowed_unnamed() -> None:
    wrong = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or is_empty(node.body)):
                wrong.append(show(path, node.lineno, "except without a type, or with an empty body"))
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
                broad = {"Exception", "BaseException"} & {ast.unparse(argument) for argument in node.args}
                wrong += [show(path, node.lineno, f"suppress({name})") for name in broad]
    assert not wrong, "write contextlib.suppress with the narrow error:\n" + "\n".join(wrong)


def is_empty(body: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Pass) or ast.unparse(statement) == "..." for statement in body)
