"""A command that several machines carry out together: machine 0 acts, and the others follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from capricorn.config.scenario import Scenario
from capricorn.launch import launcher
from capricorn.launch.launcher import Launch


def on_machines(
    command: str,
    scenarios: Sequence[Scenario],
    act: Callable[[Launch], int],
    say: Callable[[str], None],
    **asked: object,
) -> int:
    """Carries out a command; returns its exit code, which is the same on all machines.

    Args:
        command: its name.
        scenarios: all that it is to run, of which the first says how many machines there are and where they meet.
        act: carries it out with what launches a scenario, on machine 0 or where there is but one.
        say: prints a line on machines that come.
        asked: what else the command was asked for, which must be the same on all machines.

    Raises:
        ConfigError: another machine was told to run something else.
        CapricornError: it has failed, here or on machine 0.
        KeyboardInterrupt: it was interrupted.
    """
    own = scenarios[0]
    if not own.launch.nnodes:
        return act(launcher.launch)
    from capricorn.machines.agreement import facts_of

    facts = facts_of(command, scenarios, **asked)
    if own.launch.follows:
        from capricorn.machines.follower import follow

        follow(own, facts, say)
        return 0
    from capricorn.machines.conductor import Conductor
    from capricorn.machines.control_messages import Goodbye
    from capricorn.machines.machine_nodes import launch_on

    with Conductor(own.launch, facts, say) as conductor:
        conductor.gather()
        code = act(partial(launch_on, conductor))
        conductor.close(Goodbye(exit_code=code))
    return code
