"""Names that become parts of paths, endpoints and timeouts: what cannot be right is refused where it is configured."""

from __future__ import annotations

from pathlib import Path

import pytest
from capricorn.cli.options import scenario_from

from capricorn.config.cluster import ClusterConfig
from capricorn.config.endpoint import Endpoint, parse_endpoint
from capricorn.config.fault_spec import FaultSpec
from capricorn.config.fields import MAX_NAME_BYTES, check_path_part, validate
from capricorn.config.launch_config import LaunchConfig
from capricorn.config.resolve import load_model
from capricorn.config.scenario import ModelConfig, PersistConfig, SystemConfig
from capricorn.conformance.subject import under_test
from capricorn.errors import ConfigError
from tests.cli.test_cli import cli

ODD_NAMES = {
    "": "is empty",
    "a/b": "has a slash",
    "/": "has a slash",
    "..": "begins with '.'",
    ".hidden": "begins with '.'",
    "-rf": "begins with '-'",
    "two\nlines": "cannot be printed",
    "bell\a": "cannot be printed",
    "nul\0": "cannot be printed",
    "raw\udcff": "is not UTF-8",
    " ": "a space",
    "end ": "a space",
    "x" * (MAX_NAME_BYTES + 1): "is longer than",
    "ä" * MAX_NAME_BYTES: "is longer than",
}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_that_is_no_part_of_a_path_is_refused_wherever_it_is_configured(name: str) -> None:
    model = load_model("mixtral-tiny").model_dump()
    for kind, values in ((ModelConfig, model | {"name": name}), (ClusterConfig, {"name": name})):
        with pytest.raises(ConfigError, match=r"name = .* and folders bear this name") as raised:
            validate(kind, values, "here")
        assert ODD_NAMES[name] in str(raised.value)
    with pytest.raises(ConfigError, match="run_id"):
        check_path_part(name, "run_id")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "m_2", "v1.5", "größer", "a b", "x" * MAX_NAME_BYTES])
def test_a_name_that_is_a_part_of_a_path_is_taken(name: str) -> None:
    check_path_part(name, "run_id")


@pytest.mark.parametrize("setting", ["model.name=a/b", "model.name=..", "model.name=-x", "cluster.name=a/b"])
def test_the_command_refuses_an_odd_name_in_one_line_and_leaves_nothing(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = tmp_path / "stores"
    stores.mkdir()
    monkeypatch.chdir(tmp_path)
    code = cli("run", "--model", "mixtral-tiny", "--set", setting, "--set", f"store.root={stores}")
    said = capsys.readouterr().err
    assert (code, len(said.splitlines())) == (2, 1)
    assert setting.partition("=")[2] in said
    assert list(tmp_path.iterdir()) == [stores]
    assert not any(stores.iterdir())


def test_a_models_file_with_a_slash_in_its_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = load_model("mixtral-tiny").model_dump(exclude={"name", "tie_embeddings"})
    lines = ['name = "tiny/odd"', *(f"{key} = {value!r}" for key, value in fields.items())]
    (file := tmp_path / "m.toml").write_text("\n".join(lines))
    assert cli("run", "--model", file) == 2
    assert "'tiny/odd': has a slash" in capsys.readouterr().err


# --- endpoints


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node0:29500", Endpoint("node0", 29500)),
        ("a.b-c.example:1", Endpoint("a.b-c.example", 1)),
        ("10.0.0.1:65535", Endpoint("10.0.0.1", 65535)),
        ("[::1]:29500", Endpoint("::1", 29500)),
        ("::1:29500", Endpoint("::1", 29500)),
        ("[2001:db8::7]:80", Endpoint("2001:db8::7", 80)),
        (" localhost:5 ", Endpoint("localhost", 5)),
    ],
)
def test_an_endpoint_is_read_with_and_without_brackets(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, "--rdzv-endpoint") == endpoint
    assert parse_endpoint(str(endpoint), "--rdzv-endpoint") == endpoint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("node0", "is not HOST:PORT"),
        (":29500", "is not HOST:PORT"),
        ("node0:", "is not HOST:PORT"),
        ("[::1]", "is not HOST:PORT"),
        ("::1", "neither an address nor a host name"),
        ("node0:0", "0 is no port"),
        ("node0:65536", "65536 is no port"),
        ("node0:-1", "-1 is no port"),
        ("node0:http", "http is no port"),
        ("node0:²", "is no port"),
        ("300.1.1.1:80", "neither an address nor a host name"),
        ("[node0]:80", "neither an address nor a host name"),
        ("a b:80", "neither an address nor a host name"),
        ("-x:80", "neither an address nor a host name"),
        ("[fe80::1%eth0]:80", "a scope (%eth0)"),
        ("fe80::1%eth0:80", "a scope (%eth0)"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_with_the_option_and_the_value(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(LaunchConfig, {"nnodes": 2, "rdzv_endpoint": text}, "here")
    assert f"--rdzv-endpoint {text!r}" in str(raised.value)
    assert reason in str(raised.value)


# --- timeouts

NO_TIMEOUTS = ["1e-7", "0", "-1", "inf", "nan", "1e12"]


@pytest.mark.parametrize("value", NO_TIMEOUTS)
@pytest.mark.parametrize("key", ["system.timeout_s", "persist.timeout_s", "launch.frozen_s"])
def test_a_timeout_without_sense_is_refused_where_it_is_written(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        scenario_from(model="mixtral-tiny", assignments=[f"{key}={value}"])


@pytest.mark.parametrize("value", [float(text) for text in NO_TIMEOUTS])
def test_a_timeout_without_sense_is_refused_in_a_job_of_ones_own(value: float) -> None:
    for kind in (SystemConfig, PersistConfig):
        with pytest.raises(ConfigError, match="timeout_s"):
            validate(kind, {"timeout_s": value}, "here")
    with pytest.raises(ConfigError, match="timeout_s"):
        under_test("none", timeout_s=value)


@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_a_fault_that_would_never_end_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        FaultSpec.parse(f"stop@rank=1,iteration=3,seconds={value}")
