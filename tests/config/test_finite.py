"""Settings are finite numbers: none takes infinity or what is no number, however it is spelled, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import SettingsModel
from capricorn.config.resolve import assign, load_model
from capricorn.config.scenario import Scenario
from capricorn.config.setting_list import all_settings, settings_in
from capricorn.errors import ConfigError
from capricorn.simulate.training_model import TraceConfig
from capricorn.systems.registry import SYSTEMS
from capricorn.systems.settings import SystemSettings, settle, with_options
from capricorn.units import parse_bytes, parse_rate

NOT_FINITE = ("inf", "-inf", "nan", "Infinity", "1e999")
HUGE = "9" * 400


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models that a value of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for info in annotation.model_fields.values():
            yield from models_in(info.annotation)
    for inner in get_args(annotation):
        yield from models_in(inner)


def settings_models() -> set[type[BaseModel]]:
    systems = {model for entry in SYSTEMS.values() if (model := entry.settings_model())}
    return {*models_in(Scenario), *models_in(TraceConfig), *systems}


def test_every_model_of_settings_refuses_what_is_not_finite() -> None:
    wrong = [model.__name__ for model in settings_models() if model.model_config.get("allow_inf_nan") is not False]
    assert not wrong, f"make them subclasses of {SettingsModel.__name__} or {SystemSettings.__name__}"


def takes_a_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(takes_a_number, get_args(annotation)))


NUMBERS = [setting.key for setting in all_settings() if takes_a_number(setting.info.annotation)]


@pytest.mark.parametrize("key", NUMBERS)
def test_no_setting_takes_what_is_not_finite(key: str) -> None:
    scenario = Scenario(model=load_model("mixtral-tiny"))
    for value in (*NOT_FINITE, HUGE if "bytes" in key else "nan"):
        with pytest.raises(ConfigError) as raised:
            assign(scenario, [f"{key}={value}"])
        assert key.partition(".")[2] in str(raised.value)
        assert "\n" not in str(raised.value)


def system_numbers() -> Iterator[tuple[str, str]]:
    for name, entry in SYSTEMS.items():
        model = entry.settings_model()
        for setting in settings_in("options", model) if model else ():
            if takes_a_number(setting.info.annotation):
                yield name, setting.field


@pytest.mark.parametrize(("system", "field"), list(system_numbers()))
def test_no_option_of_a_system_takes_what_is_not_finite(system: str, field: str) -> None:
    scenario = Scenario(model=load_model("mixtral-tiny"))
    scenario = settle(scenario.model_copy(update={"system": scenario.system.model_copy(update={"name": system})}))
    for value in NOT_FINITE:
        with pytest.raises(ConfigError):
            with_options(scenario, **{field: value})


@pytest.mark.parametrize("value", NOT_FINITE)
def test_no_fault_takes_what_is_not_finite(value: str) -> None:
    with pytest.raises(ConfigError, match=r"seconds = .*finite number"):
        FaultSpec.parse(f"stop@rank=1,iteration=3,seconds={value}")


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
def test_no_file_of_a_model_takes_what_is_not_finite(value: str, tmp_path: Path) -> None:
    table = dict(load_model("mixtral-tiny").model_dump(exclude={"name", "balance_loss"}))
    lines = [f"{key} = {str(each).lower() if isinstance(each, bool) else repr(each)}" for key, each in table.items()]
    (tmp_path / "m.toml").write_text("\n".join([*lines, f"balance_loss = {value}"]))
    with pytest.raises(ConfigError, match=r"balance_loss = .*finite number"):
        load_model(str(tmp_path / "m.toml"))


@pytest.mark.parametrize("text", [HUGE, f"{HUGE}GiB", "9223372036854775808"])
def test_a_size_that_nothing_holds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is more than any memory holds"):
        parse_bytes(text)


@pytest.mark.parametrize("text", [f"{HUGE}bit", f"{HUGE}GB/s"])
def test_a_rate_that_is_infinite_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        parse_rate(text)
