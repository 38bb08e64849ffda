"""What Slurm, MPI, torchrun and indexed jobs say of the machines, and who goes before whom."""

from __future__ import annotations

import re
from typing import Any

import pytest

from capricorn.config.launcher_environment import PORT, first_host, launch_options
from capricorn.errors import ConfigError

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
TORCHRUN = {
    "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "head",
    "TORCHELASTIC_RUN_ID": "job7",
}  # fmt: skip
PYTORCH_JOB = {"PET_NNODES": "2:3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-master-0"}


@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        (SLURM, {}, {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": "n07:24711", "job": "slurm-4711"}),
        (SLURM, {"rdzv_endpoint": "a:1"},
         {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": "a:1", "job": "slurm-4711"}),
        (MPI, {"rdzv_endpoint": "a:1"}, {"nnodes": "4", "node_rank": "3", "rdzv_endpoint": "a:1"}),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, {"rdzv_endpoint": "a:1"},
         {"nnodes": "2", "node_rank": "0", "rdzv_endpoint": "a:1"}),
        (TORCHRUN, {}, {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": f"head:{PORT}", "job": "job7"}),
        (SLURM | TORCHRUN, {}, {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": f"head:{PORT}", "job": "job7"}),
        (PYTORCH_JOB, {}, {"nnodes": "2:3", "node_rank": "2", "rdzv_endpoint": f"job-master-0:{PORT}"}),
        (SLURM, {"nnodes": "3", "rdzv_endpoint": "a:1"}, {"nnodes": "3", "rdzv_endpoint": "a:1"}),
        (SLURM, {"launcher": "none"}, {"launcher": "none"}),
        ({"JOB_COMPLETION_INDEX": "5"}, {"nnodes": "6", "rdzv_endpoint": "a:1"},
         {"nnodes": "6", "rdzv_endpoint": "a:1", "node_rank": "5"}),
        ({"JOB_COMPLETION_INDEX": "5"}, {}, {}),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, {}, {}),
        ({"SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}, {}, {}),
    ],
)  # fmt: skip
def test_the_environment_says_what_the_command_line_does_not(
    environ: dict[str, str], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found, line = launch_options(options, environ)
    assert found == expected
    is_from_environment = found.keys() - {"node_rank"} != options.keys() - {"node_rank"}
    assert bool(line) == (is_from_environment or environ is MPI or "PMI_SIZE" in environ)


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        ({}, {"launcher": "slurm"}, "--launcher slurm: its variables are not in the environment"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, {}, "4 of these commands were started on a machine"),
        (MPI, {}, "--launcher mpi does not say where machines meet: add --rdzv-endpoint"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, {}, "names no node"),
    ],
)
def test_what_cannot_be_right_is_refused(environ: dict[str, str], options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        launch_options(options, environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-3,7]", "n1"), ("gpu[007,009]-ib", "gpu007-ib"), ("a,b[1-2]", "a")],
)
def test_the_first_of_a_list_of_slurm_is_found(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
