"""What starts a command on each machine, and what its environment then says: Slurm, MPI, torchrun, an indexed job.

| `--launcher` | machines             | this one             | where they meet           | job                 |
|--------------|----------------------|----------------------|---------------------------|---------------------|
| `slurm`      | SLURM_STEP_NUM_NODES | SLURM_NODEID         | first of                  | SLURM_JOB_ID        |
|              |                      |                      | SLURM_STEP_NODELIST       |                     |
| `mpi`        | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_RANK | --rdzv-endpoint           | -                   |
|              | or PMI_SIZE          | or PMI_RANK          |                           |                     |
| `torchrun`   | GROUP_WORLD_SIZE     | GROUP_RANK           | MASTER_ADDR               | TORCHELASTIC_RUN_ID |
|              | or PET_NNODES        | or PET_NODE_RANK     | or PET_MASTER_ADDR        | or PET_RDZV_ID      |
| `none`       | --nnodes             | --node-rank          | --rdzv-endpoint           | -                   |

`auto` takes the first of them whose variables are there, unless --nnodes says it all. What is on the command line goes
before the environment. Where --nnodes is given and --node-rank is not, JOB_COMPLETION_INDEX of an indexed Kubernetes
job is this machine's number. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from capricorn.errors import ConfigError

AUTO, NONE = "auto", "none"
PORT: Final = 29_511
"""Where machines meet unless they are told; torchrun's own is 29400 or 29500."""
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Two jobs of Slurm whose first machine is the same meet at different ports."""

Environ = Mapping[str, str]


class LaunchedBy(NamedTuple):
    """What an environment says."""

    nnodes: str
    node_rank: str
    endpoint: str
    """Empty where it does not say."""
    job: str
    tasks_per_machine: str
    """How many commands were started on a machine; one is wanted."""


def launch_options(options: Mapping[str, Any], environ: Environ) -> tuple[dict[str, Any], str]:
    """Returns the launch options, with what is not among them taken from the environment; and a line that says so.

    Raises:
        ConfigError: the launcher that was named has not started this, or has started it wrongly.
    """
    asked = {key: value for key, value in options.items() if value not in (None, "")}
    name = asked.get("launcher", AUTO)
    if name == NONE or (name == AUTO and "nnodes" in asked):
        return _with_completion_index(asked, environ), ""
    if name == AUTO:
        found = next(((each, made) for each, read in LAUNCHERS.items() if (made := read(environ)) is not None), None)
        if found is None or found[1].nnodes == "1":
            return asked, ""
        name, facts = found
    elif (read_facts := LAUNCHERS[name](environ)) is None:
        raise ConfigError(f"--launcher {name}: its variables are not in the environment; start this command with it")
    else:
        facts = read_facts
    return _with_facts(asked, name, facts)


def _with_facts(asked: dict[str, Any], name: str, facts: LaunchedBy) -> tuple[dict[str, Any], str]:
    if facts.tasks_per_machine not in ("", "1"):
        raise ConfigError(
            f"--launcher {name}: {facts.tasks_per_machine} of these commands were started on a machine; start one on "
            "each, and use --ranks-per-node for its ranks"
        )
    told = {"nnodes": facts.nnodes, "node_rank": facts.node_rank, "rdzv_endpoint": facts.endpoint, "job": facts.job}
    launch = {key: value for key, value in told.items() if value} | asked
    if "rdzv_endpoint" not in launch:
        raise ConfigError(f"--launcher {name} does not say where machines meet: add --rdzv-endpoint HOST:PORT")
    line = f"{name}: machine {launch['node_rank']} of {launch['nnodes']}, which meet at {launch['rdzv_endpoint']}"
    return launch, line


def _with_completion_index(asked: dict[str, Any], environ: Environ) -> dict[str, Any]:
    index = environ.get("JOB_COMPLETION_INDEX")
    if "nnodes" not in asked or "node_rank" in asked or index is None:
        return asked
    return asked | {"node_rank": index}


def _slurm(environ: Environ) -> LaunchedBy | None:
    # Also a batch script has SLURM_JOB_ID and SLURM_NODEID; only a step started by srun has the rest.
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_STEP_NUM_NODES" not in environ:
        return None
    job = environ.get("SLURM_JOB_ID", "0")
    port = FIRST_PORT + int(job) % NUM_PORTS if job.isdigit() else PORT
    return LaunchedBy(
        nnodes=environ["SLURM_STEP_NUM_NODES"],
        node_rank=environ.get("SLURM_NODEID", ""),
        endpoint=f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
        job=f"slurm-{job}",
        tasks_per_machine=re.sub(r"\(x\d+\)$", "", environ.get("SLURM_STEP_TASKS_PER_NODE", "")),
    )


def first_host(nodes: str) -> str:
    """Returns the first host of a list as Slurm writes it: `n01` of `n[01-04,7],m2`."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if match is None or not (match[1] or match[2]):
        raise ConfigError(f"SLURM_STEP_NODELIST {nodes!r} names no node; give --rdzv-endpoint HOST:PORT")
    first = re.split(r"[-,]", match[2])[0] if match[2] else ""
    return f"{match[1]}{first}{match[3]}"


def _mpi(environ: Environ) -> LaunchedBy | None:
    for size, rank, local in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ):
        if size in environ and rank in environ:
            return LaunchedBy(environ[size], environ[rank], "", "", environ.get(local, ""))
    return None


def _torchrun(environ: Environ) -> LaunchedBy | None:
    job = environ.get("TORCHELASTIC_RUN_ID", environ.get("PET_RDZV_ID", ""))
    if "GROUP_WORLD_SIZE" in environ:
        endpoint = f"{environ.get('MASTER_ADDR', '')}:{PORT}"
        return LaunchedBy(
            environ["GROUP_WORLD_SIZE"], environ["GROUP_RANK"], endpoint, job, environ.get("LOCAL_WORLD_SIZE", "")
        )
    if "PET_NNODES" in environ and "PET_NODE_RANK" in environ:
        host = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
        endpoint = f"{host}:{PORT}" if host else environ.get("PET_RDZV_ENDPOINT", "")
        return LaunchedBy(environ["PET_NNODES"], environ["PET_NODE_RANK"], endpoint, job, "")
    return None


LAUNCHERS: Final[Mapping[str, Callable[[Environ], LaunchedBy | None]]] = {
    "torchrun": _torchrun, "slurm": _slurm, "mpi": _mpi,
}  # fmt: skip
"""By name, in the order in which `auto` looks: torchrun may itself have been started by the others."""
