"""The options that run, compare, faults and doctor share, and the scenario they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import rich_click as click

from capricorn.config.cluster import LOCAL, ClusterConfig
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import validate
from capricorn.config.resolve import assign, load_cluster, load_model, parse_ckpt
from capricorn.config.scenario import ROUTER, Scenario
from capricorn.errors import ConfigError
from capricorn.sizing.scale import scale
from capricorn.systems.registry import canonical_name, check_system
from capricorn.systems.settings import settle
from capricorn.units import KIB

Command: TypeAlias = Callable[..., int]

DEFAULT_WARMUP = 5
SEND_BUFFER_BYTES, CHUNK_BYTES = 16 * KIB, 64 * KIB
"""Of an emulated run: links are slower by orders of magnitude there, and what lies in buffers is in everybody's way."""
DEFAULT_NODES = 2
DEFAULT_REPLICAS = 2

_AT_LEAST_0, _AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)

_SCENARIO_OPTIONS = (
    click.option("--model", default="mixtral-small", show_default=True, help="preset or TOML file; see `list models`"),
    click.option("--ckpt", default="every-iter", show_default=True, help="every-iter, every-N or off"),
    click.option("--iterations", type=_AT_LEAST_1, default=30, show_default=True, help="iterations to train"),
    click.option("--warmup", type=_AT_LEAST_0, help="first iterations, left out of the summary  [default: 5]"),
    click.option("--seed", type=_AT_LEAST_0, default=0, show_default=True, help="of weights, data order and routing"),
    click.option("--nodes", type=_AT_LEAST_1, help="failure domains on this machine  [default: 2; 1 with one GPU]"),
    click.option("--ranks-per-node", type=_AT_LEAST_1, help="[default: 1; on CUDA one rank per GPU]"),
    click.option("--replicas", type=_AT_LEAST_1, help="copies of each shard, one of them local  [default: 2]"),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option("--cluster", default="local", show_default=True,
                 help="local, or what to make a scale model of: a preset or TOML file; see `list clusters`"),
    click.option("--loads", default=ROUTER, show_default=True,
                 help="router, warm-up, transient, settling, stable, balanced, or a trace (npz)"),
    click.option("--data", default="stdlib", show_default=True, help="text: a file, a folder, or stdlib"),
    click.option("--nnodes", type=_AT_LEAST_0, default=0, help="real machines, as torchrun's"),
    click.option("--node-rank", type=_AT_LEAST_0, default=0, help="this machine among them, as torchrun's"),
    click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="as torchrun's"),
    click.option("--persist-every", type=_AT_LEAST_0, default=0, show_default=True, metavar="N",
                 help="also keep every N-th iteration on disk; 0 is off"),
    click.option("--persist-dir", default="", metavar="PATH",
                 help="where; one with checkpoints is resumed from  [default: persistent/ of the run]"),
    click.option("--fault", "faults", multiple=True, metavar="KIND@rank=R,iteration=I[,op=...]", help="repeatable"),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="any config field; repeatable"),
    click.option("--keep-store", is_flag=True, help="leave the memory store in place after the run"),
)  # fmt: skip
_OUTPUT_OPTIONS = (
    click.option("--repeats", type=_AT_LEAST_1, default=1, show_default=True, help="times to do it all"),
    click.option("--out", type=click.Path(path_type=Path), default="results", show_default=True, help="folder of runs"),
    click.option("--json", "as_json", is_flag=True, help="print a JSON summary and nothing else"),
    click.option("-q", "--quiet", is_flag=True, help="print the verdict only"),
    click.option("-v", "--verbose", is_flag=True, help="print every iteration, one line each"),
)  # fmt: skip

system_option = click.option("--system", default="capricorn", show_default=True, help="see `list systems`")
json_option = click.option("--json", "as_json", is_flag=True, help="print one JSON object and nothing else")


def scenario_options(command: Command) -> Command:
    """Gives a command the options of a scenario; it is called with `scenario` in their place."""

    @wraps(command)
    def with_scenario(**options: Any) -> int:
        names = inspect.signature(scenario_from).parameters.keys() & options.keys()
        scenario = scenario_from(**{name: options.pop(name) for name in names})
        return command(scenario=scenario, **options)

    return _decorate(with_scenario, _SCENARIO_OPTIONS)


def unresolved_options(command: Command) -> Command:
    """Gives a command the options of a scenario as they are written; `scenario_from` resolves them."""
    return _decorate(command, _SCENARIO_OPTIONS)


def output_options(command: Command) -> Command:
    """Gives a command `repeats`, `out`, `as_json`, `quiet` and `verbose`."""
    return _decorate(command, _OUTPUT_OPTIONS)


