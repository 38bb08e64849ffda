"""The rules: what must hold for every checkpointing system, each a sentence and a look at what attempts have shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from capricorn.conformance.attempts import Attempt, AttemptServer, BrokenRule
from capricorn.conformance.evidence import Evidence
from capricorn.conformance.rank_functions import LOST_RANK, NUM_SAVES
from capricorn.conformance.subject import CHECK_PREFIX, SystemUnderTest
from capricorn.conformance.toy_job import NUM_RANKS, tensor_names
from capricorn.errors import unknown_name
from capricorn.files import temporary_folder
from capricorn.systems.registry import SystemEntry, check_system

RuleVerdict: TypeAlias = Literal["PASS", "FAIL", "not applicable"]
SAVES: Final = "saves"
MAX_KEPT: Final = 3
"""Iterations whose state may be kept at a time, each of them twice."""
MAX_NAMES: Final = 3
"""Of what is wrong, in one line."""
SURVIVOR: Final = 1 - LOST_RANK


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold, and how it is found out."""

    name: str
    what: str
    """One sentence."""
    complaints: Callable[[Evidence], Iterator[str]]
    """Says what does not hold; nothing if all is well."""
    needs: str = SAVES
    """`saves`: it holds for what saves anything; a kind of failure: for what survives that; empty: for every system."""

    def judge(self, evidence: Evidence) -> RuleResult:
        """Finds out whether it holds for a system."""
        if reason := self._not_applicable(evidence.entry):
            return RuleResult(self.name, "not applicable", reason)
        try:
            complaints = list(self.complaints(evidence))
        except BrokenRule as broken:
            complaints = [str(broken)]
        if not complaints:
            return RuleResult(self.name, "PASS", self.what)
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        return RuleResult(self.name, "FAIL", " ".join(complaints[0].split()) + more)

    def _not_applicable(self, entry: SystemEntry) -> str:
        if self.needs and entry.kind == "nothing":
            return "it saves nothing"
        if self.needs not in ("", SAVES, *entry.survives):
            return f"it does not say that it survives {self.needs}"
        return ""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What came out of one rule."""

    rule: str
    verdict: RuleVerdict
    detail: str


def _nothing_yet(evidence: Evidence) -> Iterator[str]:
    for told in evidence.restarted.first:
        if told["before"] is not None:
            yield f"rank {told.rank} restored iteration {told['before']['iteration']} before anything was saved"


def _no_change(evidence: Evidence) -> Iterator[str]:
    for told in (*evidence.restarted.first, *evidence.restarted.second):
        if told["changed"]:
            yield f"rank {told.rank}: saving changed {_some(told['changed'])}"


def _isolation(evidence: Evidence) -> Iterator[str]:
    for told in evidence.restarted.second:
        if (restored := told["restored"]) is None:
            continue
        if restored["torn"]:
            yield f"rank {told.rank} got for iteration {restored['iteration']} {_some(restored['torn'])}"
        if restored["position"] not in (None, restored["iteration"]):
            what = f"small values of another moment ({restored['position']})"
            yield f"rank {told.rank} got for iteration {restored['iteration']} {what}; call capture() in after_update"


def _every_rank(evidence: Evidence) -> Iterator[str]:
    for told in evidence.restarted.second:
        if (restored := told["restored"]) is None:
            yield f"rank {told.rank} found nothing to restore"
        elif restored["foreign"]:
            yield f"rank {told.rank} did not get its own state: {_some(restored['foreign'])}"


def _kill(evidence: Evidence) -> Iterator[str]:
    first, second = evidence.restarted.first, evidence.restarted.second
    latest = first[LOST_RANK]["latest"] or 0
    yield from _wrongly_restored(evidence, second, (latest,))
    for told in second:
        # Some systems send what was lost of the restored one again.
        following = [iteration for iteration in told["completed"] if iteration != latest]
        if following and following != list(range(latest + 1, latest + 1 + NUM_SAVES)):
            yield f"rank {told.rank} went on after iteration {latest} and completed only {following}"


def _node_loss(evidence: Evidence) -> Iterator[str]:
    latest = evidence.restarted.second[LOST_RANK]["latest"] or 0
    yield from _wrongly_restored(evidence, evidence.after_node_loss, (latest,))


def _counts(evidence: Evidence) -> Iterator[str]:
    for told in evidence.restarted.first:
        last = told["saved"][-1]
        if early := [at for at, latest in enumerate(told["latest_by_iteration"], 1) if latest > at]:
            yield f"rank {told.rank} counts a checkpoint as complete before its iteration, in {early[0]}"
        if told["latest"] != last:
            yield f"rank {told.rank}: after drain() latest_complete() is {told['latest']}, not {last}"
        if told["completed"] not in ([], told["saved"]):
            yield f"rank {told.rank}: take_completed() gives {told['completed']}, not {told['saved']}"


def _growth(evidence: Evidence) -> Iterator[str]:
    state_bytes = sum(told["num_bytes"] for told in evidence.restarted.first)
    times = evidence.restarted.kept_bytes / state_bytes
    if times > 1.1 * MAX_KEPT * NUM_RANKS:
        yield f"after {2 * NUM_SAVES} iterations its files are {times:.1f} times the state; remove older checkpoints"


def _dead_peer(evidence: Evidence) -> Iterator[str]:
    return _lost_peer(evidence, *evidence.peer_died)


def _stopped_peer(evidence: Evidence) -> Iterator[str]:
    return _lost_peer(evidence, *evidence.peer_stopped)


def _lost_peer(evidence: Evidence, lost: Attempt, restarted: Attempt) -> Iterator[str]:
    survivor = lost[SURVIVOR]
    if not survivor["complaint"] and not survivor["num_failed"]:
        yield f"rank {SURVIVOR} neither raised an error nor counted a failed save without rank {LOST_RANK}"
    if "kill" in evidence.entry.survives:
        # The checkpoint that was on its way may have become complete.
        last = max(survivor["last"], survivor["latest"] or 0)
        yield from _wrongly_restored(evidence, restarted, tuple(range(last, survivor["last"] + 2)))


def _close(evidence: Evidence) -> Iterator[str]:
    survivor = evidence.peer_died[0][SURVIVOR]
    for told in (*evidence.restarted.second, survivor):
        if "closed_twice" not in told.facts:
            yield told.error
    if survivor.facts.get("left"):
        yield f"closed after a failure, rank {SURVIVOR} leaves {_some(survivor['left'])}"


def _leftovers(evidence: Evidence) -> Iterator[str]:
    restarted = evidence.restarted
    for told in restarted.second:
        if told["left"]:
            yield f"closed, rank {told.rank} leaves {_some(told['left'])}"
    for attempt in (restarted.first, restarted.second):
        if attempt.outlived:
            yield f"ranks that have ended leave {_some(attempt.outlived)}"
    if restarted.strays:
        yield f"files outside the given folders: {_some(list(map(str, restarted.strays)))}"


def _wrongly_restored(evidence: Evidence, attempt: Attempt, allowed: Sequence[int]) -> Iterator[str]:
    """Says on which ranks a restore was not of one of these iterations, of the same one as on others, bit for bit."""
    for told in attempt:
        if (restored := told["restored"]) is None:
            yield f"rank {told.rank} found nothing to restore; {_either(allowed)} was complete"
            continue
        iteration, others = restored["iteration"], attempt[0]["restored"] or restored
        if iteration not in allowed:
            yield f"rank {told.rank} restored iteration {iteration}; {_either(allowed)} was complete"
        if iteration != others["iteration"]:
            yield f"rank {told.rank} restored iteration {iteration} and rank 0 {others['iteration']}"
        if wrong := [*restored["torn"], *restored["foreign"]]:
            yield f"rank {told.rank} did not get iteration {iteration} bit for bit: {_some(wrong)}"
        if restored["position"] != iteration:
            yield f"rank {told.rank} did not get the small values of iteration {iteration}; call publish() at the end"
        if len(restored["sources"]) != NUM_RANKS or not {*restored["sources"]} <= {*evidence.entry.tiers}:
            tiers = ", ".join(sorted(evidence.entry.tiers))
            yield f"the sources of a restore name a tier for each owner, of {tiers}; not {restored['sources']}"


def _either(iterations: Sequence[int]) -> str:
    return f"iteration {' or '.join(map(str, iterations)) or 'none'}"


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")


RULES: Final = (
    Rule("nothing-yet", "Before the first checkpoint restore() raises NoCompleteCheckpointError.", _nothing_yet, ""),
    Rule("no-change", "Saving leaves the live state alone.", _no_change, ""),
    Rule("isolation", "A checkpoint holds the state of its iteration, though training goes on.", _isolation),
    Rule("every-rank", "A restart gives every rank its own state.", _every_rank),
    Rule("kill", "Killed, the job restarts from its newest complete checkpoint, bit for bit.", _kill, "kill"),
    Rule("node-loss", "It restarts so after a node was lost, too.", _node_loss, "node-loss"),
    Rule("counts", "All checkpoints become complete, none counts before every rank could restore it.", _counts),
    Rule("growth", "What it keeps does not grow with the iterations.", _growth, ""),
    Rule("dead-peer", "When a rank dies all waits end in time with an error, and it restarts.", _dead_peer),
    Rule("stopped-peer", "When a rank stops all waits end in time with an error, and it restarts.", _stopped_peer),
    Rule("close", "close() may be called twice, and after a failure.", _close, ""),
    Rule("leftovers", "After the end no thread, process, socket or file of it is left.", _leftovers, ""),
)


def choose(names: Sequence[str]) -> list[Rule]:
    """The rules of these names in their order; all of them for none.

    Raises:
        ConfigError: no rule has such a name.
    """
    known = [rule.name for rule in RULES]
    for name in names:
        if name not in known:
            raise unknown_name("rule", name, known)
    return [rule for rule in RULES if not names or rule.name in names]


def examine(
    subject: SystemUnderTest, rules: Sequence[Rule], check: Callable[[], None] = lambda: None
) -> Iterator[RuleResult]:
    """Tries the rules on a system, one after the other; leaves no process and no file, however it ends.

    Args:
        subject: the system and its setup.
        rules: those to be tried.
        check: called often; may raise to end it.

    Raises:
        ConfigError: there is no such system, what it needs is not installed, or it has no such option or tensor.
    """
    check_system(subject.system)
    subject.settings()
    for tensor in subject.without:
        if tensor not in tensor_names():
            raise unknown_name("tensor", tensor, tensor_names())
    with temporary_folder(CHECK_PREFIX, shutil.rmtree) as folder, AttemptServer(check) as server:
        evidence = Evidence(subject, server, folder)
        for rule in rules:
            yield rule.judge(evidence)
