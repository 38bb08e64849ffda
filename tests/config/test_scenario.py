"""Presets, overrides, faults and the one-line errors of configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from capricorn.compare.compare_record import flat_settings
from capricorn.config import resolve
from capricorn.config.cluster import ClusterConfig
from capricorn.config.fault_kinds import KINDS
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import validate
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.presets import MODELS
from capricorn.config.resolve import load_model, parse_ckpt
from capricorn.config.scenario import Scenario, SystemConfig, TrainConfig
from capricorn.errors import ConfigError, note_once
from capricorn.systems.settings import override

TINY = Scenario(model=load_model("mixtral-tiny"))

MODEL_TOML = """
family = "mixtral"
num_layers = 2
hidden = 32
ffn = 48
num_heads = 2
num_kv_heads = 1
head_dim = 16
num_experts = 4
top_k = 2
vocab_size = 256
seq_len = 32
batch_size = 1
"""


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_is_a_valid_scenario_of_two_nodes(name: str) -> None:
    assert Scenario(model=load_model(name)).model.name == name


def test_a_resolved_scenario_reads_back_as_itself() -> None:
    scenario = TINY.model_copy(update={"faults": (FaultSpec.parse("kill@rank=1,iteration=11"),)})
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario


def test_a_scenario_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TINY.train.seed = 1


# --- overrides


def test_overrides_take_the_type_of_their_field() -> None:
    changed = override(TINY, ["model.batch_size=4", "train.lr=1e-4", "store.keep=true", "store.root=/mnt/a=b"])
    assert changed.model.batch_size == 4
    assert changed.train.lr == 1e-4
    assert changed.store.keep is True
    assert changed.store.root == "/mnt/a=b"


@pytest.mark.parametrize(
    ("old", "new", "text", "value"),
    [
        ("system.give_way", "system.idle_priority", "false", False),
        ("gemini.mu", "system.options.mu", "0.5", 0.5),
        ("storage.medium", "system.options.medium", "tmpfs", "tmpfs"),
    ],
)
def test_a_key_of_an_earlier_version_still_sets_its_field_and_says_so(
    old: str, new: str, text: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    note_once.cache_clear()
    system = "torchsnapshot" if "medium" in old else "gemini"
    changed = override(TINY, [f"system.name={system}", f"{old}={text}"])
    assert flat_settings(changed)[new] == value
    resolve.note_older([f"{old}={text}", f"{new}={text}", f"{old}={text}"])
    assert capsys.readouterr().err == f"note: {old} is now {new}\n"


def test_every_renamed_key_is_known_by_its_new_name_alone() -> None:
    tree = TINY.model_dump()
    for old, new in resolve.RENAMED.items():
        section, _, field = new.partition(".")
        assert field in tree[section]
        assert old.partition(".")[2] not in tree[section]


def test_records_of_an_earlier_version_are_read_by_the_names_of_today() -> None:
    system = TINY.system.model_dump()
    old = {key: value for key, value in system.items() if key != "idle_priority"} | {"give_way": False}
    assert SystemConfig.model_validate(old) == TINY.system.model_copy(update={"idle_priority": False})


def test_the_later_of_two_overrides_wins() -> None:
    assert override(TINY, ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("sytem.every=1", "did you mean 'system.every'"),
        ("system.evry=1", "did you mean 'system.every'"),
        ("qqq=1", "sections: model, train"),
        ("train.seed", "is not key=value"),
        ("train.seed=x", "train.seed = 'x'"),
        ("train.iterations=0", "train.iterations = '0'"),
        ("train.iterations=5", "warmup 5 leaves nothing of 5 iterations"),
        ("system.replicas=3", "use --nodes 3 or --replicas 2"),
        ("system.block_bytes=5000", "system.block_bytes"),
        ("cluster.expert_parallel=16", "--expert-parallel 16 does not divide the 2 ranks; use one of 1, 2"),
        ("model.top_k=9", "top_k 9 exceeds num_experts 8"),
    ],
)
def test_a_wrong_override_says_what_is_wrong_in_one_line(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        override(TINY, [assignment])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# --- models


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mixtral-small'"):
        load_model("mixtral-smal")


def test_a_model_may_come_from_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MODEL_TOML)
    model = load_model(str(path))
    assert (model.name, model.hidden, model.tokens_per_rank) == ("mine", 32, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL_TOML + "hiden = 3\n", "unknown key 'hiden'"),
        (MODEL_TOML.replace("num_layers = 2", ""), "num_layers is missing"),
        (MODEL_TOML.replace("num_layers", "layers"), "unknown key 'layers'; did you mean 'num_layers'?"),
        (MODEL_TOML.replace("hidden = 32", 'hidden = "wide"'), "hidden = 'wide'"),
        ("= 3", "is not TOML"),
    ],
)
def test_a_wrong_model_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_model(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        load_model(str(tmp_path / "none.toml"))


def test_gpt_moe_must_divide_among_the_ranks() -> None:
    with pytest.raises(ConfigError, match="8 experts do not divide by 3 ranks"):
        validate(Scenario, {"model": load_model("gpt-moe-tiny"), "cluster": ClusterConfig(nodes=3)}, "options")


# --- --ckpt, faults, launch


@pytest.mark.parametrize(("text", "every"), [("every-iter", 1), ("every-1", 1), ("every-10", 10), ("off", 0)])
def test_ckpt_is_an_interval(text: str, every: int) -> None:
    assert parse_ckpt(text) == every


@pytest.mark.parametrize("text", ["every-0", "every-", "every--1", "every-1.5", "on", "", "every-iter "])
def test_ckpt_refuses_anything_else(text: str) -> None:
    with pytest.raises(ConfigError, match="is not every-iter, every-N with N >= 1, or off"):
        parse_ckpt(text)


def test_a_fault_names_kind_target_iteration_and_moment() -> None:
    fault = FaultSpec.parse("kill@rank=1,iteration=11,op=dispatch.2.backward.end")
    assert (fault.kind, fault.rank, fault.iteration, fault.op) == ("kill", 1, 11, "dispatch.2.backward.end")
    assert FaultSpec.parse("node-loss@node=0,iteration=3").op == "before_update"


def _every_fault() -> list[str]:
    """Each kind in each of its places."""
    targets = {"rank": "rank=1,", "node": "node=0,", "": ""}
    return [
        f"{name}@{targets[kind.target]}iteration=3" + (f",where={place}" if place else "")
        for name, kind in KINDS.items()
        for place in kind.places or ("",)
    ]


@pytest.mark.parametrize(
    "text", [*_every_fault(), "kill-all@iteration=2,op=after_update", "stop@rank=0,iteration=2,seconds=0.5"]
)
def test_a_fault_is_spelled_as_it_was_read(text: str) -> None:
    assert FaultSpec.parse(str(FaultSpec.parse(text))) == FaultSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil@rank=1,iteration=2", "did you mean 'kill'"),
        ("kill@iteration=2", "needs rank="),
        ("node-loss@rank=1,iteration=2", "needs node="),
        ("kill@rank=1", "iteration"),
        ("kill@rank=1,iteration=0", "iteration = '0'"),
        ("kill@rank=x,iteration=2", "rank = 'x'"),
        ("kill@rank=1,iteration=2,when=now", "unknown key 'when'"),
        ("kill@rank=1,iteration=2,op=lunch", "unknown moment 'lunch'"),
        ("kill@rank=1,node=1,iteration=2", "takes rank="),
        ("kill-all@rank=1,iteration=2", "takes neither rank= nor node="),
        ("corrupt@rank=1,iteration=2,where=moon", "where=moon is none of slot, replica, previous, wire, disk"),
        ("truncate@rank=1,iteration=2,where=wire", "where=wire is none of slot, replica, previous, disk"),
        ("kill@rank=1,iteration=2,seconds=3", "kill takes no seconds="),
        ("kill@rank=1,iteration=2,call=3", "kill takes no call="),
        ("torn-commit@rank=1,iteration=2,call=0", "call = '0'"),
    ],
)
def test_a_wrong_fault_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        FaultSpec.parse(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill@rank=2,iteration=1", "names rank 2 of 2"),
        ("node-loss@node=2,iteration=1", "names node 2 of 2"),
        ("kill@rank=0,iteration=31", "comes after the last iteration, 30"),
    ],
)
def test_a_fault_must_hit_something(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Scenario, {"model": TINY.model, "faults": (FaultSpec.parse(text),)}, "options")


def test_real_machines_need_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match="needs --rdzv-endpoint"):
        validate(LaunchConfig, {"nnodes": 2}, "options")
    with pytest.raises(ConfigError, match="--node-rank 2 is not below --nnodes 2"):
        validate(LaunchConfig, {"nnodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "options")


def test_the_earlier_name_of_the_fork_server_is_still_understood() -> None:
    assert override(TINY, ["launch.restart=warm"]) == TINY
    assert validate(LaunchConfig, {"restart": "warm"}, "record") == LaunchConfig()
    assert LaunchConfig().restart == "fork-server"
    with pytest.raises(ConfigError, match="'fork-server' or 'torchrun'"):
        validate(LaunchConfig, {"restart": "cold"}, "options")


def test_the_defaults_are_those_of_the_contract() -> None:
    assert (TINY.train, TINY.system) == (TrainConfig(iterations=30, warmup=5, seed=0), SystemConfig(replicas=2))
    assert (TINY.cluster.nodes, TINY.cluster.ranks_per_node, TINY.system.every) == (2, 1, 1)


def test_sizes_may_be_written_as_people_write_them() -> None:
    assert override(TINY, ["system.block_bytes=1MiB"]).system.block_bytes == 1 << 20
    assert override(TINY, ["system.block_bytes=8192"]).system.block_bytes == 8192
    with pytest.raises(ConfigError, match=r"system\.block_bytes"):
        override(TINY, ["system.block_bytes=a lot"])
