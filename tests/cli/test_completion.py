"""What a shell completes: names of systems, models, clusters, faults, phases and settings, asked as a shell asks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from capricorn.cli.main import app
from click.shell_completion import CompletionItem, ShellComplete

from capricorn.config.fault_kinds import KINDS
from capricorn.config.presets import MODELS
from capricorn.loads.synthetic import PHASES
from capricorn.systems.registry import SYSTEMS


def completed(words: str, incomplete: str) -> list[CompletionItem]:
    complete = ShellComplete(app, {}, "capricorn-bench", "_CAPRICORN_BENCH_COMPLETE")
    return complete.get_completions(words.split(), incomplete)


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ("", "co", ["compare"]),
        ("run --system", "capri", ["capricorn"]),
        ("doctor --system", "", list(SYSTEMS)),
        ("run --model", "mixtral-8x", ["mixtral-8x7b", "mixtral-8x22b"]),
        ("run --model", "", list(MODELS)),
        ("run --cluster", "dgx", ["dgx-a100", "dgx-h100"]),
        ("run --cluster", "lo", ["local"]),
        ("run --loads", "", ["router", *PHASES]),
        ("run --ckpt", "e", ["every-iter", "every-"]),
        ("run --fault", "node", ["node-loss@node="]),
        ("run --fault", "kill-", ["kill-all@iteration="]),
        ("run --device", "c", ["cpu", "cuda"]),
        ("run --set", "planner.sp", ["planner.spans="]),
        ("run --set", "planner.spans=l", ["planner.spans=load", "planner.spans=layer"]),
        ("run --set", "planner.gate=", ["planner.gate=true", "planner.gate=false"]),
        ("run --set", "train.seed=", []),
        ("run --set", "system.options.mu", ["system.options.mu="]),
        ("run --set", "system.options.medium=", ["system.options.medium=disk", "system.options.medium=tmpfs"]),
        ("compare --systems", "none,gem", ["none,gemini", "none,gemini-staged"]),
        ("faults --systems", "tor", ["torchsnapshot", "torch-save", "torch-checkpointing"]),
        ("faults --kinds", "kill,", [f"kill,{kind}" for kind in KINDS]),
        ("ablate --spans", "layer,g", ["layer,global"]),
        ("ablate --replan", "never,sp", ["never,speculative"]),
        ("list", "sett", ["settings"]),
        ("check-system", "gem", ["gemini", "gemini-staged"]),
    ],
)
def test_a_shell_completes(words: str, incomplete: str, expected: list[str]) -> None:
    assert [item.value for item in completed(words, incomplete)] == expected


@pytest.mark.parametrize("option", ["--system", "--model", "--cluster", "--loads", "--data", "--persist-dir"])
def test_what_may_be_a_path_is_completed_by_the_shell_where_no_name_fits(option: str) -> None:
    assert [item.type for item in completed(f"run {option}", "./some")] == ["file"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_completes_up_to_its_first_number(kind: str) -> None:
    (item,) = (item for item in completed("run --fault", kind) if item.value.startswith(f"{kind}@"))
    assert item.value.endswith(("rank=", "node=", "iteration="))


def test_completing_imports_no_torch() -> None:
    code = """
import sys
from click.shell_completion import ShellComplete
from capricorn.cli.main import app
print(len(ShellComplete(app, {}, "c", "_C").get_completions(["run", "--system"], "c")), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1", "False"]
