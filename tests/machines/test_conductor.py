"""Which machine becomes which node, and what is carried between launcher and machines that are played here."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capricorn.config.fields import FrozenModel
from capricorn.config.launch_config import LaunchConfig
from capricorn.emulation.fabric import NamespaceEntry
from capricorn.errors import CapricornError, ConfigError, TransportError
from capricorn.launch.fork_client import FakeForkServer
from capricorn.launch.launch_messages import RunNodeAgent, receive
from capricorn.launch.nodes import VacantError
from capricorn.machines import conductor as module
from capricorn.machines.conductor import Conductor
from capricorn.machines.control_messages import (
    AgentEnded,
    AskClock,
    BeginRun,
    ClockReading,
    EndNode,
    EndRun,
    FileGrew,
    FromAgent,
    Goodbye,
    Join,
    MachineAlive,
    Ready,
    Refused,
    RunEnded,
    StartNode,
    ToAgent,
    Welcome,
    conductor_message,
)
from capricorn.machines.follower import connect
from capricorn.records.job_file import Job
from tests.support.fault_jobs import TINY
from tests.support.machines import free_port

FACTS = {"train.seed": 0}
WAIT_S = 5.0


class PlayedMachine:
    """A machine that says what it is told to say."""

    def __init__(self, launch: LaunchConfig, number: int, facts: dict[str, Any] | None = None) -> None:
        self.number = number
        self._link = connect(launch.model_copy(update={"node_rank": number}))
        self.say(Join(machine=number, host=f"host{number}", address=f"10.0.0.{number}", facts=facts or FACTS))

    def say(self, message: FrozenModel) -> None:
        self._link.send(message)

    def hear(self, kind: type[FrozenModel], conductor: Conductor | None = None) -> Any:
        """The next message, which must be of that kind; asked what time it is, it answers."""
        for _ in range(200):
            if conductor is not None:
                conductor.wait([], 0.02)
            try:
                message = conductor_message(self._link.next(0.05 if conductor is not None else WAIT_S))
            except TransportError as error:
                if "within" in str(error):
                    continue
                raise
            if isinstance(message, AskClock) and kind is not AskClock:
                self.say(ClockReading(at_s=0.0))
                continue
            assert isinstance(message, kind), message
            return message
        raise AssertionError(f"no {kind.__name__} came")

    def vanish(self) -> None:
        self._link.close()


class Stage:
    """A conductor of two nodes and a spare, with machines that are played."""

    def __init__(self, folder: Path) -> None:
        self.launch = LaunchConfig(nnodes=2, spares=1, rdzv_endpoint=f"127.0.0.1:{free_port()}")
        self.lines: list[str] = []
        self.conductor = Conductor(self.launch, FACTS, self.lines.append, forker=FakeForkServer())
        self.job = job_in(folder)
        self.machines: list[PlayedMachine] = []

    def join(self, number: int, facts: dict[str, Any] | None = None) -> PlayedMachine:
        machine = PlayedMachine(self.launch, number, facts)
        self.machines.append(machine)
        return machine

    def welcomed(self, number: int) -> PlayedMachine:
        machine = self.join(number)
        machine.hear(Welcome, self.conductor)
        return machine

    def begin(self, *machines: PlayedMachine) -> None:
        """Begins a run, for which these machines are ready already."""
        for machine in machines:
            machine.say(Ready())
        self.conductor.begin_run(self.job)
        for machine in machines:
            machine.hear(BeginRun)

    def start_node(self) -> tuple[socket.socket, Any]:
        """Has node 1 started; the launcher's end of its link, and the process it takes for the node agent."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        role = RunNodeAgent(job_file=Path("job"), node=1, endpoint=("h", 1), interface="lo", system="none")
        with theirs:
            process = self.conductor.fork(role, fds=[theirs.fileno()], entry=NamespaceEntry(), log=Path("log"))
        return ours, process

    def heard(self, link: socket.socket) -> bytes:
        for _ in range(200):
            if self.conductor.wait([link], 0.05):
                return receive(link)
        raise AssertionError("nothing came")

    def wait_until(self, happened: Callable[[], bool]) -> None:
        for _ in range(200):
            if happened():
                return
            self.conductor.wait([], 0.05)
        raise AssertionError("it did not happen")


