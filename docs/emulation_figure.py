"""Draws docs/emulation.svg from a run: one modelled iteration, and its parts beside the target's.

python docs/emulation_figure.py RUN_OF_NONE RUN_OF_BLOCKING [OUT.svg]; needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from capricorn.records.samples import ITERATIONS, OPS, IterationSample, OpSample, RunRecord, read_run, read_samples

COLORS = {
    "computing": "#4c78a8", "all-to-all": "#f58518", "reduce": "#72b7b2", "update": "#b5b5b5", "checkpoint": "#54a24b",
}  # fmt: skip
KINDS = {
    "attention": "computing", "gate": "computing", "expert": "computing", "head": "computing",
    "dispatch": "all-to-all", "combine": "all-to-all", "reduce": "reduce", "update": "update",
}  # fmt: skip
PARTS = ("computing", "all-to-all", "reduce", "checkpoint")


def _ops(folder: Path) -> list[OpSample]:
    """The ops of the last sampled iteration, with times since its first rank began it."""
    samples = list(read_samples(folder / OPS, OpSample))
    last = max(sample.iteration for sample in samples)
    iterations = [s for s in read_samples(folder / ITERATIONS, IterationSample) if s.iteration == last]
    begin_s = {sample.rank: sample.at_s - sample.duration_s for sample in iterations}
    late_s = {rank: at_s - min(begin_s.values()) for rank, at_s in begin_s.items()}
    return [
        op.model_copy(update={"begin_s": op.begin_s + late_s[op.rank], "end_s": op.end_s + late_s[op.rank]})
        for op in samples
        if op.iteration == last and op.kind in KINDS
    ]


def _measured(folder: Path, blocking: Path) -> dict[str, float]:
    """Seconds of each part: computing of the mean rank, each all-to-all from the begin of the last rank to the end.

    A checkpoint alone on the link is what a rank stalls for it when nothing is hidden.
    """
    ops = _ops(folder)
    ranks = sorted({op.rank for op in ops})

    def total(name: str) -> list[float]:
        return [sum(op.end_s - op.begin_s for op in ops if op.rank == r and KINDS[op.kind] == name) for r in ranks]

    exchanges: dict[tuple[int, str, str], list[OpSample]] = {}
    for op in ops:
        if KINDS[op.kind] == "all-to-all":
            exchanges.setdefault((op.layer, op.direction, op.kind), []).append(op)
    moving_s = [max(op.end_s for op in each) - max(op.begin_s for op in each) for each in exchanges.values()]
    warmup = read_run(blocking).config.train.warmup
    stalls = [s.stall_s for s in read_samples(blocking / ITERATIONS, IterationSample) if s.iteration > warmup]
    return {
        "computing": sum(total("computing")) / len(ranks),
        "all-to-all": sum(moving_s),
        "reduce": min(total("reduce")),
        "checkpoint": median(stalls),
    }


def _draw_timeline(axes: plt.Axes, folder: Path, record: RunRecord) -> None:
    for op in _ops(folder):
        axes.barh(op.rank, op.end_s - op.begin_s, left=op.begin_s, height=0.8, color=COLORS[KINDS[op.kind]])
    axes.set_yticks(range(record.config.topology.world_size))
    axes.set(xlabel="seconds here", ylabel="rank", ylim=(3.6, -0.6))
    axes.set_title("one iteration of the scale model, as recorded", loc="left")
    used = [name for name in COLORS if name != "checkpoint"]
    handles = [Patch(color=COLORS[name], label=name) for name in used]
    axes.legend(handles=handles, ncols=4, loc="upper right", bbox_to_anchor=(1.0, 1.2), frameon=False)


def _draw_parts(axes: plt.Axes, record: RunRecord, measured: dict[str, float]) -> None:
    emulation = record.config.emulation
    assert emulation is not None
    assert emulation.there is not None
    keys = dict(zip(PARTS, ("compute_s", "all_to_all_s", "reduce_s", "checkpoint_s"), strict=True))
    columns = {
        "target, by formula": {part: getattr(emulation.there, key) for part, key in keys.items()},
        "scale model, by formula": {part: getattr(emulation.here, key) for part, key in keys.items()},
        "scale model, measured": measured,
    }
    width = 0.8 / len(columns)
    for place, (label, parts) in enumerate(columns.items()):
        heights = [parts[part] / parts["computing"] for part in PARTS]
        lefts = [number + place * width for number in range(len(PARTS))]
        bars = axes.bar(lefts, heights, width * 0.92, label=label, color=["#c7c7c7", "#7f7f7f", "#333333"][place])
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8)
    axes.set_xticks([number + width for number in range(len(PARTS))], PARTS)
    axes.set(ylabel="relative to computing", title="proportions")
    axes.legend()


def main() -> None:
    """Writes the figure."""
    folder, blocking = Path(sys.argv[1]), Path(sys.argv[2])
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(__file__).with_name("emulation.svg")
    record = read_run(folder)
    plt.rcParams["svg.hashsalt"] = "capricorn"
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6.5), layout="constrained")
    _draw_timeline(above, folder, record)
    _draw_parts(below, record, _measured(folder, blocking))
    figure.savefig(out, metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    main()
