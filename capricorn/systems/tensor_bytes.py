"""Tensors as plain bytes: which of them are no more than their bytes, and the bytes of those. Knows no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

_DTYPES: Final = (
    "bool",
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in _DTYPES if hasattr(torch, name)}
"""By name: the dtypes that are kept."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, without that of the library."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: Tensor) -> str:
    """Returns the dtype, shape and device of a tensor, in words; a CPU is not named."""
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{place}"


def refusal_of(tensor: Tensor) -> str:
    """Returns why a tensor is more, or less, than its bytes, and what to do; empty if it is neither."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}; only plain tensors are kept"
    if tensor.layout != torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else f"of layout {str(tensor.layout).removeprefix('torch.')}"
        return f"is {what}; keep the tensors that it is made of"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"is of dtype {dtype_name(tensor.dtype)}, which is not kept; view it as another"
    if tensor.is_meta:
        return "is a meta tensor, which has no memory; give it some before"
    if tensor.is_conj() or tensor.is_neg():
        return "is a conjugated or negated view; keep tensor.resolve_conj().resolve_neg()"
    return ""


def refusal_in_place(tensor: Tensor) -> str:
    """Returns why a tensor cannot be kept and restored in its own memory, and what to do; empty if it can."""
    if refusal := refusal_of(tensor):
        return refusal
    if tensor.is_inference():
        return "was made in inference mode and cannot be restored into; make it outside of it, or clone it"
    if tensor.numel() and not tensor.data_ptr():
        return "has no memory: its storage was freed; lay it out while it is there"
    if _overlaps_itself(tensor):
        return "is expanded, or overlaps itself: several elements share one place; keep it contiguous, or what it views"
    return ""


def _overlaps_itself(tensor: Tensor) -> bool:
    """Tells whether elements may share a place; also true of rare strides that only look like it."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if tensor.numel() else ():
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as a flat uint8 view."""
    size = tensor.element_size()
    return bytes_at(tensor, int(tensor.storage_offset()) * size, tensor.numel() * size)


def bytes_at(tensor: Tensor, start: int, num_bytes: int) -> Tensor:
    """Returns bytes of the storage of a tensor as a flat uint8 view."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))


def content_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor's values in their order, wherever it lies in memory."""
    return flat_bytes(tensor.detach().cpu().contiguous()).numpy().data
