"""The moments of one training iteration, and who may listen to them. Knows no tensor and no checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from capricorn.errors import ConfigError

Direction: TypeAlias = Literal["forward", "backward"]
OpKind: TypeAlias = Literal["attention", "gate", "dispatch", "expert", "combine", "head", "reduce", "update"]

OP_KINDS: tuple[str, ...] = get_args(OpKind)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
NO_LAYER = -1


class OpKey(NamedTuple):
    """One op of an iteration. `layer` counts from 0; ops of no layer (head, reduce, update) carry -1."""

    layer: int
    direction: Direction
    kind: OpKind

    def __str__(self) -> str:
        layer = "" if self.layer == NO_LAYER else f".{self.layer}"
        return f"{self.kind}{layer}.{self.direction}"


class TrainerHook:
    """A listener to the trainer; every method does nothing unless overridden.

    All are called on the training thread (on CUDA those of the backward pass come from autograd's device thread,
    which stands in for it), in the same order on every rank and in every iteration.
    """

    def on_iteration_begin(self, iteration: int) -> None:
        """Iteration `iteration` starts; its batch is not read yet. Numbers rise, from 0 or 1 or what was restored."""

    def on_op_begin(self, op: OpKey) -> None:
        """The op is about to be launched."""

    def on_op_end(self, op: OpKey) -> None:
        """The op has been launched; on a GPU it may still run."""

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        """The router of `layer` has chosen: token assignments per global expert, summed over ranks, before dispatch.

        Where there are several expert-parallel groups, the assignments of each, one group after the other.
        """

    def before_update(self, iteration: int) -> None:
        """The update is next; returns only when the state may be overwritten."""

    def after_update(self, iteration: int) -> None:
        """The state now belongs to `iteration` and stays constant until the next `before_update`."""

    def on_iteration_end(self, iteration: int) -> None:
        """Iteration `iteration` is over on this rank."""


class HookChain(TrainerHook):
    """Several hooks called in order, as one; the end of an op in reverse, so that they nest around it."""

    def __init__(self, hooks: Iterable[TrainerHook] = ()) -> None:
        self.hooks = tuple(hooks)

    def on_iteration_begin(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.on_iteration_begin(iteration)

    def on_op_begin(self, op: OpKey) -> None:
        for hook in self.hooks:
            hook.on_op_begin(op)

    def on_op_end(self, op: OpKey) -> None:
        for hook in reversed(self.hooks):
            hook.on_op_end(op)

    def on_routed(self, layer: int, tokens_per_expert: Sequence[int]) -> None:
        for hook in self.hooks:
            hook.on_routed(layer, tokens_per_expert)

    def before_update(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.before_update(iteration)

    def after_update(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.after_update(iteration)

    def on_iteration_end(self, iteration: int) -> None:
        for hook in self.hooks:
            hook.on_iteration_end(iteration)


MOMENTS = ("iteration_begin", "routed", "before_update", "after_update", "iteration_end")


def parse_moment(text: str) -> str:
    """Returns the canonical spelling of a moment: one of MOMENTS, or `KIND[.LAYER][.forward|.backward][.begin|.end]`.

    A part left out matches any: `dispatch` is the begin of the first dispatch, `expert.2.backward.end` is exact.

    Raises:
        ConfigError: it names no moment.
    """
    head, *rest = text.split(".")
    if text in MOMENTS:
        return text
    parts = [p for p in rest if not p.isdigit() and p not in DIRECTIONS and p not in ("begin", "end")]
    if head not in OP_KINDS or parts or len(rest) > 3:
        raise ConfigError(
            f"unknown moment {text!r}; write one of {', '.join(MOMENTS)}, "
            f"or KIND[.LAYER][.forward|.backward][.begin|.end] with KIND one of {', '.join(OP_KINDS)}"
        )
    return text


def matches_op(moment: str, op: OpKey, edge: str) -> bool:
    """Tells whether the `edge` of the op, its `begin` or `end`, is the moment that `parse_moment` accepted."""
    kind, *rest = moment.split(".")
    wanted_edge = next((p for p in rest if p in ("begin", "end")), "begin")
    return (
        kind == op.kind
        and edge == wanted_edge
        and all(int(p) == op.layer for p in rest if p.isdigit())
        and all(p == op.direction for p in rest if p in DIRECTIONS)
    )
