"""Settings of systems: checked by their own models, shared in comparisons, read from older records."""

from __future__ import annotations

from pathlib import Path

import pytest

from capricorn.compare.compare_record import Variant, check_shared_options, flat_settings, parse_variants
from capricorn.config.cluster import ClusterConfig
from capricorn.config.resolve import assign, load_model
from capricorn.config.scenario import Scenario, SystemConfig
from capricorn.errors import ConfigError
from capricorn.systems.settings import file_settings_of, override, settings_of, settle, with_options

TINY = Scenario(model=load_model("mixtral-tiny"))


def under(system: str, **options: object) -> Scenario:
    return TINY.model_copy(update={"system": SystemConfig(name=system, options=options)})


def test_options_take_the_types_of_the_systems_model() -> None:
    scenario = override(TINY, ["system.name=gemini", "system.options.mu=0.5", "system.options.buffer_bytes=1MiB"])
    assert (settings_of(scenario).mu, settings_of(scenario).buffer_bytes) == (0.5, 1 << 20)


def test_every_option_is_written_out_so_that_a_record_says_all() -> None:
    assert settle(under("torchsnapshot")).system.options == {
        "medium": "disk", "fsync": False, "keep": 2, "budget_bytes": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("system", "option", "message"),
    [
        ("gemini", "system.options.mue=1", "system gemini has no such option; did you mean 'mu'"),
        ("capricorn", "system.options.mu=1", "system capricorn has no such option; it has none"),
        ("gemini", "system.options.mu=2", "a safety factor lies in"),
        ("dcp", "system.options.threads=0", "threads = '0'"),
        ("dcp", "system.options={}", "name one of them"),
        ("dcp", "system.options.=1", "unknown key"),
    ],
)
def test_a_wrong_option_is_one_line(system: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        override(TINY, [f"system.name={system}", option])
    assert "\n" not in str(told.value)


def test_on_an_emulated_cluster_a_system_has_defaults_of_its_own() -> None:
    cluster = ClusterConfig.model_validate(
        {"name": "mine", "attention_s": 0.01, "expert_s": 0.01, "rate_bytes_per_s": 1e7, "device": "cpu"}
    )
    emulated = under("torchsnapshot").model_copy(update={"cluster": cluster})
    assert file_settings_of(emulated).in_memory
    assert not file_settings_of(under("torchsnapshot")).in_memory
    assert not file_settings_of(with_options(emulated, medium="disk")).in_memory


def test_another_system_takes_the_options_that_it_has_and_drops_the_rest() -> None:
    scenario = override(under("torchsnapshot", keep=5, budget_bytes=100), ["system.name=dcp"])
    assert scenario.system.options == {"medium": "disk", "fsync": False, "keep": 5, "threads": 1}
    assert override(scenario, ["system.name=capricorn"]).system.options == {}


def test_in_a_comparison_each_system_takes_of_the_shared_options_its_own() -> None:
    variants = parse_variants(["none", "torchsnapshot", "gemini:mu=0.5"])
    shared = assign(TINY, ["system.options.keep=7", "system.options.sweep_rounds=1"])
    check_shared_options(shared, variants)
    by_label = {variant.label: variant.of(shared).system.options for variant in variants}
    assert by_label["none"] == {}
    assert by_label["torchsnapshot"]["keep"] == 7
    assert (by_label["gemini:mu=0.5"]["mu"], by_label["gemini:mu=0.5"]["sweep_rounds"]) == (0.5, 1)


def test_a_shared_option_that_no_system_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeep: none of the systems has such an option; they have .*keep"):
        check_shared_options(assign(TINY, ["system.options.keeep=7"]), parse_variants(["none", "dcp"]))


def test_records_of_an_earlier_version_give_a_system_its_options(tmp_path: Path) -> None:
    tree = TINY.model_dump(mode="json")
    del tree["system"]["options"]
    older = {"gemini": {"mu": 0.7, "tuned_in": "x"}, "storage": {"medium": "tmpfs", "keep": 3}, "dcp": {"threads": 2}}
    read = {
        name: Scenario.model_validate(tree | older | {"system": {"name": name}}) for name in ("gemini", "dcp", "none")
    }
    assert settings_of(read["gemini"]).mu == 0.7
    assert (settings_of(read["dcp"]).keep, settings_of(read["dcp"]).threads) == (3, 2)
    assert settings_of(read["none"]) is None
    assert Variant.parse("gemini:gemini.mu=0.9").of(read["none"]).system.options["mu"] == 0.9


def test_every_setting_has_a_key_of_its_own() -> None:
    settings = flat_settings(settle(under("dcp")))
    assert settings["system.options.threads"] == 1
    assert "system.options" not in settings
