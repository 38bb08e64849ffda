"""The command `export`: its page, where what it makes goes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capricorn.records.samples import ITERATIONS, RUN
from capricorn.report.export.page import as_html
from capricorn.report.figures.comparison_figures import pictures
from tests.cli.test_cli import cli
from tests.support.recorded import comparison, row, write_run_folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three live runs and an emulated one."""
    root = tmp_path_factory.mktemp("runs")
    live = [write_run_folder(root / f"run-{system}", system) for system in ("none", "capricorn", "blocking")]
    return [*live, write_run_folder(root / "run-emulated", mode="emulated")]


# --- the page


class _Page(HTMLParser):
    """Counts elements, and collects what would be loaded and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "poster", "data", "srcset"):
                self.loaded.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if tag == "svg" and name == "aria-label":
                self.labels.append(value or "")


def test_a_page_has_every_figure_and_needs_nothing_beside_it(runs: list[Path], tmp_path: Path) -> None:
    page_file = tmp_path / "report.html"
    assert cli("export", *runs, "--out", page_file) == 0
    text = page_file.read_text(encoding="utf-8")
    page = _Page(text)
    assert page.tags.count("svg") == page.tags.count("figure") == page.tags.count("figcaption") == 6 + 5
    assert len(page.labels) == 11
    assert all(label.count(" ") > 3 for label in page.labels)
    assert page.tags.count("table") == 2
    assert "script" not in page.tags
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in page.loaded)
    assert len(page.ids) == len(set(page.ids))
    assert {target[1:] for target in page.loaded if target.startswith("#")} <= set(page.ids)
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?!#)\w", text)


def test_a_page_shows_names_as_they_are(runs: list[Path]) -> None:
    label = "<script>&amp;\"'$x^2$"
    odd = comparison(row(label, system="capricorn"), label="<b>x</b>", faults=("<i>",))
    text = as_html([odd], [pictures(odd, {label: [runs[1]]})])
    page = _Page(text)
    assert not {"script", "b", "i"} & set(page.tags)
    assert "&lt;script&gt;&amp;amp;" in text


# --- the command


def test_markdown_goes_to_stdout_alone_unless_told_otherwise(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("export", *runs) == 0
    printed = capsys.readouterr()
    assert printed.out.count("## ") == 2
    assert "Mode: live." in printed.out
    assert "Mode: emulated." in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("suffix", "begin"),
    [(".md", "## "), (".csv", "comparison,"), (".json", "{"), (".tex", "% By")],
)
def test_the_suffix_of_the_file_chooses_the_format(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, begin: str
) -> None:
    out = tmp_path / "made" / "for" / f"it{suffix}"
    assert cli("export", runs[0], "--out", out) == 0
    assert out.read_text(encoding="utf-8").startswith(begin)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert capsys.readouterr().out == ""


def test_a_format_goes_before_a_suffix_that_says_nothing(runs: list[Path], tmp_path: Path) -> None:
    assert cli("export", runs[0], "--format", "json", "--out", tmp_path / "table.txt") == 0
    assert json.loads((tmp_path / "table.txt").read_text())["comparisons"]


def test_figures_are_those_of_the_samples_not_of_the_stored_summary(runs: list[Path], tmp_path: Path) -> None:
    record = json.loads((runs[1] / RUN).read_text())
    forged = tmp_path / "forged"
    forged.mkdir()
    for path in runs[1].iterdir():
        (forged / path.name).write_bytes(path.read_bytes())
    record["summary"] |= {"iteration_s_p50": 9.0, "stall_s_p50": 9.0}
    (forged / RUN).write_text(json.dumps(record))
    assert cli("export", forged, "--out", tmp_path / "out.csv", "--figures", tmp_path, "--figure-format", "svg") == 0
    assert pd.read_csv(tmp_path / "out.csv")["iteration_s_p50"].tolist() == [pytest.approx(0.1)]
    assert ">2 ms<" in (tmp_path / "mixtral-tiny-live-stall.svg").read_text()


FORGED = {"requested": 99, "effective": 1, "peak_rss_bytes": 9, "store_bytes": 9}


def test_nothing_of_a_row_is_of_the_stored_summary_or_verdict(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = write_run_folder(tmp_path / "run-capricorn")
    (forged / RUN).write_text(
        json.dumps(json.loads((forged / RUN).read_text()) | {"summary": FORGED, "verdict": "lost"})
    )
    tables = []
    for run in (runs[1], forged):
        assert cli("export", run, "--format", "json") == 0
        tables.append(json.loads(capsys.readouterr().out))
    assert tables[0] == tables[1]
    row = tables[0]["comparisons"][0]["rows"][0]
    assert (row["requested"], row["effective"], row["store_bytes"]) == (12, 12, 4_000_000)
    assert row["peak_rss_bytes"] == 600_000_000


def export_figures(run: Path, folder: Path) -> int:
    return cli("export", run, "--out", folder.parent / "t.md", "--figures", folder, "--figure-format", "svg")


def test_figures_replace_those_of_an_earlier_export_and_leave_a_readme_alone(runs: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    assert export_figures(runs[1], folder) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "mixtral-tiny-live-stall.svg").write_text("older")
    assert export_figures(runs[1], folder) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert first["README.md"] == b"mine"
    assert "FIGURES.md" in first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FIGURES.md", "mine"),
        ("mixtral-tiny-live-stall.svg", "mine"),
        ("figures.json", "mine"),
        ("figures.json", "[]"),
        ("figures.json", '{"figures": [1]}'),
    ],
)
def test_figures_replace_no_file_of_others(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / name).write_text(text)
    assert export_figures(runs[1], folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder / name} is of no earlier export: move it, or name another folder" in line
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == text
    assert not (tmp_path / "t.md").exists()


def _mistakes(runs: list[Path], folder: Path) -> list[tuple[list[Any], str]]:
    (folder / "taken").mkdir()
    (folder / "file.md").write_text("kept")
    return [
        ([], "missing argument 'PATH...'"),
        ([folder / "nowhere"], f"{folder / 'nowhere'} holds no run"),
        ([runs[0], "--format", "csv", "--out", folder / "x.md"], "--format csv contradicts --out"),
        ([runs[0], "--out", folder / "x.xlsx"], "end it in one of .md, .csv, .json, .tex, .html"),
        ([runs[0], "--format", "pdf"], "'pdf' is not one of"),
        ([runs[0], "--figure-format", "png"], "--figure-format says nothing without --figures"),
        ([runs[0], "--format", "md", "--out", folder / "taken"], "is a folder"),
        ([runs[0], "--out", folder / "file.md" / "x.md"], "cannot write"),
        ([runs[0], "--figures", folder / "file.md"], "is a file"),
        ([runs[0], "--trace", "/dev/null"], "/dev/null is no file"),
        ([runs[0], "--out", folder / "x.json", "--trace", folder / "x.json"], "named twice"),
    ]


def test_a_mistake_is_one_line_and_leaves_nothing(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = _mistakes(runs, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in cases:
        assert cli("export", *arguments) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file.md").read_text() == "kept"


@pytest.mark.parametrize("damage", ["not JSON", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_a_damaged_or_foreign_record_is_refused(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN).write_text(damage)
    assert cli("export", runs[0], tmp_path / "run") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_was_begun_is_removed_when_a_later_part_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run_folder(tmp_path / "run")
    out, figures, trace = tmp_path / "out.md", tmp_path / "new" / "figures", tmp_path / "t.json"
    out.write_text("older")
    (run / "ops.jsonl").unlink()
    (run / "ops.jsonl").mkdir()
    everything = ("export", run, "--out", out, "--figures", figures, "--figure-format", "svg", "--trace", trace)
    assert cli(*everything) == 2
    assert "ops.jsonl: Is a directory" in capsys.readouterr().err

    (run / "ops.jsonl").rmdir()
    (run / "ops.jsonl").write_text("")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("capricorn.report.export.perfetto.write_trace", interrupted)
    assert cli(*everything) == 130
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.md", "run"]


def test_a_page_is_not_printed_to_a_terminal(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli("export", runs[0], "--format", "html") == 2
    assert "add --out" in capsys.readouterr().err


def test_a_run_that_measured_nothing_has_a_row_and_no_figure(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run")
    (run / ITERATIONS).write_text("")
    assert cli("export", run, "--out", tmp_path / "page.html", "--figures", tmp_path / "figures") == 0
    assert _Page((tmp_path / "page.html").read_text()).tags.count("svg") == 0
    assert json.loads((tmp_path / "figures" / "figures.json").read_text())["figures"] == []


def test_tables_need_neither_torch_nor_matplotlib(runs: list[Path]) -> None:
    code = f"""
import sys
from capricorn.cli.main import main
try:
    main(["export", "--format", "csv", {str(runs[0])!r}])
except SystemExit as ended:
    print("ended:", ended.code, [name for name in ("torch", "matplotlib", "jinja2") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "ended: 0 []" in done.stdout


def test_csv_of_several_modes_is_refused(runs: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli("export", *runs, "--out", tmp_path / "table.csv") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "emulated and live figures never share one: export them one by one, or as json" in line
    assert not list(tmp_path.iterdir())
    assert cli("export", *runs, "--format", "json") == 0
    assert {each["mode"] for each in json.loads(capsys.readouterr().out)["comparisons"]} == {"live", "emulated"}
