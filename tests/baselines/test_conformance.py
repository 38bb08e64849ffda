"""What holds for every registered system: the rules of check-system, what its counters say, and known faults."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from capricorn.conformance.evidence import Evidence
from capricorn.conformance.rank_functions import NUM_SAVES
from capricorn.conformance.rules import RULES, choose
from capricorn.conformance.subject import SystemUnderTest, under_test
from capricorn.conformance.toy_job import ToyRank, make_folder
from capricorn.errors import CapricornError
from capricorn.systems.registry import SYSTEMS, find
from capricorn.systems.settings import FileSettings
from tests.support.conformance import attempt, server
from tests.support.runs import flip_byte

WITH_PROCESS = {"torch-checkpointing"}
"""Systems that start a process, which takes seconds."""
RULE_NAMES = [rule.name for rule in RULES]
SLOW = {"stopped-peer"}
AFTER_DEATH = {"dead-peer", "close", "node-loss"}
"""Rules that need attempts of their own."""
INSTALLED = [name for name, info in SYSTEMS.items() if info.is_installed]
SAVING = [name for name in INSTALLED if find(name).kind != "nothing"]
PROCESS = under_test("dcp-async", options={"mode": "process"}, timeout_s=20.0)

EvidenceOf = Callable[[SystemUnderTest], tuple[Evidence, Path]]


@pytest.fixture(scope="module")
def evidence_of(tmp_path_factory: pytest.TempPathFactory) -> EvidenceOf:
    """The evidence on a system and its folder; every attempt is made once."""

    def make(subject: SystemUnderTest) -> tuple[Evidence, Path]:
        if repr(subject) not in made:
            folder = tmp_path_factory.mktemp(str(subject))
            made[repr(subject)] = Evidence(subject, server(), folder), folder
        return made[repr(subject)]

    made: dict[str, tuple[Evidence, Path]] = {}
    return make


def assert_keeps(rules: list[str], evidence: Evidence) -> None:
    results = [rule.judge(evidence) for rule in choose(rules)]
    assert not [result for result in results if result.verdict == "FAIL"]


def each_system_and_rule() -> Iterator[Any]:
    for system in INSTALLED:
        for rule in RULE_NAMES:
            is_slow = rule in SLOW or (system in WITH_PROCESS and rule in AFTER_DEATH)
            marks = [pytest.mark.slow, pytest.mark.timeout(300)] if is_slow else []
            yield pytest.param(system, rule, marks=marks, id=f"{system}-{rule}")


@pytest.mark.parametrize(("system", "rule"), [*each_system_and_rule()])
def test_the_rule_holds(system: str, rule: str, evidence_of: EvidenceOf) -> None:
    assert_keeps([rule], evidence_of(under_test(system))[0])


@pytest.mark.parametrize("system", SAVING)
def test_what_is_saved_is_counted(system: str, evidence_of: EvidenceOf) -> None:
    for told in evidence_of(under_test(system))[0].restarted.first:
        saved, counters = told["saved"], told["counters"]
        assert told["completed"] == saved
        assert (counters["failed_saves"], counters["last_failure"]) == (0, "")
        assert counters["staged_bytes"] >= len(saved) * told["num_bytes"]
        assert counters["sent_bytes"] >= len(saved) * told["num_bytes"]
        assert {event["iteration"] for event in told["events"]} == set(saved)
        assert all(event["begin_s"] <= event["end_s"] for event in told["events"])


@pytest.mark.parametrize("system", SAVING)
def test_after_a_restore_it_goes_on_with_the_next_iteration(system: str, evidence_of: EvidenceOf) -> None:
    for told in evidence_of(under_test(system))[0].restarted.second:
        last = told["restored"]["iteration"]
        # Some systems send what was lost of the restored one again.
        following = [iteration for iteration in told["completed"] if iteration != last]
        assert following == list(range(last + 1, last + 1 + NUM_SAVES))
        assert min(told["restored"]["seconds"]) >= 0


@pytest.mark.parametrize("system", INSTALLED)
def test_no_more_checkpoints_are_kept_than_the_settings_say(system: str, evidence_of: EvidenceOf) -> None:
    evidence, folder = evidence_of(under_test(system))
    assert evidence.restarted
    kept = [path for path in (folder / "restarted" / "files").iterdir() if path.is_dir()]
    assert len(kept) <= FileSettings().keep, kept


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_writes_keeps_all_rules(evidence_of: EvidenceOf) -> None:
    assert_keeps([], evidence_of(PROCESS)[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("system", SAVING)
def test_a_state_of_tensors_that_are_large_is_isolated_too(system: str, evidence_of: EvidenceOf) -> None:
    large = under_test(system, large=36_000_000, environment={}, timeout_s=30.0)  # 144 MB
    assert_keeps(["isolation", "kill"], evidence_of(large)[0])


PASS, HARD_FAIL, SILENT_DIVERGENCE = "pass", "hard fail", "silent divergence"
"""The state came back exactly; nothing came back, with an error; something else came back, without one."""
DATA = {"torchsnapshot": "batched/*", "dcp": "__1_*.distcp", "dcp-async": "__1_*.distcp", "torch-save": "rank1.pt"}
"""Where the state of a rank lies in a checkpoint of each system that writes files."""


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


FAULTS: dict[str, Callable[[Path], None]] = {
    "truncated file": cut,
    "flipped byte": lambda file: flip_byte(file, file.stat().st_size // 2),
    "missing file": Path.unlink,
}
"""Of a checkpoint's files."""
KINDS = {"odd bfloat16": "odd_bfloat16", "float8": "float8"}
"""Of tensors that are to be saved."""
VERDICTS = {
    "torchsnapshot": {
        "truncated file": SILENT_DIVERGENCE,
        "flipped byte": SILENT_DIVERGENCE,
        "missing file": HARD_FAIL,
        "odd bfloat16": HARD_FAIL,
        "float8": HARD_FAIL,
    },
    "dcp": {
        "truncated file": HARD_FAIL,
        "flipped byte": SILENT_DIVERGENCE,
        "missing file": HARD_FAIL,
        "odd bfloat16": PASS,
        "float8": PASS,
    },
    "torch-save": {
        "truncated file": PASS,  # the checkpoint before is taken
        "flipped byte": SILENT_DIVERGENCE,
        "missing file": PASS,  # the checkpoint before is taken
        "odd bfloat16": PASS,
        "float8": PASS,
    },
}


