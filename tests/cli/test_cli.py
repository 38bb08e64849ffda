"""The command line: its contract, and what it says when the user is wrong. Training is faked; nothing is started."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from capricorn.cli.main import main
from capricorn.cli.options import scenario_from
from capricorn.cli.progress import Progress

from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, TransportError
from capricorn.launch import preflight as machine
from capricorn.launch.launcher import RunListener
from capricorn.records.samples import IterationSample, RunRecord, append, write_run
from capricorn.runtime.store.node_store import NodeStore, RunLock
from capricorn.stats.run_summary import summarize
from capricorn.topology import Topology
from capricorn.units import KIB, MIB

TINY = ("run", "--model", "mixtral-tiny")


def cli(*arguments: str | Path) -> int:
    """The exit code of the command line, run in this process."""
    with pytest.raises(SystemExit) as raised:
        main([str(argument) for argument in arguments])
    assert isinstance(raised.value.code, int)
    return raised.value.code


def sample(iteration: int, rank: int, **fields: Any) -> IterationSample:
    usual = {"attempt": 0, "at_s": float(iteration), "duration_s": 0.5, "stall_s": 0.01, "loss": 5.0, "tokens": 128}
    done = {"requested": True, "latest_local": iteration, "latest_complete": iteration, "completed": [iteration]}
    return IterationSample.model_validate({"iteration": iteration, "rank": rank} | usual | done | fields)


# --- a launcher that trains nothing


class Launcher:
    """Stands in for the launcher; `end` is raised when so many iterations are done, `fields` go into each sample."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.scenarios: list[Scenario] = []
        self.stop_after: int | None = None
        self.end: BaseException | None = None
        self.fields: dict[str, Any] = {}

    def launch(self, scenario: Scenario, out: Path, listener: RunListener) -> Path:
        self.num_runs += 1
        self.scenarios.append(scenario)
        run_dir = out / f"run{self.num_runs}"
        run_dir.mkdir()
        listener.on_start(run_dir, scenario)
        try:
            for iteration in range(1, (self.stop_after or scenario.train.iterations) + 1):
                listener.on_tick()
                for rank in range(scenario.topology.world_size):
                    each = sample(iteration, rank, **self.fields)
                    append(run_dir / "iterations.jsonl", each)
                    listener.on_sample(each)
            if self.end:
                raise self.end
        finally:
            self._write(run_dir, scenario)
        return run_dir

    def _write(self, run_dir: Path, scenario: Scenario) -> None:
        summary, verdict = summarize(run_dir, scenario)
        record = RunRecord(
            run_id=run_dir.name, started_at="2026-11-29T15:00:00Z", mode="live", system=scenario.system.name, seed=0,
            config=scenario, environment=machine.environment("cpu"), summary=summary, verdict=verdict,
        )  # fmt: skip
        write_run(run_dir, record)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    fake = Launcher()
    monkeypatch.setattr("capricorn.launch.launcher.launch", fake.launch)
    monkeypatch.setattr(machine, "require", lambda scenario: None)
    return fake


# --- starting


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list", "--json"], ["run", "--dry-run"]])
def test_these_need_no_torch_and_no_pandas(arguments: list[str]) -> None:
    code = f"""
import sys
from capricorn.cli.main import main
try:
    main({arguments})
except SystemExit:
    print("loaded:", [name for name in ("torch", "pandas", "matplotlib") if name in sys.modules])
"""
    assert "loaded: []" in python(code)


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "compare", "export", "ablate", "list", "inspect", "check-system", "doctor", "clean"):
        assert cli(command, "--help") == 0
        assert "Usage" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--version") == 0
    assert capsys.readouterr().out.startswith("capricorn-bench, version ")


# --- mistakes


