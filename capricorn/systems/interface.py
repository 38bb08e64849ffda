"""The interface of a checkpointing system: what it is given, what it must do, what it tells. No torch at import."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from pydantic import BaseModel

from capricorn.config.planner import PlannerConfig
from capricorn.config.scenario import PersistConfig, SystemConfig
from capricorn.hooks import TrainerHook
from capricorn.process import PolledChild
from capricorn.systems.iteration_order import IterationOrder
from capricorn.topology import Topology
from capricorn.units import Bytes, BytesPerSecond, Seconds

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from capricorn.systems.flat_state import FlatState

Kind: TypeAlias = Literal["replicates", "files", "nothing", "own"]
"""What a system does with a state: replicates it through the memory store of the shared runtime, writes it to files,
nothing, or something of its own."""


class PacedRoute(Protocol):
    """The way to another node over links that are modelled in user space."""

    def pieces(self, view: memoryview, *, low: bool = False) -> Iterator[memoryview]:
        """The parts of a payload in order, each when it may be handed to the socket."""
        ...


@dataclass(frozen=True, slots=True)
class JobContext:
    """Who and where this rank is, given to a system when it is attached."""

    run_id: str
    attempt: int
    """Counts the starts of the job, from 0; the same on all ranks."""
    topology: Topology
    rank: int
    device: torch.device
    control_group: ProcessGroup
    """A gloo group of all ranks for small CPU tensors; collectives on it are issued by the training thread only."""
    config: SystemConfig
    store_dir: Path
    """This node's folder of the memory store; made by the launcher."""
    address: str
    """Address of this node's own interface."""
    routes: Mapping[int, PacedRoute] = field(default_factory=dict)
    """By rank: the way there where links are modelled in user space; what is sent must pass through it."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    storage_dir: Path | None = None
    """Clocks of a modelled storage; what is written to storage or read from it must be charged to them."""
    files_dir: Path | None = None
    """Folder for files that all nodes reach and that outlives them; made and removed by the launcher."""
    persist: PersistConfig = field(default_factory=PersistConfig)
    persist_dir: Path | None = None
    """Folder of the persistent tier, which all nodes reach; made by the launcher, and left as it is."""
    start_writer: Callable[[Any, Sequence[int]], PolledChild] | None = None
    """Starts a process that writes the persistent tier; None where the runtime is to start it afresh."""
    model: str = ""
    """Its name, if known."""
    settings: Any = None
    """The settings of the attached system, an instance of its own model; None if it has none."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One owner's state of one iteration as it lies in a store."""

    owner: int
    iteration: int
    state: str
    """`complete`, `writing`, `empty`, or `damaged` (its header does not read)."""
    path: Path
    num_bytes: Bytes = 0
    attempt: int = 0


@dataclass(slots=True)
class Counters:
    """What a system has done so far on this rank, cumulative."""

    staged_bytes: Bytes = 0
    sent_bytes: Bytes = 0
    failed_saves: int = 0
    last_failure: str = ""
    persisted: int = 0
    """Checkpoints that are complete on disk."""
    failed_persists: int = 0
    skipped_persists: int = 0
    """Due while a writer was busy."""
    last_persist_failure: str = ""

    def complaint(self, rank: int) -> str:
        """What has failed so far on that rank, in words; empty if nothing has."""
        if not self.failed_saves:
            return ""
        return f"{self.failed_saves} saves failed on rank {rank}, the last one: {self.last_failure}"


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """A transfer for the timeline: `kind` is `stage`, `send` or `write` (to files); times by `time.perf_counter`."""

    kind: str
    iteration: int
    begin_s: Seconds
    end_s: Seconds
    num_bytes: Bytes
    is_pressed: bool = False
    """Whether an update or the next checkpoint waited for it."""


