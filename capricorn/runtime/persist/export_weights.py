"""The weights of a persisted checkpoint as one safetensors file, under their global names. Knows no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save

from capricorn.errors import ConfigError
from capricorn.runtime.persist.layout import Manifest
from capricorn.runtime.persist.load import read

PARAM: Final = "param/"
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def weights_of(folder: Path, dtype: str | None) -> bytes:
    """Returns the content of the file: every parameter once, and in its metadata the further names of tied ones.

    Floating-point values are rounded to the nearest of that type, ties to even.

    Raises:
        StoreError: the checkpoint is damaged.
        ConfigError: it has no parameters by such names.
    """
    manifest = Manifest.read(folder)
    wanted = {
        key: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for key, stored in manifest.tensors.items()
        if key.startswith(PARAM)
    }
    if not wanted:
        raise ConfigError(f"{folder} has no tensors under {PARAM}: there are no weights to export")
    read(folder, manifest, wanted)
    tensors = {key.removeprefix(PARAM): tensor for key, tensor in wanted.items()}
    if dtype is not None:
        kind = DTYPES[dtype]
        tensors = {name: each.to(kind) if each.is_floating_point() else each for name, each in tensors.items()}
    return save(tensors, _metadata(manifest))


def _metadata(manifest: Manifest) -> dict[str, str]:
    aliases = {alias.removeprefix(PARAM): name.removeprefix(PARAM) for alias, name in manifest.aliases.items()}
    return {
        "format": "pt",
        "model": manifest.model,
        "run_id": manifest.run_id,
        "iteration": str(manifest.iteration),
        "aliases": json.dumps(aliases, sort_keys=True),
    }
