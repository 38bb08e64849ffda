"""What several files of this folder compare their runs with."""

from __future__ import annotations

import pytest

from tests.support.runs import Run, run


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of 20 iterations of mixtral-tiny on two nodes of one rank, whose store is kept."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "stores").mkdir()
    return run(folder / "out", "--keep-store", "--set", f"store.root={folder / 'stores'}")