@dataclass(slots=True)
class Planning:
    """What a planner and its traffic did in one iteration on this rank; bytes are those that were sent in it."""

    profile_s: Seconds = 0.0
    plan_s: Seconds = 0.0
    profiled: bool = False
    """Whether its ops were measured."""
    replanned: bool = False
    planned_bytes: Bytes = 0
    """Of the plans made in it: what fits the idle spans."""
    hidden_bytes: Bytes = 0
    """Sent while the link was idle."""
    colliding_bytes: Bytes = 0
    """Sent while a communication moved bytes."""
    overflow_bytes: Bytes = 0
    """Sent because an update or the next checkpoint waited for them."""
    collision_s: Seconds = 0.0
    overflow_s: Seconds = 0.0
    drift: float = 0.0
    """Of the expert loads since the plan."""
    risk: float = 0.0
    """Quantile of their durations to which idle spans are filled."""
    idle_s: Seconds = 0.0
    """Of all idle spans, as measured last."""
    link_bytes_per_s: BytesPerSecond = 0.0
    """As measured on line."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Where a restored state came from and how long each part took."""

    iteration: int
    sources: Sequence[str]
    """By owner: the tier, `local`, `peer` or `persistent`."""
    agree_s: Seconds
    fetch_s: Seconds
    load_s: Seconds
    damaged: Sequence[str] = field(default=())
    """Copies that were skipped since their checksum did not match, in words."""
    notes: Sequence[str] = field(default=())
    """What else there is to say of it."""


class CheckpointSystem(TrainerHook, abc.ABC):
    """What the trainer drives: it listens to the hooks and keeps checkpoints.

    Threads and files start in `attach`, never in `__init__`. A system never times itself: the trainer charges the time
    spent inside its hooks as stall. A save that fails while an older checkpoint is intact is counted and raised by
    `drain`, and never ends the training.

    The hooks here refuse an iteration out of order, on the training thread, before anything is done with it. A system
    that overrides them calls `iteration_order` or `super()` first.
    """

    kind: ClassVar[Kind] = "own"
    tiers: ClassVar[tuple[str, ...]] = ()
    """Tiers it restores from, of `local`, `peer` and `persistent`; those of its kind if empty."""
    survives: ClassVar[frozenset[str] | None] = None
    """Kinds of failures after which it still has a checkpoint; those of its kind if None."""
    profiles_first: ClassVar[bool] = False
    """Whether it watches the first iterations, `profile_iterations` of its settings, before its first checkpoint."""
    settings: ClassVar[type[BaseModel] | None] = None
    """The model that checks `system.options`; None if it has no options."""
    first_iteration: int = 0
    """The first one that it would checkpoint, known after `attach`: some watch the training before."""
    can_be_replaced: ClassVar[bool] = False
    """Whether another may be attached in this process once it was closed after a failure: nothing of it lives on."""

    @cached_property
    def iteration_order(self) -> IterationOrder:
        """The iterations that this system has seen, which only rise."""
        return IterationOrder()

    def on_iteration_begin(self, iteration: int) -> None:
        self.iteration_order.check(iteration)

    def before_update(self, iteration: int) -> None:
        self.iteration_order.check(iteration)

    def after_update(self, iteration: int) -> None:
        self.iteration_order.advance(iteration)

    @classmethod
    def settings_in(cls, job: JobContext) -> Any:
        """Returns the settings that the job gives this system, or those by default; None if it has no options."""
        return job.settings if job.settings is not None or cls.settings is None else cls.settings()

    @abc.abstractmethod
    def attach(self, job: JobContext, state: FlatState) -> None:
        """Makes ready to save and restore; collective over all ranks.

        Raises:
            StoreError: the store cannot be made.
            TransportError: a peer cannot be reached.
        """

    @abc.abstractmethod
    def latest_complete(self) -> int | None:
        """Newest iteration that every rank could restore, as far as this rank knows."""

    def latest_local(self) -> int | None:
        """Newest iteration of which this rank has a complete copy in its own node's memory."""
        return None

    @abc.abstractmethod
    def drain(self, timeout_s: Seconds) -> None:
        """Waits until what was requested is complete everywhere, for no longer than that; collective.

        Raises:
            CapricornError: a save failed, or the time is over.
        """

    @abc.abstractmethod
    def restore(self) -> RestoreReport:
        """Loads the newest iteration that all owners still have; collective, before training starts.

        Raises:
            NoCompleteCheckpointError: there is none.
            OrderError: training has begun.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends threads and connections; the store stays. May be called twice, and after a failure."""

    def counters(self) -> Counters:
        """Bytes and failures so far."""
        return Counters()

    def take_completed(self) -> list[int]:
        """Iterations that became complete on all ranks since the last call."""
        return []

    def take_events(self) -> list[ChunkEvent]:
        """Transfers finished since the last call, for the timeline."""
        return []

    def take_planning(self) -> Planning:
        """What planning did since the last call."""
        return Planning()