def job_in(folder: Path) -> Job:
    for name in ("run", "store"):
        (folder / name).mkdir()
    return Job(run_id="r", scenario=TINY, run_dir=folder / "run", store_dir=folder / "store", tokens=folder)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.conductor.close(Goodbye(exit_code=0))
    for machine in made.machines:
        machine.vanish()


def test_machines_get_their_own_nodes_and_those_beyond_wait(stage: Stage) -> None:
    spare, node = stage.join(2), stage.join(1)
    assert spare.hear(Welcome, stage.conductor).node is None
    assert node.hear(Welcome, stage.conductor).node == 1
    stage.conductor.gather()
    assert stage.conductor.address_of(1) == "10.0.0.1"


def test_what_launcher_and_node_agent_say_is_carried_both_ways(stage: Stage) -> None:
    machine = stage.welcomed(1)
    stage.begin(machine)
    link, process = stage.start_node()
    assert machine.hear(StartNode).node == 1
    link.send(b"to the agent")
    assert machine.hear(ToAgent, stage.conductor).message == "to the agent"
    machine.say(FromAgent(message="to the launcher"))
    assert stage.heard(link) == b"to the launcher"
    machine.say(AgentEnded(start=1))
    assert stage.heard(link) == b""
    assert process.has_ended


def test_the_end_of_an_agent_is_not_taken_for_that_of_its_successor(stage: Stage) -> None:
    machine = stage.welcomed(1)
    stage.begin(machine)
    first, process = stage.start_node()
    process.signal(signal.SIGKILL)
    assert stage.heard(first) == b""
    second, _ = stage.start_node()
    machine.say(AgentEnded(start=1))
    machine.say(FromAgent(message="alive"))
    assert stage.heard(second) == b"alive"
    assert [type(machine.hear(kind)) for kind in (StartNode, EndNode, StartNode)]


def test_a_lost_machine_closes_the_link_of_its_node_and_a_spare_that_is_ready_takes_its_place(stage: Stage) -> None:
    machine, spare = stage.welcomed(1), stage.welcomed(2)
    stage.begin(machine, spare)
    link, _ = stage.start_node()
    machine.vanish()
    assert stage.heard(link) == b""
    assert stage.conductor._roster.vacant() == [1]
    stage.start_node()
    assert spare.hear(StartNode).node == 1
    assert stage.conductor.address_of(1) == "10.0.0.2"
    assert stage.lines[-1] == "machine 2 (host2) takes the place of node 1"


def test_a_machine_that_comes_again_takes_its_place_once_it_is_ready(stage: Stage) -> None:
    machine = stage.welcomed(1)
    stage.begin(machine)
    machine.vanish()
    stage.wait_until(lambda: stage.conductor._roster.vacant() == [1])
    with pytest.raises(VacantError):
        stage.start_node()
    again = stage.welcomed(1)
    again.hear(BeginRun)
    with pytest.raises(VacantError):
        stage.start_node()
    again.say(Ready())
    again_is = stage.conductor._roster
    stage.wait_until(lambda: (there := again_is.of_node(1)) is not None and there.is_ready)
    stage.start_node()
    assert again.hear(StartNode).start == 1


