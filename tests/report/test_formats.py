"""The formats of `export`, of comparisons made by hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pandas as pd
import pytest

from capricorn.compare.comparison import Comparison
from capricorn.report.export.data_formats import as_csv, as_json, raw_rows
from capricorn.report.export.latex import as_latex, escaped
from capricorn.report.export.markdown import as_markdown
from capricorn.report.export.page import as_html
from capricorn.report.text import format_ratio, slugs
from tests.support.recorded import comparison, row

FORMATS: dict[str, Callable[[list[Comparison]], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "json": as_json,
    "latex": as_latex,
    "html": lambda comparisons: as_html(comparisons, [[] for _ in comparisons]),
}


# --- for machines


def test_csv_reads_back_to_the_same_figures() -> None:
    rows = [
        row("none", slowdown=None, slowdown_ci=None, store_bytes=None, tiers=()),
        row("capricorn", notes=("a, b", 'c "d"')),
    ]
    both = [comparison(*rows), comparison(row("blocking"), label="p4d")]
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


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_shows_what_is_to_be_known_of_the_whole_and_of_a_row(name: str) -> None:
    noted = comparison(row(notes=("of the row",)), notes=("of the whole", "and this"))
    text = FORMATS[name]([noted])
    for note in ("of the row", "of the whole", "and this"):
        assert text.count(note) >= 1, note


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
        (12.3456, (11.0, 13.987), "12.3 [11, 14]"),
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
