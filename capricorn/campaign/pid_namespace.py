"""Runs whose launcher is process 1 of a namespace of its own, as in a container.

Each is made by a process that does nothing else, `python -m capricorn.campaign.pid_namespace SCENARIO OUT`, given the
file of a scenario and the folder of its records. It says where its run folder is, and at last why it failed, if it did.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from capricorn.campaign.testbeds import ENTER
from capricorn.config.scenario import Scenario
from capricorn.errors import CapricornError
from capricorn.launch.interrupts import Interrupts
from capricorn.launch.launcher import TICK_S, RunListener, launch
from capricorn.process import PYTHON, end_child
from capricorn.runtime.store.node_store import RUN_PREFIX
from capricorn.units import Seconds

MODULE: Final = "capricorn.campaign.pid_namespace"
STARTED: Final = "run folder: "
END_TIMEOUT_S: Final[Seconds] = 20.0


def launch_as_pid_1(scenario: Scenario, out: Path, listener: RunListener) -> None:
    """Runs the scenario as `launch` does; of what happens the listener hears the start alone.

    Raises:
        CapricornError: the run failed, with what it said.
        KeyboardInterrupt: it was interrupted, and has been ended.
    """
    with TemporaryDirectory() as folder, Interrupts() as interrupts:
        asked, said = Path(folder) / "scenario.json", Path(folder) / "said"
        asked.write_text(scenario.model_dump_json(), encoding="utf-8")
        with said.open("wb") as output:
            process = subprocess.Popen(
                [*ENTER, "--kill-child", *PYTHON, MODULE, str(asked), str(out)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run_dir: Path | None = None
        try:
            while process.poll() is None:
                interrupts.check()
                listener.on_tick()
                time.sleep(TICK_S)
                if run_dir is None and (run_dir := _run_dir(said)) is not None:
                    listener.on_start(run_dir, scenario)
        finally:
            _end(process)
            if run_dir is not None:  # it is gone already unless the launcher was killed
                shutil.rmtree(Path(scenario.store.root) / f"{RUN_PREFIX}{run_dir.name}", ignore_errors=True)
        if process.returncode:
            raise CapricornError(_lines(said)[-1])


def _lines(said: Path) -> list[str]:
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()] or ["it has said nothing"]


def _run_dir(said: Path) -> Path | None:
    found = (line.removeprefix(STARTED) for line in _lines(said) if line.startswith(STARTED))
    return next(map(Path, found), None)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, who ends all others; by force if it takes too long."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for launcher in psutil.Process(process.pid).children():
            launcher.send_signal(signal.SIGTERM)
    end_child(process, process.pid, END_TIMEOUT_S, "the namespace of a launcher")


class _Teller(RunListener):
    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        print(f"{STARTED}{run_dir}", flush=True)


def main() -> None:
    """Makes the run that argv[1] describes, below the folder argv[2]."""
    scenario = Scenario.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        launch(scenario, Path(sys.argv[2]), _Teller())
    except (CapricornError, OSError) as error:
        sys.exit(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