MISTAKES = [
    (["rnu"], "no such command 'rnu'; did you mean 'run'?"),
    (["run", "--itrations", "3"], "no such option '--itrations'; did you mean '--iterations'?"),
    (["run", "extra"], "unexpected extra argument"),
    (["run", "--model"], "requires an argument"),
    (["run", "--model", "mixtral-smal"], "did you mean 'mixtral-small'?"),
    (["run", "--model", "none.toml"], "cannot read none.toml"),
    (["run", "--system", "capricron"], "did you mean 'capricorn'?"),
    (["run", "--cluster", "lokal"], "did you mean 'local'?"),
    (["run", "--cluster", "p5"], "unknown cluster 'p5'"),
    (["run", "--set", "system.name=x"], "unknown system 'x'"),
    (["run", "--ckpt", "every-0"], "every-N with N >= 1"),
    (["run", "--iterations", "0"], "'--iterations': '0' is not a whole number, 1 or more"),
    (["run", "--iterations", "x"], "'--iterations': 'x'"),
    (["run", "--warmup", "30"], "warmup 30 leaves nothing of 30 iterations"),
    (["run", "--replicas", "3"], "use --nodes 3 or --replicas 2"),
    (["run", "--nodes", "16", "--expert-parallel", "16"], "so many ranks cannot share 8 experts"),
    (
        ["run", "--nodes", "16", "--expert-parallel", "3"],
        "--expert-parallel 3 does not divide the 16 ranks; use",
    ),
    (["run", "--nodes", "2", "--nnodes", "3", "--rdzv-endpoint", "a:1"], "--nodes 2 contradicts --nnodes 3"),
    (["run", "--nnodes", "2"], "--rdzv-endpoint"),
    (["run", "--data", "/no/such/text"], "--data /no/such/text: no such file"),
    (["run", "--set", "sytem.every=1"], "did you mean 'system.every'?"),
    (["run", "--set", "train.seed=x"], "train.seed = 'x'"),
    (["run", "--fault", "kil@rank=1,iteration=2"], "did you mean 'kill'?"),
    (["run", "--fault", "kill@rank=9,iteration=2"], "names rank 9 of 2"),
    (["run", "--device", "tpu"], "'tpu' is not one of"),
    (["run", "--out", "/dev/null/x", "--model", "mixtral-tiny"], "--out /dev/null/x"),
    (["run", "--set", "store.root=/no/such", "--model", "mixtral-tiny"], "store /no/such: this run needs"),
    (["run", "--model", "deepseek-v3", "--dry-run", "--json"], "host memory: this run needs"),
    (["list", "modls"], "'modls' is not one of"),
    (["inspect", "/no/such"], "neither a run folder"),
    (["inspect"], "missing argument 'TARGET'"),
    (["clean", "--root", "/no/such"], "no such folder"),
    (["doctor", "--model", "x"], "unknown model 'x'"),
    (["doctor", "--nodes", "0"], "'--nodes': '0' is not a whole number, 1 or more"),
    (["run", "--seed", "-1"], "'--seed': '-1' is not a whole number, 0 or more"),
    (["run", "--ckpt", "often"], "--ckpt 'often' is not every-iter, every-N with N >= 1, or off"),
    (["run", "--loads", "stabel"], "did you mean 'stable'?"),
    (["run", "--set", "x"], "--set 'x' is not key=value, as in system.every=2; see capricorn-bench list settings"),
    (["run", "--set", "x=1"], "unknown key 'x'; sections: model, train"),
    (["run", "--set", "system.every=x"], "system.every = 'x': should be a whole number"),
    (["run", "--set", "train.lr=x"], "train.lr = 'x': should be a number"),
    (["run", "--set", "planner.gate=x"], "planner.gate = 'x': should be true or false"),
    (["run", "--set", "planner.spans=x"], "should be 'load', 'layer', 'global' or 'none'"),
    (["run", "--set", "planner.replan=evry-iter"], "did you mean 'every-iter'?"),
    (["run", "--set", "planner.risk=2"], "planner.risk = '2': should be less than 1"),
    (["run", "--set", "system.block_bytes=much"], "write a number and one of B, KB"),
    (["run", "--fault", "kill@rank=1"], "iteration is missing"),
    (["run", "--keep-store=3"], "'--keep-store' does not take a value"),
    (["compare", "--threshold", "x"], "--threshold 'x' is no part of a whole; write 5% or 0.05"),
    (["faults", "--count", "0"], "'--count': '0' is not a whole number, 1 or more"),
    (["faults", "--kinds", "kil"], "did you mean 'kill'?"),
    (["faults", "--mtbf", "soon"], "write it as in 30s, 5min or 1h"),
    (["ablate", "--spans", "lod"], "unknown --spans 'lod'; did you mean 'load'?"),
    (["list", "setings"], "'setings' is not one of 'models', 'systems', 'clusters', 'faults', 'settings'"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


# --- options


def test_defaults_fit_the_number_of_iterations_and_nodes() -> None:
    assert scenario_from(iterations=3, device="cpu").train.warmup == 2
    assert scenario_from(iterations=1, device="cpu").train.warmup == 0
    assert scenario_from(nodes=1, device="cpu").system.replicas == 1
    default = scenario_from()
    assert (default.model.name, default.train.warmup, default.system.every) == ("mixtral-small", 5, 1)


@pytest.mark.parametrize(("gpus", "shape"), [(0, (2, 1)), (1, (1, 1)), (2, (2, 1)), (8, (2, 4))])
def test_on_cuda_there_is_one_rank_per_gpu(gpus: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cuda_devices", lambda: gpus)
    cluster = scenario_from().cluster
    assert (cluster.nodes, cluster.ranks_per_node) == shape
    assert cluster.device == ("cuda" if gpus else "cpu")


def test_real_machines_are_the_nodes() -> None:
    scenario = scenario_from(nnodes=3, node_rank=1, rdzv_endpoint="head:29500", device="cpu")
    assert (scenario.cluster.nodes, scenario.launch.node_rank) == (3, 1)


# --- run


def test_dry_run_prints_needs_checks_and_config_and_starts_nothing(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, "--dry-run", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("store (tmpfs)", "open files", "train: iterations=30", "mixtral-tiny"))
    assert launcher.num_runs == 0
    assert not (tmp_path / "out").exists()


def test_json_prints_the_record_and_nothing_else(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, "--iterations", "4", "--json", "--out", tmp_path) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert RunRecord.model_validate(record).verdict == "ok"
    keys = "iteration_s_p50 stall_s_p50 requested effective lost_iterations sent_bytes peak_rss_bytes store_bytes"
    assert set(keys.split()) <= record["summary"].keys()
    assert (record["summary"]["requested"], record["summary"]["effective"]) == (4, 4)
    assert printed.err == ""


def test_repeats_run_several_times_and_print_each(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = (*TINY, "--iterations", "2", "--repeats", "3", "--out", tmp_path)
    assert cli(*arguments, "--json") == 0
    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["run1", "run2", "run3"]
    assert cli(*arguments) == 0
    assert len(re.findall(r" 2/2 .* ok", capsys.readouterr().out)) == 3


def test_a_pipe_gets_plain_lines_and_the_result(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(*TINY, "--iterations", "4", "-v", "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert re.search(
        r"^iteration 3/4  loss 5.0000  0.5 s  stall 10 ms  local 3  complete 3, lag 0 ", printed, re.MULTILINE
    )
    assert "requested 4 = effective 4" in printed
    assert str(tmp_path / "run1") in printed


def test_quiet_prints_the_verdict_only(launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli(*TINY, "--iterations", "2", "-q", "--out", tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run1'}: ok\n"


def test_a_verdict_that_is_not_ok_ends_with_1(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.fields = {"completed": []}
    assert cli(*TINY, "--iterations", "2", "-q", "--out", tmp_path) == 1
    assert "no checkpoint became complete" in capsys.readouterr().out


def test_an_interrupt_shows_what_was_measured_and_ends_with_130(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.stop_after, launcher.end = 3, KeyboardInterrupt()
    assert cli(*TINY, "--iterations", "9", "--json", "--out", tmp_path) == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "stopped after 3 of 9 iterations"
    assert printed.err.strip() == "interrupted"


def test_a_failed_run_shows_what_was_measured_and_ends_with_1(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launcher.stop_after, launcher.end = 3, TransportError("rank 1 did not answer\nwithin 30 s")
    assert cli(*TINY, "--iterations", "9", "--out", tmp_path) == 1
    printed = capsys.readouterr()
    assert "stopped after 3 of 9 iterations" in printed.out
    assert printed.err == "error: rank 1 did not answer within 30 s\n"


# --- progress


def test_progress_folds_ranks_and_forgets_a_dead_attempt() -> None:
    progress = Progress(scenario_from(model="mixtral-tiny", iterations=4, device="cpu"))
    assert progress.add(sample(1, 0)) is None
    done = progress.add(sample(1, 1, duration_s=2.0, sent_bytes=100))
    assert done is not None
    assert (done.duration_s, done.sent_bytes_per_s) == (2.0, 50.0)
    assert progress.add(sample(2, 0)) is None
    assert progress.add(sample(2, 1, attempt=1)) is None
    assert progress.add(sample(2, 0, attempt=1, at_s=7.0)) is not None
    assert progress.seconds_left() is None
    progress.add(sample(3, 0, attempt=1, at_s=9.0))
    progress.add(sample(3, 1, attempt=1, at_s=9.0))
    assert progress.seconds_left() == 2.0


# --- list, doctor, clean


@pytest.mark.parametrize("what", ["models", "systems", "clusters", "faults", "settings"])
def test_list_prints_one_object(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("list", what, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[what]
    assert listed["details"].keys() == set(listed[what])


def test_list_shows_all_kinds_in_60_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli("list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("qwen3-moe-small", "capricorn", "local", "node-loss"))
    assert max(map(len, printed.splitlines())) <= 60


def test_list_shows_every_setting_by_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli("list", "settings") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    starts = [line.split() for line in lines]
    assert ["planner.", "type", "default", "what"] in starts
    assert any(words[:3] == ["replan", "text", "speculative"] for words in starts)


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """The checks of a command by name."""
    cli(*arguments, "--json")
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_doctor_alone_says_what_the_machine_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(capsys, "doctor")
    assert {"privileges", "system capricorn", "system none", "system torch-checkpointing"} <= found.keys()


def test_doctor_checks_what_was_asked_for_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "new"
    given = ("--nodes", "4", "--replicas", "2", "--fault", "kill@rank=1,iteration=3", "--persist-dir", str(folder))
    found = checked(capsys, "doctor", "--system", "gemini", *given)
    assert [name for name in found if name.startswith("system ")] == ["system gemini"]
    assert "privileges" not in found
    assert found["fault kill@rank=1,iteration=3,op=before_update"]["ok"]
    assert found[f"--persist-dir {folder}"]["ok"]
    assert not folder.exists()
    assert found["two nodes lost at once"]["found"] == "recoverable with probability 66.7%"


@pytest.mark.parametrize("command", [("doctor",), ("run", "--dry-run")])
def test_a_failure_that_cannot_be_injected_is_told_before_the_run(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = checked(capsys, *command, "--model", "mixtral-tiny", "--fault", "disk-full@iteration=3")
    check = next(check for name, check in found.items() if name.startswith("fault disk-full"))
    assert not check["ok"]
    assert "--persist-every" in check["found"]


def test_nothing_is_foreseen_of_a_system_that_keeps_no_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two nodes lost at once" not in checked(capsys, "doctor", "--system", "torch-save")
    assert "two nodes lost at once" not in checked(capsys, "doctor", "--nodes", "1", "--set", "cluster.device=cpu")


@pytest.mark.parametrize(
    ("system", "sections"),
    [
        ("none", set()),
        ("capricorn", {"planner", "persist"}),
        ("gemini", {"system.options", "persist"}),
        ("dcp", {"system.options"}),
        ("lm-resiliency", {"planner"}),
    ],
)
def test_a_dry_run_tells_the_settings_that_matter_for_its_system(
    system: str, sections: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*TINY, "--system", system, "--device", "cpu", "--dry-run") == 0
    printed = re.findall(r"^([\w.]+): (.*)$", capsys.readouterr().out, re.MULTILINE)
    always = {"model", "train", "data", "cluster", "loads", "system", "store", "launch"}
    assert {section for section, _ in printed} == always | sections
    assert dict(printed)["cluster"] == "name=local nodes=2 ranks_per_node=1 device=cpu"


def test_doctor_says_what_does_not_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("doctor", "--model", "deepseek-v3", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    memory = next(check for check in report["checks"] if check["name"] == "host memory")
    assert memory.keys() == {"name", "ok", "found", "needed", "advice"}
    assert not memory["ok"]


def test_a_low_file_limit_is_refused_only_when_it_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    _limit(monkeypatch, resource.RLIMIT_NOFILE, 256)
    machine.require(scenario_from(model="mixtral-tiny", system="none", device="cpu"))
    many = scenario_from(model="qwen3-moe-tiny", system="none", nodes=2, ranks_per_node=8, device="cpu")
    with pytest.raises(ConfigError, match="needs 320 per process, found 256; use ulimit -n 320 or fewer ranks"):
        machine.require(many)


@pytest.mark.parametrize(
    ("number", "limit", "message"),
    [
        (resource.RLIMIT_FSIZE, 200 * KIB, r"file size: this run needs 33\.6 MB per process, .*; use ulimit -f 32768"),
        (
            resource.RLIMIT_AS,
            1000 * MIB,
            r"address space: this run needs 1\.48 GB per process, .*; use ulimit -v 14",
        ),
    ],
)
def test_a_limit_of_a_process_that_is_too_low_is_refused_and_one_that_is_not_set_is_not_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, limit: int, message: str
) -> None:
    scenario = scenario_from(model="mixtral-tiny", device="cpu")
    told = [check.name for check in machine.checks(scenario, tmp_path)]
    assert not {"file size", "address space"} & set(told)
    _limit(monkeypatch, number, limit)
    with pytest.raises(ConfigError, match=message):
        machine.require(scenario)
    _limit(monkeypatch, number, 1000 * limit)
    machine.require(scenario)


def test_a_working_folder_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"^working folder: .*; change to another folder$"):
        machine.require(scenario_from(model="mixtral-tiny", device="cpu"))


def _limit(monkeypatch: pytest.MonkeyPatch, number: int, value: int) -> None:
    limits = {number: (value, value)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr("resource.getrlimit", lambda which: limits.get(which, unlimited))


def test_a_small_tmpfs_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_free_bytes", lambda folder: 16 << 20)
    with pytest.raises(ConfigError, match=r"needs 737 MB free, found 16\.8 MB free .*--replicas 1.*store\.root"):
        machine.require(scenario_from(device="cpu"))


# --- stores


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[RunLock]:
    """A live run named r1 with two nodes below tmp_path."""
    held = RunLock(tmp_path, "r1")
    for node in range(2):
        NodeStore.create(held.folder / f"node{node}", "r1", node, Topology(2, 1))
    yield held
    if held.folder.exists():
        held.release(keep=True)


def test_clean_removes_leftovers_and_never_a_live_store(
    lock: RunLock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunLock(tmp_path, "dead").release(keep=True)
    assert cli("clean", "--root", tmp_path, "--dry-run") == 0
    assert (tmp_path / "capricorn-dead").exists()
    assert cli("clean", "--root", tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capricorn-r1"]
    assert "live, kept" in capsys.readouterr().out


def fill(folder: Path, copies: dict[str, str]) -> Callable[..., object]:
    """Gives each copy `node/owner/iteration` a verdict: a state, or `bad` for a checksum that does not match."""
    from capricorn.systems.interface import Copy

    def inventory(store: NodeStore) -> list[Copy]:
        parts = {tuple(map(int, name.split("/"))): state for name, state in copies.items()}
        return [
            Copy(owner, iteration, "complete" if state == "bad" else state, folder / f"{node}.{owner}.{iteration}")
            for (node, owner, iteration), state in parts.items()
            if node == store.node
        ]

    return inventory


def look(monkeypatch: pytest.MonkeyPatch, folder: Path, copies: dict[str, str]) -> None:
    bad = {folder / name.replace("/", ".") for name, state in copies.items() if state == "bad"}
    monkeypatch.setattr(NodeStore, "inventory", fill(folder, copies))
    monkeypatch.setattr(NodeStore, "verify", lambda store, copy: copy.path not in bad)


def test_inspect_tells_what_is_complete_on_all_owners(
    lock: RunLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look(monkeypatch, tmp_path, {"0/0/4": "complete", "1/1/4": "complete", "0/0/5": "complete", "1/1/5": "writing"})
    assert cli("inspect", "r1", "--root", tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["iterations"] == [4]
    assert {"owner", "iteration", "where", "state", "verified"} <= report["copies"][0].keys()
    assert [copy["where"] for copy in report["copies"]] == ["node0", "node0", "node1", "node1"]


def test_inspect_of_a_damaged_copy_ends_with_1(
    lock: RunLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look(monkeypatch, tmp_path, {"0/0/4": "complete", "1/1/4": "bad", "1/0/4": "complete"})
    assert cli("inspect", lock.folder) == 1
    printed = capsys.readouterr().out
    assert "NO" in printed
    assert "complete on all owners: none" in printed


def test_inspect_of_a_run_shows_its_record(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli(*TINY, "--iterations", "2", "-q", "--out", tmp_path)
    capsys.readouterr()
    assert cli("inspect", tmp_path / "run1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["verdict"] == "ok"
