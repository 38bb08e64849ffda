"""The launcher's side of a warm process: starts it, and has it fork nodes, in namespaces of theirs.

Knows no torch; what is forked says what happens to it over a link of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from capricorn.emulation.fabric import Entry
from capricorn.errors import CapricornError
from capricorn.units import Seconds

READY_TIMEOUT_S: Final[Seconds] = 120.0
STOP_TIMEOUT_S: Final[Seconds] = 10.0


class Standby:
    """A process that waits with everything imported. May serve many runs, one after the other."""

    def __init__(self) -> None:
        """Starts it; it is waited for by the first fork."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(READY_TIMEOUT_S)
        self._is_ready = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "capricorn.launch.fork_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Read when torch is imported: ranks that share a machine must not each take all of its cores.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def fork(
        self, role: str, *arguments: Any, fds: Sequence[int] = (), entry: Entry, log: Path, system: str = ""
    ) -> int:
        """Has a process of that role forked where the entry leads; yields its pid.

        Args:
            role: `node` or `store`, see `harness.standby`.
            arguments: of the role, after its descriptors, as JSON can say them.
            fds: descriptors that it is given copies of.
            entry: the namespaces it enters.
            log: where it writes.
            system: a checkpointing system to import before.

        Raises:
            CapricornError: the warm process could not start or has ended.
        """
        request = {
            "role": role,
            "arguments": arguments,
            "namespaces": len(entry.pass_fds),
            "log": str(log),
            "system": system,
        }
        try:
            if not self._is_ready:
                self._is_ready = bool(self._channel.recv(64))
            socket.send_fds(self._channel, [json.dumps(request).encode()], [*entry.pass_fds, *fds])
            answer = self._channel.recv(64)
        except OSError:
            answer = b""
        if not answer:
            raise CapricornError(f"the process that forks the workers has ended: {self._last_words()}")
        return int(answer)

    def close(self) -> None:
        """Ends it, and with it all that it has forked."""
        self._channel.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _last_words(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)  # one that is stopped takes no other
        self._process.wait()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"
