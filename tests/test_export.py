"""The command `export`: each format of comparisons made by hand, where it goes, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capricorn.records import ITERATIONS, RUN
from capricorn.report.comparison import Comparison
from capricorn.report.export import format_ratio, raw_rows, slugs
from capricorn.report.figures import pictures
from capricorn.report.formats import as_csv, as_json, as_markdown
from capricorn.report.latex import as_latex, escaped
from capricorn.report.page import as_html
from tests.recorded import comparison, row, write_run_folder
from tests.test_cli import cli

FORMATS: dict[str, Callable[[list[Comparison]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "json": as_json,
    "latex": as_latex,
    "html": lambda comparisons: as_html(comparisons, [[] for _ in comparisons]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three live runs and an emulated one."""
    root = tmp_path_factory.mktemp("runs")
    live = [write_run_folder(root / f"run-{system}", system) for system in ("none", "capricorn", "blocking")]
    return [*live, write_run_folder(root / "run-emulated", mode="emulated")]


# --- for machines


def test_csv_reads_back_to_the_same_figures() -> None:
    rows = [
        row("none", slowdown=None, slowdown_ci=None, store_bytes=None, tiers=()),
        row("capricorn", notes=("a, b", 'c "d"')),
    ]
    both = [comparison(*rows), comparison(row("blocking"), mode="emulated", label="p4d")]
    table = pd.read_csv(io.StringIO(as_csv(both)))
    expected = [raw for each in both for raw in raw_rows(each)]
    assert list(table.columns) == list(expected[0])
    assert len(table) == 3
    for read, wrote in zip(table.to_dict("records"), expected, strict=True):
        for name, value in wrote.items():
            close = pytest.approx(value, rel=1e-15) if isinstance(value, float) else value
            assert pd.isna(read[name]) if value is None or value == "" else read[name] == close, name


def test_every_measured_column_names_its_unit() -> None:
    names = set(raw_rows(comparison(row()))[0])
    words = {"comparison", "mode", "what", "valid", "label", "system", "tiers", "notes", "faults", "runs"}
    counts, ratios = {"requested", "effective"}, {"slowdown", "speedup_of_capricorn"}
    edges = {f"{name}_ci_{side}" for name in ("slowdown", "speedup") for side in ("low", "high")}
    measured = names - words - counts - ratios - edges
    assert {"iteration_s_p50", "peak_rss_bytes"} <= measured
    assert all("_s_" in name or "bytes" in name for name in measured)


def test_json_reads_back_to_the_same_comparisons() -> None:
    both = [comparison(row(), faults=("x",), valid=False), comparison(row("none"), mode="emulated")]
    read = json.loads(as_json(both))
    assert [Comparison.model_validate(each) for each in read["comparisons"]] == both


# --- for people


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_mode_runs_and_figures(name: str) -> None:
    text = FORMATS[name]([comparison(row("gemini:gemini.mu=0.9", system="gemini"), mode="emulated")])
    for word in ("emulated", "run-gemini:gemini.mu=0.9", "mixtral-tiny", "gemini.mu=0.9"):
        assert word in re.sub(r"<wbr>|\n", "", text), word
    assert "1.25" in text
    assert "1.125" in text


@pytest.mark.parametrize("name", ["md", "latex", "html"])
def test_live_and_emulated_figures_never_share_a_table(name: str) -> None:
    both = [comparison(row("none", runs=("live-1",))), comparison(row(runs=("emulated-1",)), mode="emulated")]
    begin = {"md": "## ", "latex": r"\begin{table*}", "html": "<section"}[name]
    _, first, second = FORMATS[name](both).split(begin)
    assert "live-1" in first
    assert "emulated" not in first
    assert "emulated-1" in second
    assert "live-1" not in second


@pytest.mark.parametrize("name", ["md", "latex", "html"])
def test_a_comparison_that_is_not_valid_says_so(name: str) -> None:
    text = FORMATS[name]([comparison(row(), valid=False, faults=("losses differ in iteration 3",))])
    assert "Not valid: losses differ in iteration 3" in text
    assert "Not valid" not in FORMATS[name]([comparison(row())])


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (1.0991, (1.0788, 1.136), "1.099 [1.079, 1.136]"),
        (1.004, (0.99, 1.02), "1.004 [0.990, 1.020], no difference"),
        (1.5, None, "1.500"),
        (1.0, (1.0, 1.0), "1"),
        (None, None, "-"),
    ],
)
def test_a_ratio_whose_interval_holds_1_is_no_difference(
    value: float | None, interval: tuple[float, float] | None, text: str
) -> None:
    assert format_ratio(value, interval) == text


def test_markdown_keeps_its_columns_whatever_names_hold() -> None:
    text = as_markdown([comparison(row("a|b", notes=("x|y *z* <b>", "two\nlines")), label="A_b | c")])
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert r"x\|y \*z\* \<b>" in text


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("a_b & 50 % #1 $x {y}", r"a\_b \& 50 \% \#1 \$x \{y\}"),
        ("\\ ~ ^", r"\textbackslash{} \textasciitilde{} \textasciicircum{}"),
        ("< > |", r"\textless{} \textgreater{} \textbar{}"),
        ('--set "x"', "-{}-set ''x''"),
        ("a\nb\t\x00\u6f22", "a b ??"),
    ],
)  # fmt: skip
def test_latex_prints_any_text_literally(text: str, latex: str) -> None:
    assert escaped(text) == latex


def test_latex_is_a_fragment_with_as_many_cells_in_each_row() -> None:
    odd = row("gemini:gemini.mu=0.9", notes=("a & b", "50 %"), speedup_ci=(0.9, 1.1))
    text = as_latex([comparison(odd, row("[none]", system="[none]"), label="100 % & more")])
    assert "\\documentclass" not in text
    assert text.count("{") == text.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{")
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()[1:-1]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [8, 8]
    assert body[1].lstrip().startswith("{[none]}"), "a bracket after the end of a row would be its option"
    assert r"\caption{100 \% \& more. Mode: live." in text
    assert r"gemini}$^{1,2,3}$" in body[0]
    assert r"$^{1}$~gemini.mu=0.9\quad $^{2}$~a \& b\quad $^{3}$~50 \%" in text


def test_latex_shortens_a_long_list_of_runs_and_html_does_not() -> None:
    many = comparison(row(runs=tuple(f"run-{number}" for number in range(40))))
    assert "40 runs, run-0 to run-39" in as_latex([many])
    assert "run-20" not in as_latex([many])
    assert "run-20" in FORMATS["html"]([many])


def test_comparisons_of_the_same_name_get_names_of_their_own() -> None:
    assert slugs([comparison(row()), comparison(row()), comparison(row(), label="A & b", mode="emulated")]) == [
        "mixtral-tiny-live", "mixtral-tiny-live-2", "a-b-emulated",
    ]  # fmt: skip


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
    (run / "ops.jsonl").write_text("not an op\n")
    everything = ("export", run, "--out", out, "--figures", figures, "--figure-format", "svg", "--trace", trace)
    assert cli(*everything) == 2
    assert "ops.jsonl, line 1 is damaged" in capsys.readouterr().err

    (run / "ops.jsonl").write_text("")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("capricorn.report.trace.write_trace", interrupted)
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
    assert json.loads((tmp_path / "figures" / "figures.json").read_text()) == {"figures": []}


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
