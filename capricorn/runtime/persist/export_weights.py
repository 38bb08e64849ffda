"""The weights of a persisted checkpoint as one safetensors file, under their global names. Knows no training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from capricorn.errors import ConfigError
from capricorn.runtime.persist.layout import Manifest
from capricorn.runtime.persist.load import read
from capricorn.systems.tensor_bytes import dtype_name

PARAM: Final = "param/"
SHOWN: Final = 3
"""Number of tensors that a message names."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def weights_of(folder: Path, dtype: str | None) -> bytes:
    """Returns the content of the file: every parameter once, and in its metadata the further names of tied ones.

    Floating-point values are rounded to the nearest of that type, ties to even.

    Raises:
        StoreError: the checkpoint is damaged.
        ConfigError: it has no parameters by such names, or some of a type that the format lacks.
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
    _refuse_unknown(folder, tensors)
    return save(tensors, _metadata(manifest))


def _refuse_unknown(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    dtypes = {each.dtype for each in tensors.values()}
    lacking = {dtype for dtype in dtypes if not _is_known(dtype)}
    names = [f"{name} ({dtype_name(each.dtype)})" for name, each in tensors.items() if each.dtype in lacking]
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ConfigError(
            f"safetensors has no type for {', '.join(names[:SHOWN])}{more}; load {folder} with torch, which has them: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} OUT.pt"
        )


def _is_known(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


def _metadata(manifest: Manifest) -> dict[str, str]:
    aliases = {alias.removeprefix(PARAM): name.removeprefix(PARAM) for alias, name in manifest.aliases.items()}
    return {
        "format": "pt",
        "model": manifest.model,
        "run_id": manifest.run_id,
        "iteration": str(manifest.iteration),
        "aliases": json.dumps(aliases, sort_keys=True),
    }
