"""Small file systems for faults that fill one up: mounted for a campaign, and gone with it or with the next one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from capricorn.campaign.small_file_systems import PREFIX, remove_leftovers, small_file_system
from capricorn.errors import CapricornError
from capricorn.units import MIB


def test_a_small_file_system_is_gone_at_the_end_and_a_leftover_with_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("capricorn.files.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        with small_file_system(MIB) as root:
            assert root.is_mount()
            remove_leftovers()
            assert root.is_mount(), "it is ours, and we are alive"
            (root / "open").write_bytes(bytes(100))
    except CapricornError as error:
        pytest.skip(str(error))
    left = tmp_path / f"{PREFIX}left"
    (left / "fs").mkdir(parents=True)
    (left / "lock").touch()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", left / "fs"], check=False)
    assert mounted.returncode == 0
    remove_leftovers()
    assert not list(tmp_path.iterdir())
