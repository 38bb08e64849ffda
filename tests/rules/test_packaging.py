"""What is shipped, and what an import costs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import capricorn
from tests.conftest import MUST_RUN

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_FROM = ("capricorn", "baselines", "cli", "pyproject.toml", "README.md", "LICENSE")


def run_python(script: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if find_spec("setuptools") is None:
        pytest.skip("setuptools, which builds the wheel, is not installed here")
    # A copy, since setuptools writes into the folder it builds and would ship what an older build left there.
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(source / "dist"), str(source)]
    subprocess.run(command, check=True)
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_ships_one_import_name_and_every_module(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {"capricorn/py.typed", "capricorn/report/export/page.html"}
    for folder, prefix in (("capricorn", ""), ("baselines", "capricorn/"), ("cli", "capricorn/")):
        expected |= {prefix + str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert names == expected


def test_the_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = f"capricorn_bench-{capricorn.__version__}.dist-info"
    assert "capricorn-bench = capricorn.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.parametrize(
    "module", ["capricorn", "capricorn.systems.registry", "capricorn.planner", "capricorn.cli.main"]
)
def test_importing_it_loads_no_torch(module: str, tmp_path: Path) -> None:
    script = f"import sys, {module}; print(*sorted({{'torch', 'pandas', 'matplotlib'}} & sys.modules.keys()))"
    assert run_python(script, tmp_path).split() == []


@pytest.mark.parametrize("module", ["capricorn", "capricorn.cli"])
def test_the_package_run_as_a_module_is_the_command(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert capricorn.__version__ in done.stdout


def test_every_public_name_is_there(tmp_path: Path) -> None:
    script = "import capricorn; print(*[name for name in capricorn.__all__ if getattr(capricorn, name) is None])"
    assert run_python(script, tmp_path).split() == []


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nonsense'"):
        capricorn.nonsense  # noqa: B018


def test_a_session_that_skips_what_must_run_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "tests/rules"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    for place, code in ((folder, 1), (tmp_path / "tests/other", 0)):
        place.mkdir(exist_ok=True)
        test = place / "test_it.py"
        test.write_text("import pytest\ndef test_it():\n    pytest.skip('for no reason')\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test.relative_to(tmp_path))]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout
        assert ("must not be skipped: tests/rules/test_it.py" in done.stdout) == bool(code)


def test_what_must_run_exists() -> None:
    assert [path for path in MUST_RUN if not (ROOT / path).exists()] == []
