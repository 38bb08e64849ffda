"""Signals that end a program: heard once, at a moment that suits, unless they were ignored on purpose."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from capricorn.launch.interrupts import SIGNALS, Interrupts, are_heard


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts all handlers back, however the test ends."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_stays_ignored_and_the_others_are_heard(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        interrupts.check()
        assert number not in are_heard(*SIGNALS)
        other = next(each for each in SIGNALS if each is not number)
        signal.raise_signal(other)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_that_is_not_ignored_ends_the_program_in_order(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        signal.raise_signal(number)  # a second one does no more than the first
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_torchrun_is_told_of_no_signal_that_is_ignored(number: signal.Signals) -> None:
    code = f"""
import signal, sys
signal.signal(signal.{number.name}, signal.SIG_IGN)
from types import ModuleType
torchrun = sys.modules["torch.distributed.run"] = ModuleType("run")
torchrun.main = lambda arguments: print(*arguments)
sys.modules["torch"] = sys.modules["torch.distributed"] = ModuleType("torch")
sys.argv = ["agent", "17", "--nnodes", "1"]
from capricorn.launch import torchrun_agent
torchrun_agent.die_with_parent = lambda parent: None
torchrun_agent.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    option, heard, *rest = done.stdout.split()
    assert option == "--signals-to-handle"
    assert set(heard.split(",")) == {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"} - {number.name}
    assert rest[:2] == ["--nnodes", "1"]
