"""The fork server (a zygote): has torch and the runtime imported and runs nothing, so what it forks works at once.

Started once for a run, or for many, by `fork_client.ForkServer`; `launch_messages` says what it is asked and answers.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Final

from capricorn.emulation.namespaces import enter
from capricorn.launch.launch_messages import (
    MAX_MESSAGE_BYTES,
    Forked,
    ForkRequest,
    ForkServerReady,
    RunNodeAgent,
    to_bytes,
)
from capricorn.process import die_with_parent
from capricorn.runtime.comm.addresses import LOOPBACK

MAX_FDS: Final = 64
MAX_PORT_DIGITS: Final = 5
CONNECT_TIMEOUT: Final = timedelta(seconds=30)


def main() -> None:
    """Forks what is asked for over the socket with descriptor argv[1] until it is closed; argv[2] is the parent."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whom it concerns sees its child's socket close
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to all processes of a step: the launcher ends us
    channel = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    channel.send(to_bytes(ForkServerReady()))
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_FDS)
        if not message:
            return
        request = ForkRequest.model_validate_json(message)
        _import_system(request)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            channel.close()
            _become(request, fds, parent)
        for fd in fds:
            os.close(fd)
        channel.send(to_bytes(Forked(pid=pid)))


def _import_all() -> None:
    """Imports what takes long and starts no thread; torch's optimizers import its compiler when one is first made."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.checkpoint.state_dict_saver

    import capricorn.launch.node_agent
    import capricorn.launch.worker
    import capricorn.runtime.persist.writer  # noqa: F401

    _connect_once()
    torch.set_num_threads(1)  # results are bit-reproducible at a fixed number of threads only
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it shares with us


def _connect_once() -> None:
    """Has torch make its first connection: it then asks for this machine's name, once in a process.

    Where no server of names answers that takes 6 s, which each rank would take at its start; those that are forked from
    here have it behind them. Leaves no thread.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        die_with_parent(os.getppid())
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    os.close(writing)
    try:
        if port := os.read(reading, MAX_PORT_DIGITS):
            TCPStore(LOOPBACK, int(port), is_master=False, timeout=CONNECT_TIMEOUT)
    except DistError as error:  # ranks will meet it, too, and say so
        print(f"the first connection failed: {error}", file=sys.stderr)
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)


def _import_system(request: ForkRequest) -> None:
    from capricorn.systems.registry import load_system

    if isinstance(request.become, RunNodeAgent):
        load_system(request.become.system)


def _become(request: ForkRequest, fds: list[int], parent: int) -> None:
    """Turns a forked process into what was asked for, and ends it with that."""
    from capricorn.launch.node_agent import run_node_agent
    from capricorn.launch.rendezvous import serve

    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()  # a Ctrl-C at the terminal is for the launcher, which ends the others in order
        _print_to(request.log)
        for fd in fds[: request.num_namespaces]:
            enter(fd)
            os.close(fd)
        # Not before: entering a user namespace undoes it.
        die_with_parent(parent)
        (fd,) = fds[request.num_namespaces :]
        if isinstance(request.become, RunNodeAgent):
            run_node_agent(request.become, fd)
        else:
            serve(fd)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here, and says in its log why
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    main()
