"""States of every kind: strategies for trees of plain values, and for tensors that are kept or must be refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from capricorn.runtime.save.staging import Stager
from capricorn.runtime.store.slot import Slot
from capricorn.systems.tensor_bytes import DTYPES

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 64]), max_size=4).map(tuple)
NAMES = st.one_of(
    st.text(min_size=0, max_size=8),
    st.sampled_from(["a", "a/b", "a.b", "..", "/", "%2F", "ä😀", "line\nbreak", "rank0/a", "value", "values/a", " "]),
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**40), max_value=10**40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.complex_numbers(allow_nan=True),
    st.text(max_size=6),
    st.binary(max_size=6),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.floats(-2, 2), st.booleans(), st.none())


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor whose bytes are random, so that NaNs, infinities and denormals occur."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(torch.tensor(shape).prod()) if shape else 1
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fingerprint(value: Any) -> Any:
    """What is equal for two values only if types, bits and order are."""
    kind = type(value)
    if isinstance(value, Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return "tensor", str(value.dtype), tuple(value.shape), raw
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, str(value.dtype), value.shape, value.tobytes()
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, dict):
        return kind, [(fingerprint(key), fingerprint(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [fingerprint(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(fingerprint(each)) for each in value)
    return kind, value


def wreck(tensors: Mapping[str, Any]) -> None:
    """Overwrites tensors."""
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(random_bits(tuple(tensor.shape), tensor.dtype, 999))


TENSORS = st.builds(random_bits, SHAPES, st.sampled_from(list(DTYPES.values())), st.integers(0, 99))


def plain_values() -> st.SearchStrategy[Any]:
    """Trees of plain Python values and tensors."""
    return st.recursive(
        st.one_of(ATOMS, TENSORS),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
            st.sets(st.one_of(st.text(max_size=3), st.integers()), max_size=3),
        ),
        max_leaves=8,
    )


@dataclass(frozen=True)
class Given:
    """Tensors by name, and the names of those that must be refused."""

    tensors: Mapping[str, Any]
    refused: frozenset[str]


KEPT = ("plain", "plain", "parameter", "transposed", "strided", "offset", "tied")
REFUSED = ("expanded", "overlapping", "conjugated", "negated", "meta", "sparse", "subclass", "part", "inference", "int")


class Subclass(Tensor):
    pass


def shaped(kind: str, base: Tensor, before: Mapping[str, Any]) -> Any:
    """A tensor of that kind made of a plain one; the plain one itself where that kind needs what it has not."""
    plain = [each for each in before.values() if type(each) is Tensor and each.is_contiguous() and each.numel() > 1]
    match kind:
        case "parameter" if base.is_floating_point() and base.dtype.itemsize > 1:
            return torch.nn.Parameter(base)
        case "transposed" if base.dim() > 1:
            return base.transpose(0, -1)
        case "strided" if base.dim():
            return torch.cat([base, base], dim=-1)[..., ::2] if base.dtype.itemsize > 1 else base
        case "offset" if base.dim() and len(base) > 1:
            return base[1:]
        case "tied" if before:
            return next(iter(before.values()))
        case "expanded":
            return base.unsqueeze(0).expand(3, *base.shape)
        case "overlapping":
            return torch.zeros(9).as_strided((4, 4), (1, 1))
        case "conjugated":
            return torch.ones(3, dtype=torch.complex64).conj()
        case "negated":
            return torch.ones(3, dtype=torch.complex64).conj().imag
        case "meta":
            return base.to("meta")
        case "sparse":
            return torch.ones(2, 2).to_sparse()
        case "subclass":
            return torch.ones(2).as_subclass(Subclass)
        case "part" if plain:
            return plain[0].reshape(-1)[1:]
        case "inference":
            with torch.inference_mode():
                return torch.ones(2, 2)
        case "int":
            return 3
        case _:
            return base


def is_refused(kind: str, tensor: Any, base: Tensor) -> bool:
    if kind == "expanded":
        return bool(base.numel())
    return kind in REFUSED and tensor is not base


@st.composite
def givens(draw: st.DrawFn, kinds: tuple[str, ...] = KEPT + REFUSED) -> Given:
    """Tensors of every kind under any names."""
    tensors: dict[str, Any] = {}
    refused = set()
    for name in draw(st.lists(NAMES, min_size=1, max_size=5, unique=True)):
        base, kind = draw(TENSORS), draw(st.sampled_from(kinds))
        tensors[name] = shaped(kind, base, {key: each for key, each in tensors.items() if key not in refused})
        if is_refused(kind, tensors[name], base):
            refused.add(name)
    return Given(tensors, frozenset(refused))


def staged_blocks(stager: Stager, slot: Slot) -> Iterator[int]:
    """Stages the state into a slot on this thread; yields the index of each block once it is there."""
    return stager.copy(stager.pieces(slot))