def meet_faults(rank: int, folder: Path, subject: SystemUnderTest) -> Iterator[dict[str, str]]:
    """The verdict on each fault, whether of the newest checkpoint's files or of what is to be saved."""
    saved, sound = folder / "none", subject.model_copy(update={"without": tuple(KINDS.values())})
    toy = ToyRank(sound, rank, saved)
    toy.train(1, NUM_SAVES)
    toy.system.drain(20.0)
    toy.system.close()
    for fault, damage in FAULTS.items():
        if rank == 0:
            shutil.copytree(saved / "files", folder / fault / "files", dirs_exist_ok=True)
            newest = max((folder / fault / "files").glob("iteration-*"))
            damage(max(newest.glob(DATA[subject.system])))
        dist.barrier()
        yield {fault: verdict(ToyRank(sound, rank, folder / fault, attempt=1))}
    for kind, tensor in KINDS.items():
        of_kind = subject.model_copy(update={"without": tuple({*KINDS.values()} - {tensor})})
        toy = ToyRank(of_kind, rank, folder / kind)
        toy.train(1, NUM_SAVES)
        is_saved = toy.system.counters().failed_saves == 0
        toy.system.close()
        yield {kind: verdict(ToyRank(of_kind, rank, folder / kind, attempt=1)) if is_saved else HARD_FAIL}


def verdict(toy: ToyRank) -> str:
    try:
        restored = toy.restore()
    except CapricornError:
        return HARD_FAIL
    finally:
        toy.system.close()
    is_exact = restored is not None and not restored["torn"] and not restored["foreign"]
    return PASS if is_exact else SILENT_DIVERGENCE


VERDICTS["dcp-async"] = VERDICTS["dcp"]


@pytest.mark.parametrize("system", VERDICTS)
def test_what_is_known_to_be_wrong_with_a_library_is_wrong_still(system: str, tmp_path: Path) -> None:
    """If one of them has become better, so should the table and what the docs say."""
    subject = SystemUnderTest(system=system, timeout_s=2.0)
    for name in ("none", *FAULTS, *KINDS):
        make_folder(tmp_path / name, subject)
    (tmp_path / "tmp").mkdir()
    by_rank = attempt(meet_faults, tmp_path, subject)
    worst = {
        fault: max((ranks[fault] for ranks in by_rank), key=[PASS, SILENT_DIVERGENCE, HARD_FAIL].index)
        for fault in by_rank[0]
    }
    assert worst == VERDICTS[system]
