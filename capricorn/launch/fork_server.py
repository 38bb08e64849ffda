"""A warm process: torch and the harness are imported and nothing runs yet. What it forks is at work in milliseconds.

Started once for a run, or for many, by `harness.warm`; what it forks is told by `harness.node` and below.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from capricorn.emulation.namespaces import enter
from capricorn.process import die_with_parent

READY: Final = b"ready"
MESSAGE_BYTES: Final = 1 << 16
MAX_FDS: Final = 64


def main() -> None:
    """Forks what is asked for over the socket with descriptor argv[1] until it is closed; argv[2] is the parent."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whom it concerns sees its child's socket close
    channel = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    channel.send(READY)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MAX_FDS)
        if not message:
            return
        request = json.loads(message)
        _load(request["system"])
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(request, fds)
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


def _import_all() -> None:
    """What takes long and starts no thread: torch's optimizers import its compiler when the first of them is made."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.checkpoint.state_dict_saver

    import capricorn.launch.node_agent
    import capricorn.launch.worker  # noqa: F401

    torch.set_num_threads(1)  # results are bit-reproducible at a fixed number of threads only
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it shares with us


def _load(system: str) -> None:
    from capricorn.systems.registry import load_system

    if system:
        load_system(system)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Turns a forked process into what was asked for, and ends it with that."""
    from capricorn.launch.node_agent import run_node
    from capricorn.launch.rendezvous import serve

    roles: dict[str, Callable[..., None]] = {"node": run_node, "store": serve}
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # a Ctrl-C at the terminal is for the launcher, which ends the others in order
        _write_to(Path(request["log"]))
        num_namespaces = request["namespaces"]
        for fd in fds[:num_namespaces]:
            enter(fd)
            os.close(fd)
        # Not before: entering a user namespace undoes it.
        die_with_parent()
        roles[request["role"]](*fds[num_namespaces:], *request["arguments"])
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here, and says in its log why
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    main()