def test_a_machine_that_is_silent_is_given_up_with_its_node(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = stage.welcomed(1)
    stage.begin(machine)
    _, process = stage.start_node()
    machine.say(MachineAlive())
    stage.conductor.wait([], 0.2)
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    process.signal(signal.SIGKILL)
    assert stage.conductor._roster.vacant() == [1]


def test_records_come_to_the_folder_of_the_run(stage: Stage) -> None:
    machine = stage.welcomed(1)
    stage.begin(machine)
    machine.say(FileGrew(name="log/node1.log", text="one\n"))
    machine.say(FileGrew(name="log/node1.log", text="two\n"))
    machine.say(RunEnded(store_bytes=77))
    assert stage.conductor.end_run() == 77
    assert (stage.job.run_dir / "log" / "node1.log").read_text() == "one\ntwo\n"
    assert machine.hear(EndRun)


@pytest.mark.parametrize(("is_mistake", "kind"), [(True, ConfigError), (False, CapricornError)])
def test_what_a_machine_lacks_ends_the_run_and_names_the_machine(
    is_mistake: bool, kind: type[CapricornError], stage: Stage
) -> None:
    machine = stage.welcomed(1)
    machine.say(Refused(why="no room in /dev/shm", is_users_mistake=is_mistake))
    stage.conductor.wait([], 0.5)
    with pytest.raises(kind, match=r"machine 1 \(host1\): no room in /dev/shm") as raised:
        begin_refused(stage, machine, is_mistake=is_mistake)
    assert type(raised.value) is kind


def begin_refused(stage: Stage, machine: PlayedMachine, *, is_mistake: bool) -> None:
    """Begins a run that the machine refuses as soon as it may."""
    tell = stage.conductor._tell

    def tell_and_answer(to: Any, message: FrozenModel) -> None:
        tell(to, message)
        if isinstance(message, BeginRun):
            machine.say(Refused(why="no room in /dev/shm", is_users_mistake=is_mistake))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.conductor, "_tell", tell_and_answer)
        stage.conductor.begin_run(stage.job)


def test_a_second_machine_of_the_same_number_and_one_too_many_are_sent_away_and_say_why(stage: Stage) -> None:
    stage.welcomed(1)
    twice = stage.join(1).hear(Goodbye, stage.conductor)
    assert (twice.exit_code, twice.why) == (
        2, "--node-rank 1: machine 1 (host1) is there already; give each machine a number of its own"
    )  # fmt: skip
    beyond = stage.join(3).hear(Goodbye, stage.conductor)
    assert (beyond.exit_code, beyond.why) == (
        2, "--node-rank 3: 3 machines take part; allow more spares by --nnodes 2:MAX"
    )  # fmt: skip


def test_a_machine_that_was_told_something_else_ends_all_before_they_are_there_and_only_itself_later(
    stage: Stage,
) -> None:
    wrong = stage.join(1, {"train.seed": 1})
    with pytest.raises(ConfigError, match=r"train\.seed is 0 on machine 0 and 1 on machine 1"):
        wrong.hear(Welcome, stage.conductor)
    machine = stage.welcomed(1)
    stage.conductor.gather()
    machine.vanish()
    stage.wait_until(lambda: stage.conductor._roster.vacant() == [1])
    late = stage.join(2, {"train.seed": 1}).hear(Goodbye, stage.conductor)
    assert "train.seed is 0 on machine 0 and 1 on machine 2" in late.why


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (None, 0, ""),
        (ConfigError("no such model"), 2, "no such model"),
        (CapricornError("node 1 gave up"), 1, "node 1 gave up"),
        (KeyboardInterrupt(), 1, "machine 0 was interrupted"),
        (ZeroDivisionError("x"), 1, "machine 0 failed: ZeroDivisionError"),
    ],
)
def test_all_are_told_how_the_command_has_ended(error: BaseException | None, code: int, why: str, stage: Stage) -> None:
    machine = stage.welcomed(1)
    with contextlib.suppress(CapricornError, KeyboardInterrupt, ZeroDivisionError), stage.conductor:
        if error is not None:
            raise error
    farewell = machine.hear(Goodbye)
    assert (farewell.exit_code, farewell.why) == (code, why)
