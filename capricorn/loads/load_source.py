"""The shares that the load source of a run gives, whichever it is."""

from __future__ import annotations

from pathlib import Path

from capricorn.config.scenario import ROUTER, LoadsConfig, ModelConfig
from capricorn.errors import unknown_name
from capricorn.loads.load_trace import Shares, trace_shares
from capricorn.loads.synthetic import PHASES, synthetic_shares
from capricorn.sizing.memory import num_moe_layers


def source_shares(loads: LoadsConfig, model: ModelConfig, *, num_iterations: int, seed: int) -> Shares | None:
    """Returns the shares [iterations, MoE layers, experts] of a run, or None if its router decides.

    Args:
        loads: the load source, and where a run begins in it.
        model: whose experts they are.
        num_iterations: of the run.
        seed: of synthetic loads.

    Raises:
        ConfigError: the source is neither the router nor a phase nor a trace that suits the model.
    """
    size = {"num_layers": num_moe_layers(model), "num_experts": model.num_experts, "top_k": model.top_k}
    size |= {"first": loads.first, "num_iterations": num_iterations}
    if loads.source == ROUTER:
        return None
    if loads.source in PHASES:
        return synthetic_shares(loads.source, seed=seed, **size)
    if not Path(loads.source).suffix:
        raise unknown_name("source of loads", loads.source, [ROUTER, *PHASES, "FILE.npz"])
    return trace_shares(Path(loads.source), **size)
