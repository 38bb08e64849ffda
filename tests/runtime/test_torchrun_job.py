"""Joining a job from a training loop of one's own."""

from __future__ import annotations

import pytest

from capricorn.config.scenario import SystemConfig
from capricorn.errors import ConfigError
from capricorn.runtime.torchrun_job import join_job

TORCHRUN = {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_process_that_torchrun_did_not_start_is_told_so(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"^{missing} is not set; start the job with torchrun$"):
        join_job("run", SystemConfig())
