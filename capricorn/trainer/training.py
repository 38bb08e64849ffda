"""The training of one rank: model, optimizer, data and their state. Made once, and kept when the job starts again.

Knows no checkpoint, no failure and no process.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from capricorn.config.scenario import Scenario
from capricorn.emulation.route import Route
from capricorn.loads.forced_routing import ForcedRouting
from capricorn.loads.load_source import source_shares
from capricorn.records.job_file import Job
from capricorn.trainer.data import Batches
from capricorn.trainer.exchange import Networks
from capricorn.trainer.models import build_model
from capricorn.trainer.optimizer import Optimizer
from capricorn.trainer.training_state import training_state


class RankTraining:
    """One rank's part of the training, at the initial state of the seed."""

    def __init__(self, job: Job, rank: int, device: torch.device, routes: dict[int, Route], timeout: timedelta) -> None:
        """Builds all parts; collective: all ranks are in the default group.

        Args:
            job: the scenario and the file of tokens.
            rank: this rank.
            device: where the model lives.
            routes: by rank, the way there over paced links.
            timeout: of collectives.

        Raises:
            ConfigError: the model, the text or the load source does not fit the scenario.
        """
        scenario = job.scenario
        seed, topology = scenario.train.seed, scenario.topology
        self.device, self.forced_routing = device, _forced_routing(scenario, rank)
        self.networks = nets = Networks(topology, rank, routes, timeout)
        self.model = build_model(
            scenario.model, nets.experts.rank, nets.experts.size, nets.experts, device, seed, self.forced_routing,
            nets.everyone,
        )  # fmt: skip
        self.optimizer = Optimizer(self.model, scenario.train, nets.everyone, nets.experts, nets.replicas)
        shape = (scenario.model.batch_size, scenario.model.seq_len)
        self.batches = Batches(job.tokens, rank, topology.world_size, *shape, seed)
        torch.manual_seed(seed * topology.world_size + rank)
        self.state = training_state(self.optimizer, self.batches, device)

    def leave(self) -> None:
        """Lets go of a group that has lost a member; the state stays as it is."""
        self.networks.leave()
        self.optimizer.follow_networks()

    def rejoin(self) -> None:
        """Goes on in the default group of now, which has the ranks of the one before; collective."""
        self.networks.rejoin()
        self.optimizer.follow_networks()


def _forced_routing(scenario: Scenario, rank: int) -> ForcedRouting | None:
    """Returns the forced routing of a scenario with a load source; None if the router decides."""
    loads, train, model = scenario.loads, scenario.train, scenario.model
    shares_IME = source_shares(loads, model, num_iterations=train.iterations, seed=train.seed)
    if shares_IME is None:
        return None
    layers = [layer for layer in range(model.num_layers) if model.is_moe(layer)]
    return ForcedRouting(shares_IME, layers=layers, top_k=model.top_k, seed=train.seed, rank=rank)
