"""The planning policies that `ablate` compares, as its options name them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import rich_click as click

from capricorn.config.fields import FrozenModel, check, validate
from capricorn.config.planner import REPLANS, RHO_RANGE, PlannerConfig, parse_replan
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, unknown_name

from .values import Word

SPANS = ("global", "layer", "load")
NO_SPANS = "none"
GATES = {"on": True, "off": False}
PROFILED = ("never", "every-10", "speculative", "every-iter", "oracle")
OFFLINE_REPLANS = {"global": PROFILED, "layer": PROFILED, "load": ("speculative",)}
LIVE = (
    *(("layer", replan, True) for replan in ("never", "every-10", "speculative", "every-iter")),
    ("layer", "speculative", False), ("load", "speculative", True), ("load", "speculative", False),
    ("global", "never", True),
)  # fmt: skip
RHOS = (0.5, 0.9, 1.5)

CHOSEN = {"planner.spans": "--spans", "planner.replan": "--replan", "planner.gate": "--gate", "trace.rho": "--rho"}
"""Settings that are lists here."""

Policies: TypeAlias = tuple[PlannerConfig, ...]


class Choice(NamedTuple):
    """What the lists of the command say; an empty one was not given."""

    spans: tuple[str, ...]
    replans: tuple[str, ...]
    gates: tuple[bool, ...]
    rhos: tuple[float, ...]

    def offline(self, planner: PlannerConfig) -> Policies:
        """Returns all combinations; what was not given takes every value that makes a difference.

        Raises:
            ConfigError: one of them makes sense only for a training.
        """
        check(
            NO_SPANS not in self.spans,
            "--spans none sends as soon as staged and plans nothing to replay: leave it out, or --trace",
        )
        gates = self.gates or tuple(GATES.values())
        return tuple(
            _policy(planner, *values)
            for spans in self.spans or SPANS
            for values in product((spans,), self.replans or OFFLINE_REPLANS[spans], gates)
        )

    def live(self, planner: PlannerConfig) -> Policies:
        """Returns all combinations, with the default of what was not given; without any list, a selection.

        Without spans nothing is planned, and there is nothing to combine.

        Raises:
            ConfigError: a list makes sense only for a replay.
        """
        if "oracle" in self.replans:
            raise ConfigError("--replan oracle knows each iteration before it runs: replay one with --trace FILE.npz")
        if self.rhos:
            raise ConfigError("--rho is for a replay: give --trace FILE.npz, or --cluster NAME --set cluster.rho=R")
        if not (self.spans or self.replans or self.gates):
            return tuple(_policy(planner, *values) for values in LIVE)
        usual = PlannerConfig()
        chosen = product(self.spans or (usual.spans,), self.replans or (usual.replan,), self.gates or (usual.gate,))
        return tuple(dict.fromkeys(_policy(planner, *values) for values in chosen))


def _policy(planner: PlannerConfig, spans: str, replan: str, gate: bool) -> PlannerConfig:
    if spans == NO_SPANS:
        replan, gate = "never", False
    return planner.model_copy(update={"spans": spans, "replan": replan, "gate": gate})


def describe(policy: PlannerConfig) -> str:
    """Returns the policy in a few words."""
    if policy.spans == NO_SPANS:
        return "as soon as staged"
    return f"{policy.spans} spans, {policy.replan}, {'gate' if policy.gate else 'no gate'}"


def configure(sections: dict[str, type[FrozenModel]], assignments: Iterable[str]) -> dict[str, FrozenModel]:
    """Returns the sections by name, with `section.key=value` settings applied.

    Raises:
        ConfigError: a key is unknown or a value does not fit it.
    """
    trees: dict[str, dict[str, str]] = {name: {} for name in sections}
    known = [f"{name}.{field}" for name, model in sections.items() for field in model.model_fields]
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r} is not key=value")
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"a replay has {' and '.join(sections)}"
            raise ConfigError(f"--set {assignment!r}: unknown key {key!r}; {hint}")
        section, _, field = key.partition(".")
        trees[section][field] = value
    return {name: validate(model, trees[name], f"--set {name}", lax=True) for name, model in sections.items()}


def refuse_chosen(assignments: Iterable[str]) -> None:
    """Raises ConfigError for a setting that a list of the command chooses."""
    for assignment in assignments:
        key = assignment.partition("=")[0]
        if key in CHOSEN:
            raise ConfigError(f"--set {assignment!r}: here {key} is a list; use {CHOSEN[key]}")


def refuse_unplanned(scenario: Scenario) -> None:
    """Raises ConfigError for a training in which no checkpoint leaves by a plan, so that all policies are one."""
    system = scenario.system
    check(system.name == "capricorn", f"system {system.name} plans nothing to compare: leave out system.name")
    check(system.every > 0, "without checkpoints all policies are one: leave out --ckpt off")
    check(
        system.replicas > 1,
        "without a remote replica nothing is sent and all policies are one: use --nodes 2 --replicas 2 or more",
    )


# --- options -----------------------------------------------------------------------------------------------------


def _listed(read: Callable[[str], Any]) -> Callable[..., tuple[Any, ...]]:
    """Makes a callback that reads the values of an option, each a list with commas, and drops what comes twice."""

    def callback(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[Any, ...]:
        words = [word.strip() for value in values for word in value.split(",")]
        return tuple(dict.fromkeys(map(read, words)))

    return callback


def _spans(word: str) -> str:
    if word not in (*SPANS, NO_SPANS):
        raise unknown_name("--spans", word, (*SPANS, NO_SPANS))
    return word


def _replan(word: str) -> str:
    parse_replan(word, "--replan")
    return word


def _gate(word: str) -> bool:
    if word not in GATES:
        raise unknown_name("--gate", word, GATES)
    return GATES[word]


def _rho(word: str) -> float:
    try:
        rho = float(word)
    except ValueError:
        rho = 0.0
    least, most = RHO_RANGE
    if not least <= rho <= most:
        raise ConfigError(f"--rho {word!r} is no number from {least:g} to {most:g}; write one, or a list as in 0.5,0.9")
    return rho


POLICY_OPTIONS = (
    click.option("--spans", multiple=True, callback=_listed(_spans), metavar="LIST", panel="What",
                 type=Word(lambda: (*SPANS, NO_SPANS), is_list=True),
                 help="Compare these ways to predict idle spans: " + ", ".join(SPANS) + ", or none (sends as soon as "
                 "staged; not with --trace)"),
    click.option("--replan", "replans", multiple=True, callback=_listed(_replan), metavar="LIST", panel="What",
                 type=Word(lambda: REPLANS, is_list=True),
                 help="Compare these times to plan anew: never, every-K, speculative, every-iter, or oracle (with "
                 "--trace)"),
    click.option("--gate", "gates", multiple=True, callback=_listed(_gate), metavar="LIST", panel="What",
                 type=Word(lambda: GATES, is_list=True), help="Compare with the gate and without: on, off"),
    click.option("--rho", "rhos", multiple=True, callback=_listed(_rho), metavar="LIST", panel="What",
                 help="Replay at these transfer times of a checkpoint / idle time (default: "
                 + ",".join(map(str, RHOS)) + ")"),
)  # fmt: skip
