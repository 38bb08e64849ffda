"""The launcher's loop and what it leaves, over nodes that are played: no process is started and nobody waits."""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import DataConfig, Scenario, StoreConfig, TrainConfig
from capricorn.emulation.testbed import NetworkBackend
from capricorn.errors import CapricornError, ConfigError, RecordError
from capricorn.launch.interrupts import SIGNALS
from capricorn.launch.launcher import RunListener, launch
from capricorn.launch.nodes import FakeNodes, GaveUpError
from capricorn.records.job_file import FATAL, Fatal, Job
from capricorn.records.samples import EVENTS, ITERATIONS, EventSample, IterationSample, RunRecord, append, read_run
from tests.support.comparisons import sample_of
from tests.support.small_files import files_end_at

NUM_RANKS = 2
DAY_S = 86400.0


class Listening(RunListener):
    """Remembers what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.run_dir = Path()

    def on_start(self, run_dir: Path, scenario: Scenario) -> None:
        self.run_dir = run_dir
        self.heard.append("start")

    def on_sample(self, sample: IterationSample) -> None:
        self.heard.append(f"iteration {sample.iteration} of rank {sample.rank}")

    def on_event(self, event: EventSample) -> None:
        self.heard.append(event.event)


class Stage:
    """A launcher whose nodes play a script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "text").write_bytes(bytes(range(32, 127)) * 200)
        (folder / "stores").mkdir()
        self.out, self.stores, self.listener = folder / "out", folder / "stores", Listening()
        self.scenario = Scenario(
            model=load_model("mixtral-tiny").model_copy(update={"vocab_size": 256}),
            train=TrainConfig(iterations=4, warmup=1),
            data=DataConfig(path=str(folder / "text")),
            cluster=ClusterConfig(nodes=NUM_RANKS, ranks_per_node=1, device="cpu"),
            store=StoreConfig(root=str(self.stores)),
            launch=LaunchConfig(),
        )

    def launch(self, *acts: Callable[[], object]) -> Path:
        self.nodes = FakeNodes(acts)
        return launch(self.scenario, self.out, self.listener, make_nodes=self._make)

    def _make(self, job: Job, network: NetworkBackend, log_dir: Path, on_replace: Callable[[int], None]) -> FakeNodes:
        self.job = job
        assert log_dir.is_dir()
        return self.nodes

    def iterate(self, iteration: int) -> Callable[[], None]:
        """An act: all ranks finish that iteration."""

        def act() -> None:
            for rank in range(NUM_RANKS):
                append(self.job.run_dir / ITERATIONS, sample_of(iteration, rank, 0.5))

        return act

    def fail(self, rank: int, detail: str) -> Callable[[], None]:
        """An act: a rank records that it failed."""
        event = EventSample(event="failed", at_s=0.0, attempt=0, rank=rank, detail=detail)
        return lambda: append(self.job.run_dir / EVENTS, event)

    def give_up(self, node: int) -> Callable[[], None]:
        """An act: a node fails once too often."""

        def act() -> None:
            raise GaveUpError(node)

        return act

    def be_hopeless(self, why: str, *, is_users_mistake: bool = False) -> Callable[[], object]:
        """An act: a rank says why starting again cannot help."""
        return lambda: self.job.say_fatal(Fatal(why=why, is_users_mistake=is_users_mistake))

    def with_full_disk(self, act: Callable[[], object]) -> Callable[[], None]:
        """An act while no record of samples can grow by a whole line."""

        def full() -> None:
            with files_end_at((self.job.run_dir / ITERATIONS).stat().st_size + 20):
                act()

        return full

    def record(self) -> RunRecord:
        """The record of the run, which has left nothing else."""
        assert not self.nodes.is_running
        assert not list(self.stores.iterdir())
        return read_run(self.listener.run_dir)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield Stage(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_listener_hears_all_in_order_and_the_nodes_hear_of_progress(stage: Stage) -> None:
    acts = [stage.iterate(1), lambda: None, stage.fail(1, "lost"), stage.iterate(2), stage.iterate(3), stage.iterate(4)]
    folder = stage.launch(*acts)
    assert stage.listener.heard == [
        "start",
        *(f"iteration 1 of rank {rank}" for rank in range(NUM_RANKS)),
        "failed",
        *(f"iteration {iteration} of rank {rank}" for iteration in (2, 3, 4) for rank in range(NUM_RANKS)),
    ]
    assert stage.nodes.num_progressed == 4
    assert folder == stage.listener.run_dir
    assert stage.record().verdict == "ok"


def test_a_rank_that_says_why_starting_again_cannot_help_ends_the_run(stage: Stage) -> None:
    with pytest.raises(CapricornError, match=r"^the run cannot go on: no room on /dev/shm$"):
        stage.launch(stage.iterate(1), stage.be_hopeless("no room on /dev/shm"), stage.iterate(2))
    assert "iteration 2 of rank 0" not in stage.listener.heard
    assert "stopped after 1" in stage.record().verdict


def test_a_mistake_of_the_users_that_only_a_rank_can_see_is_told_as_one(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"^the run cannot go on: no tensor 'x' in the checkpoint$"):
        stage.launch(stage.be_hopeless("no tensor 'x' in the checkpoint", is_users_mistake=True))


def test_a_file_of_last_words_without_a_word_ends_nothing(stage: Stage) -> None:
    stage.launch(lambda: (stage.job.run_dir / FATAL).write_text(""), *map(stage.iterate, range(1, 5)))
    assert stage.record().verdict == "ok"


def test_the_last_words_of_a_rank_are_better_than_those_of_its_node(stage: Stage) -> None:
    def act() -> None:
        stage.be_hopeless("other data")()
        stage.give_up(1)()

    with pytest.raises(CapricornError, match="the run cannot go on: other data"):
        stage.launch(act)


def test_giving_up_names_the_node_what_the_others_failed_by_and_where_the_logs_are(stage: Stage) -> None:
    echo = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
    acts = [stage.iterate(1), stage.fail(0, echo), stage.fail(1, "killed by signal 9"), stage.give_up(1)]
    with pytest.raises(CapricornError) as raised:
        stage.launch(*acts)
    assert str(raised.value) == f"node 1 gave up: rank 1: killed by signal 9; see {stage.listener.run_dir / 'log'}"
    assert raised.value.__cause__ is None
    assert stage.listener.heard.count("failed") == 2
    assert "stopped after 1" in stage.record().verdict


def test_giving_up_before_any_rank_has_said_a_word_names_the_node(stage: Stage) -> None:
    with pytest.raises(CapricornError, match=r"^node 0 gave up; see "):
        stage.launch(stage.give_up(0))
    stage.record()


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_stops_the_nodes_and_what_was_measured_is_written(number: signal.Signals, stage: Stage) -> None:
    with pytest.raises(KeyboardInterrupt):
        stage.launch(stage.iterate(1), lambda: signal.raise_signal(number), stage.iterate(2), stage.iterate(3))
    assert "stopped after 1" in stage.record().verdict
    assert stage.listener.heard[-1] == "iteration 1 of rank 1"


def test_an_interrupt_in_the_last_moment_is_not_lost(stage: Stage) -> None:
    with pytest.raises(KeyboardInterrupt):
        stage.launch(*map(stage.iterate, range(1, 5)), lambda: signal.raise_signal(signal.SIGINT))
    assert stage.record().verdict == "ok"


@pytest.mark.parametrize("error", [OSError("no more processes"), CapricornError("no"), MemoryError()])
def test_whatever_ends_the_loop_the_record_is_written_and_nothing_is_left(error: Exception, stage: Stage) -> None:
    def act() -> None:
        stage.iterate(2)()
        raise error

    # What the system refuses is told in one line.
    with pytest.raises(CapricornError if isinstance(error, OSError) else type(error)):
        stage.launch(stage.iterate(1), act)
    assert "iteration 2 of rank 1" in stage.listener.heard
    assert "stopped after 2" in stage.record().verdict


def test_a_listener_that_fails_ends_the_run_in_order(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sample: IterationSample) -> None:
        raise RuntimeError("the display is broken")

    monkeypatch.setattr(stage.listener, "on_sample", refuse)
    with pytest.raises(RuntimeError, match="the display is broken"):
        stage.launch(stage.iterate(1), stage.iterate(2))
    stage.record()


def test_a_store_that_is_to_be_kept_stays(stage: Stage) -> None:
    stage.scenario = stage.scenario.model_copy(update={"store": StoreConfig(root=str(stage.stores), keep=True)})
    stage.launch(stage.iterate(1))
    assert len(list(stage.stores.iterdir())) == 1


# --- records that cannot be written


FULL = OSError(errno.ENOSPC, "No space left on device", "/x/run.json")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FULL, "the run failed: /x/run.json: No space left on device"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "the run failed: Broken pipe"),
        (PermissionError(errno.EACCES, "Permission denied", "/y"), "the run failed: /y: Permission denied"),
        (
            RecordError("cannot write /x/events.jsonl: No space left on device"),
            "cannot write /x/events.jsonl: No space",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line_once_all_is_ended(error: Exception, line: str, stage: Stage) -> None:
    def act() -> None:
        raise error

    with pytest.raises(CapricornError, match=f"^{line}") as raised:
        stage.launch(stage.iterate(1), act)
    assert raised.value.exit_code == 1
    assert "stopped after 1" in stage.record().verdict


def refuse(*arguments: object, **more: object) -> None:
    raise FULL


def test_a_record_that_cannot_be_written_is_one_line(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capricorn.launch.launcher.write_recoveries", refuse)
    with pytest.raises(CapricornError, match=r"^cannot write the results in .*: No space left on device$"):
        stage.launch(*map(stage.iterate, range(1, 5)))
    assert not stage.nodes.is_running
    assert not list(stage.stores.iterdir())


@pytest.mark.parametrize("end", [CapricornError("the first"), OSError("the first")])
def test_a_record_that_cannot_be_written_does_not_hide_what_ended_the_run(
    end: Exception, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        raise end

    monkeypatch.setattr("capricorn.launch.launcher.write_recoveries", refuse)
    with pytest.raises(CapricornError, match=r"^the first; and then: cannot write the results in .*: No space left"):
        stage.launch(stage.iterate(1), act)
    assert not list(stage.stores.iterdir())


def test_an_interrupt_stays_one_where_the_record_cannot_be_written(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("capricorn.launch.launcher.write_recoveries", refuse)
    with pytest.raises(KeyboardInterrupt):
        stage.launch(stage.iterate(1), lambda: signal.raise_signal(signal.SIGINT), stage.iterate(2))
    assert capsys.readouterr().err.startswith("note: cannot write the results in ")


@pytest.mark.parametrize("full", ["out", "stores"])
def test_last_words_go_where_there_is_room(full: str, stage: Stage) -> None:
    def act() -> None:
        folder = stage.job.run_dir if full == "out" else stage.job.store_dir
        (folder / FATAL).mkdir()  # no file can take its place
        stage.be_hopeless("no room")()

    with pytest.raises(CapricornError, match=r"^the run cannot go on: no room$"):
        stage.launch(act)


def test_the_disk_that_is_full_is_told_by_the_rank_that_met_it_first(stage: Stage) -> None:
    def act() -> None:
        stage.be_hopeless("RecordError: cannot write iterations.jsonl: No space left on device")()
        raise RecordError("cannot write events.jsonl: No space left on device")

    with pytest.raises(CapricornError, match=r"^the run cannot go on: RecordError: cannot write iterations\.jsonl"):
        stage.launch(act)
    stage.record()


def test_a_disk_that_is_full_leaves_whole_lines_and_no_store(stage: Stage) -> None:
    with pytest.raises(CapricornError, match=r"cannot write .*iterations\.jsonl: No space left on device"):
        stage.launch(stage.iterate(1), stage.with_full_disk(stage.iterate(2)))
    text = (stage.listener.run_dir / ITERATIONS).read_text()
    assert text.endswith("\n")
    record = stage.record()
    assert "stopped after 1" in record.verdict
    assert not record.summary["notes"]


def test_a_folder_of_runs_that_is_not_writable_is_the_mistake_of_who_named_it(stage: Stage) -> None:
    stage.out = Path("/proc/capricorn")
    with pytest.raises(ConfigError, match=r"^cannot make the folder of the run, /proc/capricorn/.*: No such file"):
        stage.launch(stage.iterate(1))
    assert not list(stage.stores.iterdir())


def test_a_line_that_is_damaged_while_the_run_lasts_is_counted_in_its_record(stage: Stage) -> None:
    def act() -> None:
        with (stage.job.run_dir / ITERATIONS).open("a") as file:
            file.write("{\n")

    stage.launch(stage.iterate(1), act, *map(stage.iterate, range(2, 5)))
    record = stage.record()
    assert record.verdict == "ok"
    assert record.summary["notes"] == ["iterations.jsonl: 1 line is damaged and left out (3)"]


def test_the_clock_on_the_wall_may_jump_while_a_run_lasts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    times_s: list[float] = []

    def look() -> None:
        times_s.append(stage.job.now_s())
        monkeypatch.setattr(time, "time", lambda: 0.0)

    stage.launch(look, look, look)
    assert times_s == sorted(times_s)
    assert times_s[-1] - times_s[0] < DAY_S
