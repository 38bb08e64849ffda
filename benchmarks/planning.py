"""What one plan of a large model takes: the search for the quantile, and the making of the chunks."""

from __future__ import annotations

from statistics import median

from benchmarks.timing import interleaved
from capricorn.planner.estimate import SpanEstimate
from capricorn.planner.link_model import LinkEstimator, LinkModel
from capricorn.planner.partition import partition
from capricorn.units import MIB

NUM_SPANS, SHARD_BYTES, CHUNK_BYTES = 256, 10 * 10**9, 32 * MIB
SPAN = SpanEstimate(0.01, 0.0005)


def main() -> None:
    """Prints the time of a plan where everything fits at some quantile, and of the fit of the link before it."""
    links = LinkEstimator()
    for count in range(1, 33):
        links.note(count * MIB, 50e-6 + count * MIB / 4e9)
    # The spans hold 1.02 times the shard at their medians, so that the quantile has to be searched.
    link = LinkModel(50e-6, 1.02 * SHARD_BYTES / (NUM_SPANS * (SPAN.median_s - 50e-6)))

    def plan() -> int:
        return len(partition([SPAN] * NUM_SPANS, link, SHARD_BYTES, 1, CHUNK_BYTES, 0.5).chunks)

    durations = interleaved({"plan": plan, "link": links.model})
    print(f"plan of {NUM_SPANS} spans and {plan()} chunks: {1e3 * median(durations['plan']):.2f} ms")
    print(f"fit of a link: {1e3 * median(durations['link']):.2f} ms")
