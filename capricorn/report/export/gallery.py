"""Figures as files of a folder, with a list of the runs that each shows. Reads and writes no file itself."""

from __future__ import annotations

import json
from collections.abc import Sequence

from capricorn.compare.comparison import Comparison
from capricorn.records.strict_json import as_json
from capricorn.report.export.markdown import escaped
from capricorn.report.figures.style import PNG, SVG, Picture, encode
from capricorn.report.text import slugs

INDEX, PAGE = "figures.json", "FIGURES.md"


def figure_files(
    comparisons: Sequence[Comparison], pictures: Sequence[Sequence[Picture]], kinds: Sequence[str]
) -> dict[str, bytes]:
    """Returns by file name what goes into the folder: each picture in each of these formats, and two lists of them."""
    files: dict[str, bytes] = {}
    entries = []
    for comparison, name, drawn in zip(comparisons, slugs(comparisons), pictures, strict=True):
        for picture in drawn:
            made = {f"{name}-{picture.name}.{kind}": encode(picture.figure, kind) for kind in kinds}
            files |= made
            entries.append((comparison, picture, list(made)))
    index = [_entry(*entry) for entry in entries]
    files[INDEX] = (as_json({"figures": index, "page": PAGE}, indent=2) + "\n").encode()
    files[PAGE] = "\n".join(["# Figures\n", *(_section(*entry) for entry in entries)]).encode()
    return files


def files_of(index: str) -> set[str]:
    """Returns the files of the export that left this text in its index, with the index; none if it is not ours."""
    try:
        table = json.loads(index)
        return {*(file for entry in table["figures"] for file in entry["files"]), INDEX, table.get("page", INDEX)}
    except (ValueError, TypeError, LookupError):
        return set()


def _entry(comparison: Comparison, picture: Picture, files: Sequence[str]) -> dict[str, object]:
    return {
        "files": files, "figure": picture.name, "comparison": comparison.label, "mode": comparison.mode,
        "what": comparison.what, "caption": picture.caption, "runs": picture.runs,
    }  # fmt: skip


def _section(comparison: Comparison, picture: Picture, files: Sequence[str]) -> str:
    """Returns the picture, if it is in a format that pages show, with its caption and the runs it came from."""
    shown = next((file for kind in (SVG, PNG) for file in files if file.endswith(kind)), None)
    image = f"![{escaped(picture.title)}]({shown})\n\n" if shown else ""
    links = ", ".join(f"[{file}]({file})" for file in files)
    runs = " ".join(f"`{run}`" for run in picture.runs)
    head = escaped(f"{picture.title}: {comparison.what}")
    return f"## {head}\n\n{image}{escaped(picture.caption)}\n\nFiles: {links}. Runs: {runs}\n"
