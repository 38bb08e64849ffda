"""What goes out, in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capricorn.planner.plan import StreamPlanner


@given(st.integers(0, 1 << 20), st.integers(1 << 10, 1 << 16))
def test_chunks_tile_the_shard_once(shard_bytes: int, chunk_bytes: int) -> None:
    chunks = StreamPlanner(shard_bytes, chunk_bytes).plan(1).chunks
    ends = [0, *(chunk.offset + chunk.num_bytes for chunk in chunks)]
    assert [chunk.offset for chunk in chunks] == ends[:-1]
    assert ends[-1] == shard_bytes
    assert all(0 < chunk.num_bytes <= chunk_bytes for chunk in chunks)
