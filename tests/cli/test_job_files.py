"""Files that start the command on several machines, tried on one: all that comes before the machines meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from capricorn.cli.main import main

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
SAID_BY = {
    "indexed-job": {"JOB_COMPLETION_INDEX": "1"},
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "pytorchjob": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "capricorn-master-0.invalid"},
}
"""What the environment of the second pod says; nobody knows its first one by name here."""
SRUN = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec "$@"
"""


def objects(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def pods(tree: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods, however deep they lie."""
    if isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        for each in tree.values():
            yield from pods(each)
    elif isinstance(tree, list):
        for each in tree:
            yield from pods(each)


def test_each_kind_of_job_has_a_manifest() -> None:
    assert {path.stem for path in MANIFESTS} == SAID_BY.keys()
    kinds = {each["kind"] for path in MANIFESTS for each in objects(path)}
    assert kinds == {"Service", "Job", "JobSet", "PyTorchJob"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_pod_has_memory_for_the_store_a_secret_and_no_rights(path: Path) -> None:
    found = list(pods(objects(path)))
    assert found
    for pod in found:
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        store = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert store["medium"] == "Memory"
        assert store["sizeLimit"].endswith("Gi")
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
        secrets = {each["name"]: each["valueFrom"] for each in container["env"]}
        assert secrets["CAPRICORN_SECRET"]["secretKeyRef"] == {"name": "capricorn", "key": "secret"}
        assert pod["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_its_command_is_one_of_ours(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SAID_BY[path.stem].items():
        monkeypatch.setenv(name, value)
    for pod in pods(objects(path)):
        words = [word.replace("/shared", str(tmp_path)) for word in pod["containers"][0]["args"]]
        monkeypatch.setattr(sys, "argv", ["capricorn-bench", *words, "--dry-run", "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        assert "nnodes=2 spares=0 node_rank=1" in said.out


def test_the_name_of_the_first_pod_is_that_which_the_service_gives_it() -> None:
    service, job = objects(ROOT / "examples" / "kubernetes" / "indexed-job.yaml")
    (pod,) = pods(job)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (jobset,) = objects(ROOT / "examples" / "kubernetes" / "jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    names = {
        "indexed-job": f"{job['metadata']['name']}-0.{pod['subdomain']}",
        "jobset": f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['spec']['network']['subdomain']}",
    }
    for stem, name in names.items():
        (pod,) = pods(objects(ROOT / "examples" / "kubernetes" / f"{stem}.yaml"))
        assert f"--rdzv-endpoint={name}:29511" in pod["containers"][0]["args"]


@pytest.mark.parametrize("code", [0, 7])
def test_the_job_file_of_slurm_starts_one_command_and_ends_as_it_does(code: int, tmp_path: Path) -> None:
    played = tmp_path / "bin"
    played.mkdir()
    (played / "srun").write_text(SRUN)
    run = f'test ${{#CAPRICORN_SECRET}} -gt 40 && exec {sys.executable} -m capricorn "$@"'
    (played / "capricorn-bench").write_text(f"#!/bin/sh\n{run if not code else f'exit {code}'}\n")
    for each in played.iterdir():
        each.chmod(0o755)
    options = ("--model", "mixtral-tiny", "--device", "cpu", "--dry-run")
    ended = subprocess.run(
        ["bash", ROOT / "examples" / "slurm" / "run.sbatch", tmp_path, *options],
        env={
            **os.environ, "PATH": f"{played}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NODEID": "1",
            "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "no-such-node[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    if not code:
        assert "slurm: machine 1 of 2, which meet at no-such-node1:20007" in ended.stderr
        assert f"dir={tmp_path}/job-7/checkpoints" in ended.stdout


def test_the_image_is_made_of_files_that_are_there_by_a_user_of_no_rights() -> None:
    lines = (ROOT / "examples" / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert {"capricorn", "baselines", "cli", "pyproject.toml"} <= set(copied)
    assert "USER capricorn" in lines
