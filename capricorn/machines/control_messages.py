"""What machines say to each other during a command that runs on all of them. Machine 0 conducts, the others follow.

| from      | to        | message         | what it says                                                        |
|-----------|-----------|-----------------|---------------------------------------------------------------------|
| follower  | conductor | `Join`          | I am here, and was told to run this                                 |
| conductor | follower  | `AskClock`      | what time is it by your monotonic clock?                            |
| follower  | conductor | `ClockReading`  | that time                                                           |
| conductor | follower  | `Welcome`       | you are that node, or a spare                                       |
| conductor | follower  | `BeginRun`      | make ready for this run                                             |
| follower  | conductor | `Ready`         | I am                                                                |
| follower  | conductor | `Refused`       | I cannot, and why                                                   |
| conductor | follower  | `StartNode`     | be that node of the run: start its agent, with an empty store       |
| conductor | follower  | `ToAgent`       | tell your node agent this                                           |
| follower  | conductor | `FromAgent`     | my node agent says this                                             |
| follower  | conductor | `AgentEnded`    | my node agent has ended                                             |
| conductor | follower  | `EndNode`       | end your node agent                                                 |
| follower  | conductor | `FileGrew`      | this was appended to a file of the run's records                    |
| follower  | conductor | `MachineAlive`  | a heartbeat                                                         |
| conductor | follower  | `EndRun`        | end all of the run, and send what is left of its records            |
| follower  | conductor | `RunEnded`      | all of it is ended, removed and sent                                |
| conductor | follower  | `Goodbye`       | the command is over                                                 |

What node agents and launcher say to each other is carried as it is; see `launch_messages`. A closed connection says
that the machine at its other end, or its command, is gone. Knows no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from capricorn.config.fields import FrozenModel
from capricorn.errors import CapricornError
from capricorn.records.job_file import Job
from capricorn.units import Bytes, Seconds


class Join(FrozenModel):
    """A machine is there."""

    says: Literal["join"] = "join"
    machine: int
    """Its number, as --node-rank gave it; those from the number of nodes on are spares."""
    host: str
    address: str
    """By which the others reach it."""
    facts: dict[str, Any]
    """What it was told to run, by the names that users know; see `agreement`."""


class AskClock(FrozenModel):
    """The monotonic clock of the other machine is asked for."""

    says: Literal["ask-clock"] = "ask-clock"


class ClockReading(FrozenModel):
    """The time by the monotonic clock of this machine."""

    says: Literal["clock"] = "clock"
    at_s: Seconds


class Welcome(FrozenModel):
    """The place of a machine: a node, or that of a spare, None."""

    says: Literal["welcome"] = "welcome"
    node: int | None


class BeginRun(FrozenModel):
    """A run begins; its paths are those of machine 0."""

    says: Literal["begin-run"] = "begin-run"
    job: Job
    token: str
    """What is written in the file of that name in each folder that all machines share."""
    epoch_s: Seconds
    """The begin of the follower's monotonic clock, by that of machine 0 in this run."""


class Ready(FrozenModel):
    """The machine has all it needs for the run."""

    says: Literal["ready"] = "ready"


class Refused(FrozenModel):
    """The machine lacks something for the run."""

    says: Literal["refused"] = "refused"
    why: str
    is_users_mistake: bool


class StartNode(FrozenModel):
    """The machine is a node of the run now."""

    says: Literal["start-node"] = "start-node"
    node: int
    start: int
    """The number of this start, so that the end of an agent is not taken for that of its successor."""
    endpoint: tuple[str, int]
    """Host and port of the rendezvous store."""
    claimed_faults: tuple[str, ...]
    """The marks of the failures that have been injected so far, so that none is injected again."""


class ToAgent(FrozenModel):
    """A message for the node agent."""

    says: Literal["to-agent"] = "to-agent"
    message: str


class FromAgent(FrozenModel):
    """A message of the node agent."""

    says: Literal["from-agent"] = "from-agent"
    message: str


class AgentEnded(FrozenModel):
    """The node agent has closed its link."""

    says: Literal["agent-ended"] = "agent-ended"
    start: int
    """By which it was started."""


class EndNode(FrozenModel):
    """The node agent is to end, with its ranks."""

    says: Literal["end-node"] = "end-node"
    is_forced: bool
    """Whether it is killed at once, instead of told to end."""


class FileGrew(FrozenModel):
    """What was appended to a file of the run's records; nothing for one that is new and empty."""

    says: Literal["file-grew"] = "file-grew"
    name: str
    """Its path within the folder of the run."""
    text: str


class MachineAlive(FrozenModel):
    """The command on the machine is not frozen."""

    says: Literal["machine-alive"] = "machine-alive"


class EndRun(FrozenModel):
    """The run is over."""

    says: Literal["end-run"] = "end-run"


class RunEnded(FrozenModel):
    """Nothing of the run is left on the machine."""

    says: Literal["run-ended"] = "run-ended"
    store_bytes: Bytes
    """What its part of the memory store came to."""


class Goodbye(FrozenModel):
    """The command is over."""

    says: Literal["goodbye"] = "goodbye"
    exit_code: int
    why: str = ""
    """In one line, where it failed."""


def farewell_of(error: BaseException | None) -> Goodbye:
    """Returns how a command says goodbye that is ended by that error, or by none."""
    if error is None:
        return Goodbye(exit_code=0)
    if isinstance(error, CapricornError):
        return Goodbye(exit_code=error.exit_code, why=" ".join(str(error).split()))
    if isinstance(error, KeyboardInterrupt):
        return Goodbye(exit_code=1, why="machine 0 was interrupted")
    return Goodbye(exit_code=1, why=f"machine 0 failed: {type(error).__name__}")


FollowerMessage = Join | ClockReading | Ready | Refused | FromAgent | AgentEnded | FileGrew | MachineAlive | RunEnded
ConductorMessage = AskClock | Welcome | BeginRun | StartNode | ToAgent | EndNode | EndRun | Goodbye
_FOLLOWER: Final[TypeAdapter[FollowerMessage]] = TypeAdapter(Annotated[FollowerMessage, Field(discriminator="says")])
_CONDUCTOR: Final[TypeAdapter[ConductorMessage]] = TypeAdapter(Annotated[ConductorMessage, Field(discriminator="says")])


def follower_message(data: bytes) -> FollowerMessage:
    """Returns what a follower has said."""
    return _FOLLOWER.validate_json(data)


def conductor_message(data: bytes) -> ConductorMessage:
    """Returns what the conductor has said."""
    return _CONDUCTOR.validate_json(data)
