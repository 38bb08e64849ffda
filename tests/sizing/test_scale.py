"""Scale models keep the proportions of what they stand for, and say so when they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.config.cluster import DEVICES, STORAGES, ClusterConfig
from capricorn.config.fields import validate
from capricorn.config.presets import CLUSTERS, MODELS
from capricorn.config.resolve import load_cluster, load_model
from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError
from capricorn.sizing.memory import dense_params, num_moe_layers, total_params
from capricorn.sizing.scale import scale

PUBLISHED = [name for name in MODELS if "tiny" not in name and "small" not in name]
MEASURED = {"name": "mine", "attention_s": 0.02, "expert_s": 0.03, "rate_bytes_per_s": "200Mbit", "device": "cpu"}


def scaled(model: str = "mixtral-8x7b", cluster: str = "p4d", replicas: int = 2, **fields: Any) -> Scenario:
    values = load_cluster(cluster) | {"nodes": 4, "device": "cpu"} | fields
    parts = {"model": load_model(model), "cluster": validate(ClusterConfig, values, "test")}
    return scale(validate(Scenario, parts | {"system": {"replicas": replicas}}, "test"))


def proportions(scenario: Scenario) -> list[float]:
    """All-to-all and checkpoint against computing: here, relative to there."""
    emulation = scenario.emulation
    assert emulation is not None
    assert emulation.there is not None
    there, here = emulation.there, emulation.here
    parts = ("all_to_all_s", "checkpoint_s")
    return [getattr(here, part) / here.compute_s / (getattr(there, part) / there.compute_s) for part in parts]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_every_published_model_keeps_its_proportions_on_every_cluster(model: str, cluster: str) -> None:
    scenario = scaled(model, cluster)
    assert proportions(scenario) == pytest.approx([1, 1], rel=0.03)
    assert scenario.model.family == load_model(model).family
    assert scenario.model.num_experts == load_model(model).num_experts


@settings(max_examples=30, deadline=None)
@given(
    model=st.sampled_from(["mixtral-8x7b", "olmoe-1b-7b", "gpt-350m-16e"]),
    cluster=st.sampled_from(sorted(CLUSTERS)),
    nodes=st.sampled_from([2, 4, 8]),
    rho=st.floats(0.5, 2.0),
)
def test_rho_is_what_was_asked_for_and_proportions_hold(model: str, cluster: str, nodes: int, rho: float) -> None:
    scenario = scaled(model, cluster, nodes=nodes, rho=rho)
    assert scenario.emulation is not None
    assert scenario.emulation.rho == pytest.approx(rho, rel=0.04)
    assert proportions(scenario) == pytest.approx([1, 1], rel=0.05)


def test_an_iteration_lasts_as_long_as_was_asked_for() -> None:
    for seconds in (1.0, 3.0):
        emulation = scaled(iteration_s=seconds).emulation
        assert emulation is not None
        assert emulation.here.compute_s + emulation.here.all_to_all_s == pytest.approx(seconds, rel=0.02)


def test_all_time_of_the_target_is_found_again_in_fewer_layers() -> None:
    coarse, fine = scaled(moe_layers=4), scaled(moe_layers=8)
    assert coarse.emulation is not None
    assert fine.emulation is not None
    assert (num_moe_layers(coarse.model), num_moe_layers(fine.model)) == (4, 8)
    assert coarse.emulation.pace.attention_s == pytest.approx(2 * fine.emulation.pace.attention_s)
    assert coarse.emulation.here.compute_s == pytest.approx(fine.emulation.here.compute_s)


def test_several_ranks_share_the_work_of_their_node() -> None:
    one, two = scaled(), scaled(ranks_per_node=2)
    assert two.model.tokens_per_rank == pytest.approx(one.model.tokens_per_rank / 2, rel=0.3)
    assert proportions(two) == pytest.approx([1, 1], rel=0.05)


def test_the_dense_share_of_a_mixtral_stays_near_that_of_the_target() -> None:
    target = load_model("mixtral-8x7b")
    model = scaled().model
    shares = [dense_params(one) / total_params(one) for one in (model, target)]
    assert shares[0] == pytest.approx(shares[1], rel=0.5)


def test_storage_is_scaled_like_the_links() -> None:
    emulation = scaled(cluster="p4d").emulation
    assert emulation is not None
    node, total = STORAGES["shared-20g"]
    assert emulation.storage_node_bytes_per_s is not None
    link_there = 50e9 * 0.6
    assert emulation.storage_node_bytes_per_s / emulation.link_bytes_per_s == pytest.approx(node / link_there)
    assert emulation.storage_total_bytes_per_s == emulation.storage_node_bytes_per_s
    assert total == node


def test_drives_of_a_node_are_not_shared() -> None:
    emulation = scaled(cluster="dgx-a100").emulation
    assert emulation is not None
    assert emulation.storage_total_bytes_per_s is None


def test_a_faster_device_leaves_less_time_to_hide_a_checkpoint() -> None:
    slow, fast = (scaled(accelerator=name).emulation for name in ("v100", "h100"))
    assert slow is not None
    assert fast is not None
    assert fast.rho / slow.rho == pytest.approx(DEVICES["h100"] / DEVICES["v100"], rel=0.03)


def test_the_same_scenario_gives_the_same_scale_model() -> None:
    assert scaled() == scaled()


def test_a_scaled_scenario_reads_back_as_itself() -> None:
    scenario = scaled(rho=0.9)
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario


def test_local_runs_are_left_as_they_are() -> None:
    scenario = Scenario(model=load_model("mixtral-tiny"))
    assert scale(scenario) is scenario


def test_a_measured_cluster_runs_the_model_as_it_is() -> None:
    model = load_model("mixtral-tiny")
    scenario = scale(validate(Scenario, {"model": model, "cluster": validate(ClusterConfig, MEASURED, "test")}, "test"))
    assert scenario.model == model
    assert scenario.emulation is not None
    assert scenario.emulation.target is None
    # Two layers of attention and experts, forward and, twice as long, backward.
    assert scenario.emulation.here.compute_s == pytest.approx(3 * 2 * (0.02 + 0.03))
    assert scenario.emulation.link_bytes_per_s == 25e6


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 1}, "needs --nodes 2 or more"),
    ({"device": "cuda"}, "use --device cpu"),
    ({"accelerator": "a1000"}, "did you mean 'a100'?"),
    ({"storage": "nvme-gen5"}, "unknown storage 'nvme-gen5'"),
    ({"rate_bytes_per_s": "1Kbit"}, "set cluster.rate_bytes_per_s"),
    ({"iteration_s": 0.01}, "cluster.iteration_s"),
    ({"rate_bytes_per_s": "fast"}, "not a rate: 'fast'"),
    ({"replicas": 1, "rho": 0.9}, "no checkpoint crosses the network"),
    ({"iteration_s": float("inf")}, "should be a finite number"),
    ({"rho": float("nan")}, "should be"),
    ({"attention_s": 0.1}, "give both attention_s and expert_s"),
    ({"link_bytes_per_s": None}, "needs accelerator and link_bytes_per_s, or attention_s and expert_s"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_cluster_that_cannot_be_modelled_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_describes_hardware_cannot_be_set_where_durations_are_given() -> None:
    for field, value in {"rho": 0.5, "iteration_s": 5.0, "mfu": 0.5, "accelerator": "a100"}.items():
        with pytest.raises(ConfigError, match=rf"cluster\.{field} means nothing on --cluster mine"):
            validate(ClusterConfig, MEASURED | {field: value}, "test")


def test_settings_of_an_emulation_mean_nothing_on_local() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.qos means nothing on --cluster local"):
        validate(ClusterConfig, {"qos": True}, "test")


def test_a_model_too_small_for_its_cluster_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="too short to be paced: use a published model"):
        scaled("mixtral-tiny", "p3dn")


def test_a_cluster_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('accelerator = "h100"\ndevices_per_node = 4\nlink_bytes_per_s = "200Gbit"\n')
    cluster = validate(ClusterConfig, load_cluster(str(path)) | {"device": "cpu"}, "test")
    assert (cluster.name, cluster.link_bytes_per_s, cluster.devices_per_node) == ("mine", 25e9, 4)


def test_the_examples_are_valid() -> None:
    folder = Path(__file__).parents[2] / "examples/clusters"
    cluster = validate(ClusterConfig, load_cluster(str(folder / "measured.toml")) | {"device": "cpu"}, "test")
    model = load_model(str(folder / "moe16.toml"))
    scenario = scale(validate(Scenario, {"model": model, "cluster": cluster}, "test"))
    assert scenario.emulation is not None
    assert scenario.emulation.here.checkpoint_s == pytest.approx(0.4, rel=0.02)  # 10 MB at 200 Mbit/s
