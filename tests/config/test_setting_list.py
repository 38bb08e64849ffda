"""The settings of a scenario as a list: each is described, and what `--set` takes is what the list shows."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pytest
from pydantic import Field

from capricorn.config.fields import ByteCount, FrozenModel, Option
from capricorn.config.resolve import assign, load_model
from capricorn.config.scenario import Scenario
from capricorn.config.setting_list import Setting, all_settings, options, settings_in
from capricorn.loads.synthetic import PHASES


class _Section(FrozenModel):
    speed: Annotated[int, Option("--speed", "Work")] = Field(default=3, ge=2, le=9, description="So fast")
    size_bytes: ByteCount | None = Field(default=None, gt=0, description="So large")
    way: Literal["fast", "slow"] | float = Field(default="slow", description="So")
    is_on: bool = Field(default=True, description="Whether")


SECTION = {setting.field: setting for setting in settings_in("section", _Section)}


@pytest.mark.parametrize("setting", [*all_settings(), *options()], ids=lambda setting: setting.key)
def test_every_setting_says_in_one_line_what_it_does(setting: Setting) -> None:
    assert len(setting.description.split()) >= 2
    assert "\n" not in setting.description
    assert not setting.description.endswith(".")


@pytest.mark.parametrize("setting", options(), ids=lambda setting: setting.key)
def test_a_default_that_depends_on_the_machine_is_said_in_words(setting: Setting) -> None:
    assert setting.option
    assert not setting.option.computed or re.search(r"\(default: .+\)", setting.description)


def test_no_option_is_spelled_twice() -> None:
    names = [setting.option.name for setting in options() if setting.option]
    assert len(names) == len(set(names))


def test_a_type_is_told_with_its_limits() -> None:
    told = {name: setting.describe_type() for name, setting in SECTION.items()}
    assert told == {
        "speed": "int >= 2, <= 9",
        "size_bytes": "bytes > 0",
        "way": "fast|slow|float",
        "is_on": "true|false",
    }
    assert (SECTION["speed"].least, SECTION["is_on"].choices, SECTION["way"].choices) == (2, ("true", "false"), ())


def test_every_default_can_be_written_as_it_is_told() -> None:
    scenario = Scenario(model=load_model("mixtral-tiny"))
    told = {each.key: each.describe_default() for each in all_settings()}
    written = [f"{key}={default}" for key, default in told.items() if default != "-" and not key.startswith("model.")]
    assert assign(scenario, written) == scenario


def test_the_option_of_loads_names_every_phase() -> None:
    (loads,) = (setting for setting in options() if setting.key == "loads.source")
    assert [phase for phase in PHASES if phase not in loads.description] == []
