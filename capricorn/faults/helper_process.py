"""Processes that go on with a fault when the rank that injected it is dead: started by it, ended by the launcher.

Each also ends by itself with the launcher, see `LauncherWatch`.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
from typing import Final

import psutil

from capricorn.errors import CapricornError
from capricorn.faults.process_registry import ProcessName
from capricorn.process import PYTHON, kill_child
from capricorn.records.job_file import Job
from capricorn.units import Seconds

HELPERS: Final = "helpers"
"""Of a run folder: the helpers that were started."""
START_TIMEOUT_S: Final[Seconds] = 60.0
END_TIMEOUT_S: Final[Seconds] = 10.0


def start_helper(job: Job, module: str, *arguments: str) -> None:
    """Starts a module with the file of the launcher's lock as argv[1]; returns when it has said a word.

    Raises:
        CapricornError: it has not said one within `START_TIMEOUT_S`, or has ended without.
    """
    helper = subprocess.Popen(
        [*PYTHON, module, str(job.store_dir / "lock"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    name = ProcessName.of(helper.pid)
    with (job.run_dir / HELPERS).open("a") as file:
        file.write(f"{json.dumps(name)}\n")
    assert helper.stdout is not None
    is_heard = select.select([helper.stdout], [], [], START_TIMEOUT_S)[0]
    if not is_heard or not helper.stdout.readline():
        kill_child(helper, module)
        raise CapricornError(f"{module} " + ("has ended" if is_heard else f"did not start in {START_TIMEOUT_S:g} s"))


def end_helpers(job: Job) -> None:
    """Ends all helpers of a run, by force those that take too long."""
    with contextlib.suppress(FileNotFoundError):
        for line in (job.run_dir / HELPERS).read_text().splitlines():
            _end(ProcessName(*json.loads(line)))


def _end(name: ProcessName) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        name.send(number)
        if (process := name.find()) is None:
            return
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