def refuse_shared_tier(scenario: Scenario) -> None:
    """Raises ConfigError if several runs would find each other's checkpoints in one --persist-dir."""
    if scenario.persist.dir:
        raise ConfigError(
            f"--persist-dir {scenario.persist.dir}: several runs would go on from each other's checkpoints there; "
            "leave it out, and each has a folder of its own"
        )


def _decorate(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def scenario_from(
    *,
    model: str = "mixtral-small",
    ckpt: str = "every-iter",
    system: str = "capricorn",
    iterations: int = 30,
    warmup: int | None = None,
    seed: int = 0,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    replicas: int | None = None,
    device: str = "auto",
    cluster: str = "local",
    loads: str = ROUTER,
    data: str = "stdlib",
    nnodes: int = 0,
    node_rank: int = 0,
    rdzv_endpoint: str = "",
    persist_every: int = 0,
    persist_dir: str = "",
    faults: Sequence[str] = (),
    assignments: Sequence[str] = (),
    keep_store: bool = False,
    settles: bool = True,
) -> Scenario:
    """The scenario that the options stand for, resolved and checked as far as it can be without this machine.

    Without `settles` the options of the system are those that several systems share, and each takes its own.

    Raises:
        ConfigError: an option, a name, a path or a key is wrong.
    """
    domains = _cluster(cluster, nodes, ranks_per_node, device, nnodes)
    copies = min(DEFAULT_REPLICAS, domains.nodes) if replicas is None else replicas
    buffers = {"send_buffer_bytes": SEND_BUFFER_BYTES} if domains.is_emulated else {}
    planner = {"max_chunk_bytes": CHUNK_BYTES} if domains.is_emulated else _planner(domains, nnodes)
    length = min(DEFAULT_WARMUP, iterations - 1) if warmup is None else warmup
    parts = {
        "model": load_model(model),
        "train": {"iterations": iterations, "warmup": length, "seed": seed},
        "data": {"path": data},
        "cluster": domains,
        "loads": {"source": loads},
        "system": {"name": canonical_name(system), "every": parse_ckpt(ckpt), "replicas": copies} | buffers,
        "planner": planner,
        "persist": {"every": persist_every, "dir": persist_dir},
        "store": {"keep": keep_store},
        "launch": {"nnodes": nnodes, "node_rank": node_rank, "rdzv_endpoint": rdzv_endpoint},
        "faults": tuple(map(FaultSpec.parse, faults)),
    }
    scenario = scale(assign(validate(Scenario, parts, "options"), assignments))
    check_system(scenario.system.name)
    return _checked(settle(scenario) if settles else scenario)


def _cluster(name: str, nodes: int | None, ranks_per_node: int | None, device: str, nnodes: int) -> ClusterConfig:
    """Defaults: two nodes of one rank on the CPU; on CUDA one rank per GPU, split over two nodes if there are two."""
    from capricorn.launch.preflight import num_cuda_devices

    if nnodes and nodes not in (None, nnodes):
        raise ConfigError(f"--nodes {nodes} contradicts --nnodes {nnodes}: real machines are counted by --nnodes alone")
    fields = load_cluster(name)
    if name != LOCAL and device == "auto":
        device = "cpu"
    num_devices = 0 if device == "cpu" else num_cuda_devices()
    count = nnodes or nodes or (1 if num_devices == 1 else DEFAULT_NODES)
    ranks = ranks_per_node or max(1, num_devices // (1 if nnodes else count))
    chosen = {"nodes": count, "ranks_per_node": ranks, "device": device}
    return validate(ClusterConfig, chosen | fields | _given(nodes=nodes, ranks_per_node=ranks_per_node), "--cluster")


def _planner(cluster: ClusterConfig, nnodes: int) -> dict[str, str]:
    """Where the CPU that computes also moves the bytes over its own loopback, they move best while it waits.

    That is in the all-to-alls, which is the opposite of what is idle where a network moves them.
    """
    from capricorn.launch.preflight import num_cuda_devices

    is_cpu = cluster.device == "cpu" or (cluster.device == "auto" and not num_cuda_devices())
    return {"spans": "none"} if is_cpu and not nnodes else {}


def _given(**options: int | None) -> dict[str, int]:
    """Those that were given, which go before what a cluster's file says."""
    return {name: value for name, value in options.items() if value is not None}


def _checked(scenario: Scenario) -> Scenario:
    """The scenario with its device resolved, once the names that no model checks are found to be known."""
    from capricorn.launch.preflight import resolve_device

    if scenario.loads.source != ROUTER:
        # Also reads a trace, so that its faults are told before anything starts; numpy takes a while to import.
        from capricorn.loads.load_source import given_shares

        given_shares(scenario.loads, scenario.model, num_iterations=scenario.train.iterations, seed=scenario.train.seed)
    if scenario.data.path != "stdlib" and not Path(scenario.data.path).exists():
        raise ConfigError(f"--data {scenario.data.path}: no such file or folder; name one, or stdlib")
    return resolve_device(scenario)
