"""The size formulas against what was published, and against counting by hand."""

from __future__ import annotations

import pytest

from capricorn.config.cluster import ClusterConfig
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import Scenario, SystemConfig
from capricorn.sizing.memory import (
    NUM_SLOTS,
    SLOT_OVERHEAD_BYTES,
    STATE_BYTES_PER_PARAM,
    active_params,
    needs_of,
    total_params,
)
from capricorn.systems.registry import SYSTEMS
from capricorn.systems.settings import with_options

PUBLISHED_BILLIONS = {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "deepseek-moe-16b": 16.4,
    "deepseek-v3": 671.0,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "olmoe-1b-7b": 6.9,
    "gpt-oss-20b": 20.9,
    "switch-base-64": 3.8,
    "gpt-350m-16e": 1.9,
}
ACTIVE_BILLIONS = {
    "mixtral-8x7b": 12.9, "mixtral-8x22b": 39.2, "deepseek-moe-16b": 2.8, "deepseek-v3": 37.0, "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.2, "olmoe-1b-7b": 1.3,
}  # fmt: skip
"""Switch routes to one expert where our gate takes two, and gpt-oss counts no embedding: both are left out."""


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_total_parameters_are_within_2_percent_of_the_published(name: str) -> None:
    assert total_params(load_model(name)) / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.02)


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_active_parameters_are_within_2_percent_of_the_published(name: str) -> None:
    assert active_params(load_model(name)) / 1e9 == pytest.approx(ACTIVE_BILLIONS[name], rel=0.02)


def scenario(nodes: int = 2, **sections: object) -> Scenario:
    parts = {"model": load_model("mixtral-tiny"), "cluster": ClusterConfig(nodes=nodes)} | sections
    return Scenario.model_validate(parts)


def test_shards_of_an_even_split_add_up_to_the_whole_state() -> None:
    total = STATE_BYTES_PER_PARAM * total_params(load_model("mixtral-tiny"))
    shards = 4 * needs_of(scenario(4), cuda=False).shard_bytes
    assert total <= shards <= total + 4 * STATE_BYTES_PER_PARAM


def test_the_store_holds_two_slots_of_each_replica() -> None:
    total = STATE_BYTES_PER_PARAM * total_params(load_model("mixtral-tiny"))
    two = needs_of(scenario(), cuda=False).store_bytes
    one = needs_of(scenario(system=SystemConfig(replicas=1)), cuda=False).store_bytes
    assert two == 2 * one
    assert 0 < one - NUM_SLOTS * total < 2 * NUM_SLOTS * (SLOT_OVERHEAD_BYTES + 1024)


@pytest.mark.parametrize("system", [SystemConfig(name="none"), SystemConfig(every=0)])
def test_without_checkpoints_there_is_no_store(system: SystemConfig) -> None:
    assert needs_of(scenario(system=system), cuda=False).store_bytes == 0


@pytest.mark.parametrize("name", [name for name, entry in SYSTEMS.items() if entry.writes_files])
def test_systems_that_write_files_take_tmpfs_only_for_files_that_lie_there(name: str) -> None:
    total = STATE_BYTES_PER_PARAM * total_params(load_model("mixtral-tiny"))
    system = SystemConfig(name=name)
    on = {medium: with_options(scenario(system=system), medium=medium, keep=3) for medium in ("disk", "tmpfs")}
    assert needs_of(on["disk"], cuda=False).store_bytes == 0
    assert needs_of(on["tmpfs"], cuda=False).store_bytes == 4 * total


def test_gemini_needs_its_buffers_beside_what_others_need() -> None:
    needs = {name: needs_of(scenario(system=SystemConfig(name=name)), cuda=False) for name in ("capricorn", "gemini")}
    more = needs["gemini"].process_bytes - needs["capricorn"].process_bytes
    ranks = scenario().topology.world_size
    assert more == ranks * 4 * needs["gemini"].shard_bytes  # the four buffers are larger than this small shard


def test_a_real_machine_needs_its_own_share_only() -> None:
    launch = LaunchConfig(nnodes=2, rdzv_endpoint="a:1")
    all_here, one_here = needs_of(scenario(), cuda=False), needs_of(scenario(launch=launch), cuda=False)
    assert one_here.store_bytes == all_here.store_bytes // 2
    assert one_here.process_bytes < all_here.process_bytes


def test_on_cuda_the_training_state_is_not_host_memory() -> None:
    on_cpu, on_cuda = needs_of(scenario(), cuda=False), needs_of(scenario(), cuda=True)
    assert on_cpu.process_bytes - on_cuda.process_bytes == 2 * on_cpu.device_bytes
