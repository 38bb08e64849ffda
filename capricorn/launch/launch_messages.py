"""What the processes of a run say to each other, each over a pair of sockets that only the two of them have.

| from        | to          | message           | what it says                                                    |
|-------------|-------------|-------------------|-----------------------------------------------------------------|
| fork server | launcher    | `ForkServerReady` | everything is imported; it is sent once                         |
| launcher    | fork server | `ForkRequest`     | fork a process and make it a node agent, or the rendezvous store |
| fork server | launcher    | `Forked`          | the answer to each request: the process                         |
| launcher    | node agent  | `StartAttempt`    | have all your ranks take part in that attempt                   |
| node agent  | launcher    | `NodeAlive`       | a heartbeat, while nothing else is to be said                   |
| node agent  | launcher    | `RankFrozen`      | a rank gives no heartbeat; it is killed now                     |
| node agent  | launcher    | `RankEnded`       | a rank's process has ended, or has left the attempt as failed   |
| rank        | node agent  | `TrainingBegan`   | I have finished my first iteration in the attempt               |
| rank        | node agent  | `AttemptLeft`     | my process is free for another attempt                          |
| node agent  | rank        | `StartAttempt`    | take part in that attempt                                       |

A closed socket says that the process at its other end is gone. Sockets keep the bounds of messages, each of which is
one JSON object. Knows no torch.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from capricorn.config.fields import FrozenModel
from capricorn.units import Seconds

MAX_MESSAGE_BYTES: Final = 1 << 16


class RunNodeAgent(FrozenModel):
    """The forked process runs a node. Its one descriptor is its end of the link to the launcher."""

    role: Literal["node-agent"] = "node-agent"
    job_file: Path
    node: int
    endpoint: tuple[str, int]
    """Host and port of the rendezvous store."""
    interface: str
    """The name of the node's network interface."""
    system: str
    """The checkpointing system, which is imported before the fork."""


class ServeRendezvous(FrozenModel):
    """The forked process serves the rendezvous store. Its one descriptor is the listening socket."""

    role: Literal["rendezvous"] = "rendezvous"


Role = Annotated[RunNodeAgent | ServeRendezvous, Field(discriminator="role")]


class ForkRequest(FrozenModel):
    """What is forked. The request carries the descriptors of the namespaces to enter, and then those of the role."""

    become: Role
    num_namespaces: int
    log: Path
    """Where the process writes what it prints."""


class ForkServerReady(FrozenModel):
    """The fork server has imported everything."""

    says: Literal["ready"] = "ready"


class Forked(FrozenModel):
    """The process that was asked for."""

    pid: int


class StartAttempt(FrozenModel):
    """The number of the attempt to take part in, from 0."""

    attempt: int


class TrainingBegan(FrozenModel):
    """The number of the attempt in which a rank has finished an iteration."""

    says: Literal["training"] = "training"
    attempt: int


class AttemptLeft(FrozenModel):
    """The number of the attempt that a rank has left, after it failed or was told to leave."""

    says: Literal["left"] = "left"
    attempt: int


class NodeAlive(FrozenModel):
    """A node agent is not frozen."""

    says: Literal["alive"] = "alive"


class RankFrozen(FrozenModel):
    """A rank has given no heartbeat for that long."""

    says: Literal["frozen"] = "frozen"
    rank: int
    attempt: int
    silent_s: Seconds


class RankEnded(FrozenModel):
    """A rank is through with an attempt: 0 if it has trained to the end, negative for the signal that ended it."""

    says: Literal["ended"] = "ended"
    rank: int
    attempt: int
    exit_code: int


NodeReport = Annotated[NodeAlive | RankFrozen | RankEnded, Field(discriminator="says")]
_REPORT: Final[TypeAdapter[NodeAlive | RankFrozen | RankEnded]] = TypeAdapter(NodeReport)
RankReport = Annotated[TrainingBegan | AttemptLeft, Field(discriminator="says")]
_RANK_REPORT: Final[TypeAdapter[TrainingBegan | AttemptLeft]] = TypeAdapter(RankReport)


def to_bytes(message: FrozenModel) -> bytes:
    """Returns a message as it is sent."""
    return message.model_dump_json().encode()


def node_report(message: bytes) -> NodeAlive | RankFrozen | RankEnded:
    """Returns what a node agent has said."""
    return _REPORT.validate_json(message)


def rank_report(message: bytes) -> TrainingBegan | AttemptLeft:
    """Returns what a rank has said."""
    return _RANK_REPORT.validate_json(message)


def receive(channel: socket.socket) -> bytes:
    """Returns the next message; empty if the process at the other end is gone."""
    try:
        return channel.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return b""
