"""A fault of one's own: all ranks of a node freeze for a while, as when its virtual machine is moved, and go on.

    capricorn-bench run --model mixtral-tiny --fault 'examples/own_fault.py:FREEZE@node=1,iteration=5,seconds=0.5'
    capricorn-bench faults --kinds examples/own_fault.py:FREEZE,kill --count 4

A package that is to be installed names it as an entry point, and it is known by that name wherever faults are listed:

    [project.entry-points."capricorn_bench.faults"]
    freeze = "my_package.my_module:FREEZE"
"""

from __future__ import annotations

import signal

from capricorn.config.fault_kinds import FaultKind
from capricorn.config.fault_spec import FaultSpec
from capricorn.faults.context import FaultContext, RevertContext
from capricorn.faults.process_registry import registered


def freeze(fault: FaultSpec, context: FaultContext) -> None:
    """Stops the node's ranks, in the process of its first one: itself last."""
    _send(signal.SIGSTOP, fault, context)


def thaw(fault: FaultSpec, context: RevertContext) -> None:
    """Lets them go on, in the launcher, which is not frozen."""
    _send(signal.SIGCONT, fault, context)


def _send(number: signal.Signals, fault: FaultSpec, context: FaultContext | RevertContext) -> None:
    assert fault.node is not None
    for rank in reversed(context.job.scenario.topology.ranks_of(fault.node)):
        processes = registered(context.job.run_dir, rank)
        if processes is not None:
            processes.worker.send(number)


FREEZE = FaultKind(
    "all ranks of a node freeze", target="node", seconds=1.0, lasts=(0.2, 1.0), inject=freeze, revert=thaw
)
