"""Where the machines of a run are and how their ranks are started. Knows no torch, no file and no process."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from capricorn.config.endpoint import parse_endpoint
from capricorn.config.fields import MAX_TIMEOUT_S, Option, SettingsModel, check

MIN_FROZEN_S = 0.5
"""Twice the time between two heartbeats."""


def _current_restart(value: Any) -> Any:
    """Returns `fork-server` for the name that it had in earlier records."""
    return "fork-server" if value == "warm" else value


class LaunchConfig(SettingsModel):
    """Where ranks are started and how they come back; `nnodes` > 0 means real machines, this one being `node_rank`."""

    nnodes: Annotated[int, Option("--nnodes", "Machines", "MIN:MAX", computed=True)] = Field(
        default=0,
        ge=0,
        description="Train on this many real machines, each with this command, and let up to MAX take part, of which "
        "the rest are spares; 0 runs all nodes here (default: as the launcher says, or 0)",
    )
    spares: int = Field(
        default=0,
        ge=0,
        description="Machines beyond those that train, one of which takes the place of one that is lost",
    )
    node_rank: Annotated[int, Option("--node-rank", "Machines", "K", computed=True)] = Field(
        default=0,
        ge=0,
        description="Take this machine for number K of them, from 0, which conducts; spares come last (default: as the "
        "launcher says, or 0)",
    )
    rdzv_endpoint: Annotated[str, Option("--rdzv-endpoint", "Machines", "HOST:PORT")] = Field(
        default="", description="Meet the other machines at this address, which is on machine 0"
    )
    launcher: Annotated[
        Literal["auto", "slurm", "mpi", "torchrun", "none"], Option("--launcher", "Machines", computed=True)
    ] = Field(
        default="auto",
        description="Take number and place of the machines from the environment that this one made (default: auto, "
        "which looks for all, unless --nnodes is there)",
    )
    interface: Annotated[str, Option("--interface", "Machines", "NAME|CIDR")] = Field(
        default="", description="Speak with the others over this interface (default: the one that leads to machine 0)"
    )
    shared_dir: Annotated[str, Option("--shared-dir", "Machines", "PATH")] = Field(
        default="", description="Write files that all machines need below this folder, which all of them share"
    )
    job: str = Field(
        default="capricorn",
        description="Name of the job; machines of another one are sent away (default: the launcher's)",
    )
    max_restarts: int = Field(default=3, ge=0, description="Restarts beyond those that the injected faults need")
    restart: Annotated[Literal["fork-server", "torchrun"], BeforeValidator(_current_restart)] = Field(
        default="fork-server",
        description="Who starts the ranks, and again: a process that has torch imported and forks them, or torchrun",
    )
    frozen_s: float = Field(
        default=2.5,
        ge=MIN_FROZEN_S,
        le=MAX_TIMEOUT_S,
        description="Seconds of silence after which a process counts as hung",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_spares(cls, values: Any) -> Any:
        """Reads `2:3` as two machines and a spare."""
        nnodes = values.get("nnodes") if isinstance(values, dict) else None
        if not isinstance(nnodes, str) or ":" not in nnodes:
            return values
        least, _, most = nnodes.partition(":")
        is_range = least.isdigit() and most.isdigit() and 0 < int(least) <= int(most)
        check(is_range, f"--nnodes {nnodes!r} is no number of machines; write N, or MIN:MAX as in 2:3")
        return values | {"nnodes": int(least), "spares": int(most) - int(least)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nnodes:
            check(bool(self.rdzv_endpoint), "--nnodes needs --rdzv-endpoint HOST:PORT")
            parse_endpoint(self.rdzv_endpoint, "--rdzv-endpoint")
            most = self.nnodes + self.spares
            written = f"{self.nnodes}:{most}" if self.spares else f"{self.nnodes}"
            check(self.node_rank < most, f"--node-rank {self.node_rank} is not below --nnodes {written}")
            check(self.restart != "torchrun", "launch.restart=torchrun is for one machine: leave it out, or --nnodes")
        return self

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun starts the ranks."""
        return self.restart == "torchrun"

    @property
    def follows(self) -> bool:
        """Whether another machine conducts."""
        return self.nnodes > 0 and self.node_rank > 0
