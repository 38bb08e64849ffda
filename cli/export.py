"""`capricorn-bench export`: finished runs and comparisons as tables, as a page, as figures and as a trace."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import rich_click as click

from capricorn.errors import ConfigError
from capricorn.report.export.formats import BY_SUFFIX, FORMATS, render
from capricorn.report.export.outputs import Outputs, all_or_nothing, read_whole
from capricorn.runtime.persist.layout import is_checkpoint

from .streams import hushed

if TYPE_CHECKING:
    from capricorn.compare.comparison import Comparison
    from capricorn.report.export.perfetto import TracedRun
    from capricorn.report.figures.style import Picture

    Loaded: TypeAlias = Sequence[tuple[Comparison, Mapping[str, Sequence[Path]]]]

WEIGHTS = ".safetensors"
FIGURE_FORMATS = ("svg", "pdf", "png")


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "table",
    type=click.Choice(list(FORMATS)),
    help="Write tables in this format (default: by the suffix of --out, or else md)",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write this file (default: stdout)")
@click.option(
    "--figures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also draw the figures, into this folder",
)
@click.option(
    "--figure-format",
    "kinds",
    type=click.Choice(FIGURE_FORMATS),
    multiple=True,
    help="Draw them in this format; repeatable (default: all)",
)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Convert exported weights (default: as they are)")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write timelines, for Perfetto")  # fmt: skip
def export(
    paths: tuple[Path, ...], table: str | None, out: Path | None, figures: Path | None, kinds: tuple[str, ...],
    dtype: str | None, trace: Path | None,
) -> int:  # fmt: skip
    """Turn finished runs and comparisons into tables, figures and traces: give their folders.

    Runs that did the same work make a table; live, emulated and simulated ones are never mixed in one. The folder of a
    checkpoint on disk becomes a file of its weights: --out model.safetensors.
    """
    if out is not None and out.suffix.lower() == WEIGHTS:
        if table or figures or kinds or trace:
            raise ConfigError(f"--out {out} takes the weights of one checkpoint: leave out the options of tables")
        return _export_weights(paths, out, dtype)
    if dtype is not None:
        raise ConfigError(f"--dtype is for weights: add --out model{WEIGHTS}")
    if is_checkpoint(paths[0].resolve()):
        raise ConfigError(f"{paths[0]} is a checkpoint on disk: add --out model{WEIGHTS}")
    chosen = _format(table, out)
    if kinds and figures is None:
        raise ConfigError("--figure-format says nothing without --figures DIR")
    if FORMATS[chosen].is_page and out is None and sys.stdout.isatty():
        raise ConfigError("a page of HTML is nothing to read in a terminal: add --out report.html")
    from capricorn.compare.finished_runs import load_comparisons

    with hushed(), all_or_nothing() as outputs:
        loaded = load_comparisons(paths)
        pictures = _draw(loaded) if figures or FORMATS[chosen].is_page else []
        text = render(chosen, [comparison for comparison, _ in loaded], pictures)
        if figures:
            _write_figures(outputs, figures, loaded, pictures, kinds or FIGURE_FORMATS)
        if trace:
            _write_trace(outputs, trace, loaded)
        if out:
            outputs.write(out, text.encode())
    if out is None:
        click.echo(text, nl=False)
    for place in (out, figures, trace):
        if place:
            click.echo(f"wrote {place}", err=True)
    return 0


def _export_weights(paths: Sequence[Path], out: Path, dtype: str | None) -> int:
    """Writes the weights of the checkpoint that is the one path."""
    folder = paths[0].resolve()
    if len(paths) > 1 or not is_checkpoint(folder):
        raise ConfigError(f"--out {out} takes the weights of one checkpoint on disk: give its folder, iteration-...")
    with hushed(), all_or_nothing() as outputs:
        from capricorn.runtime.persist.export_weights import weights_of

        outputs.write(out, weights_of(folder, dtype))
    click.echo(f"wrote {out}", err=True)
    return 0


def _format(table: str | None, out: Path | None) -> str:
    """Returns the format that was asked for; by the suffix of the file if that is all there is.

    Raises:
        ConfigError: the two contradict each other, or no format has that suffix.
    """
    by_suffix = BY_SUFFIX.get(out.suffix.lower()) if out else None
    if table and by_suffix and table != by_suffix:
        raise ConfigError(f"--format {table} contradicts --out {out}, which is {by_suffix} by its suffix")
    if out and not (table or by_suffix):
        raise ConfigError(
            f"--out {out}: which format is that? end it in one of {', '.join(BY_SUFFIX)}, or add --format"
        )
    return table or by_suffix or "md"


def _draw(loaded: Loaded) -> list[list[Picture]]:
    from capricorn.report.figures.comparison_figures import pictures

    return [pictures(comparison, folders) for comparison, folders in loaded]


def _write_figures(
    outputs: Outputs, folder: Path, loaded: Loaded, pictures: Sequence[Sequence[Picture]], kinds: Sequence[str]
) -> None:
    """Writes the figures in the place of those of an earlier export, and of nothing else.

    Raises:
        ConfigError: something else is there.
    """
    from capricorn.report.export.gallery import INDEX, figure_files, files_of

    ours = files_of(read_whole(folder / INDEX))
    for name, data in figure_files([comparison for comparison, _ in loaded], pictures, kinds).items():
        if name not in ours and (folder / name).exists():
            raise ConfigError(f"{folder / name} is of no earlier export: move it, or name another folder for --figures")
        outputs.write(folder / name, data)


def _write_trace(outputs: Outputs, path: Path, loaded: Loaded) -> None:
    from capricorn.report.export.perfetto import write_trace

    with outputs.open(path) as file:
        write_trace(file, _traced(loaded))


def _traced(loaded: Loaded) -> list[TracedRun]:
    """Returns every run once, in the order of tables."""
    from capricorn.records.samples import read_run
    from capricorn.report.export.perfetto import TracedRun

    runs = {folder: label for _, folders in loaded for label, each in folders.items() for folder in each}
    return [TracedRun(label, read_run(folder), folder) for folder, label in runs.items()]
