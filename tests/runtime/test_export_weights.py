"""Weights of a persisted checkpoint as safetensors: what the format has no type for is named, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from capricorn.runtime.persist.layout import folder_of
from capricorn.systems.flat_state import FlatState
from capricorn.systems.tensor_bytes import DTYPES
from tests.cli.test_cli import cli
from tests.support.solo import attach, only_rank, persist, save
from tests.support.states import bits, random_bits


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with only_rank(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tier for each dtype, whose checkpoint has one weight."""
    folder = tmp_path_factory.mktemp("tier")
    for name, dtype in DTYPES.items():
        (place := folder / name).mkdir()
        system = attach(FlatState({f"param/{name}": random_bits((3,), dtype, 1)}), place)
        save(system, 1)
        system.close()
        assert persist(place, place / "tier", 1) == ""
    return folder


def test_weights_of_every_type_are_exported_bit_for_bit_or_named_with_what_to_do(
    tiers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = set()
    for name, dtype in DTYPES.items():
        out = tmp_path / f"{name}.safetensors"
        capsys.readouterr()
        if cli("export", folder_of(tiers / name / "tier", 1), "--out", out) == 0:
            exported.add(name)
            assert bits(load_file(out)[name]) == bits(random_bits((3,), dtype, 1))
            continue
        last = capsys.readouterr().err.strip()
        assert f"safetensors has no type for {name} ({name}); load" in last
        assert "dcp_to_torch" in last
        assert "\n" not in last
        assert not out.exists()
    assert {"float32", "bfloat16", "float16", "float64", "int64", "bool"} <= exported
    assert {"complex32", "complex128"}.isdisjoint(exported)
