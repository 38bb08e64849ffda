"""Small values: a tree of plain Python values and tensors as one block of bytes, and back exactly. No pickle.

A block is the size of its table (8 bytes, little endian), the table as JSON, and the bytes of the tensors, each from a
multiple of `ALIGNMENT`. The table is `{"tree": TREE, "tensors": {NAME: [DTYPE, SHAPE, OFFSET, NUM_BYTES]}}`; offsets
count from the end of the table. In the tree None, bool, str, list, and numbers that JSON has, stand for themselves; all
else is an object with one member, whose name is the kind: `{"dict": [[KEY, VALUE], ...]}`, `{"tensor": NAME}`.

Tensors come back on the CPU, contiguous, and without gradients.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from capricorn.errors import StateError, StoreError
from capricorn.systems.tensor_bytes import DTYPES, dtype_name, flat_bytes, refusal_of
from capricorn.units import Bytes

ALIGNMENT: Final = 64
"""Tensors start at multiples of a cache line, which suits every dtype."""
MAX_DEPTH: Final = 64
"""Of the tree: what is nested deeper holds itself, or is no small value."""
TREE: Final = ".tree"
"""No tensor has this name, under which the tree itself may be kept."""
_SIZE: Final = struct.Struct("<Q")
_REAL, _COMPLEX = struct.Struct("<d"), struct.Struct("<dd")

Keys: TypeAlias = tuple[Any, ...]
"""The keys and indices that lead to a value."""


class Encoded:
    """Small values as a block that has not been written yet."""

    def __init__(self, values: Any) -> None:
        """Takes the values in.

        Raises:
            StateError: a value cannot be kept; its path is named.
        """
        self.tensors: dict[str, Tensor] = {}
        """By name: the tensors in the values, contiguous, on the CPU."""
        self.tree = self._encode(values, ())
        places: dict[str, list[Any]] = {}
        end = 0
        for name, tensor in self.tensors.items():
            places[name] = [dtype_name(tensor.dtype), list(tensor.shape), end, tensor.nbytes]
            end += aligned(tensor.nbytes)
        self._table = json.dumps({"tree": self.tree, "tensors": places}, allow_nan=False).encode()
        self._places = places
        self.num_bytes: Bytes = aligned(_SIZE.size + len(self._table)) + end

    def write(self, block_B: Tensor) -> None:
        """Fills a block; what it does not need becomes zero."""
        head = _SIZE.pack(len(self._table)) + self._table
        block_B[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        base = aligned(len(head))
        block_B[len(head) :].zero_()
        for name, (_, _, offset, num_bytes) in self._places.items():
            block_B[base + offset : base + offset + num_bytes] = flat_bytes(self.tensors[name])

    def _encode(self, value: Any, path: Keys) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise StateError(f"{path_in_words(path[:3])}... is nested deeper than {MAX_DEPTH} levels, or holds itself")
        if kind is str:
            return value if _is_unicode(value) else {"str": value.encode("utf-8", "surrogatepass").hex()}
        if value is None or kind is bool or (kind is int and -(1 << 63) <= value < 1 << 63):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is list:
            return [self._encode(each, (*path, index)) for index, each in enumerate(value)]
        if kind in _ATOMS:
            name, encode, _ = _ATOMS[kind]
            return {name: encode(value)}
        if kind in _MAPPINGS:
            items = [[self._key(key, path), self._encode(each, (*path, key))] for key, each in value.items()]
            return {kind.__name__: items}
        if kind in _SEQUENCES:
            return {kind.__name__: [self._encode(each, (*path, index)) for index, each in enumerate(value)]}
        if kind in _SETS:
            return {kind.__name__: sorted((self._key(each, path) for each in value), key=json.dumps)}
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return {"array" if kind is np.ndarray else "numpy": self._tensor(_from_numpy(value, path), path)}
        raise StateError(f"{path_in_words(path)} is a {kind.__name__}, which is not kept: make plain values of it")

    def _key(self, key: Any, path: Keys) -> Any:
        num_tensors = len(self.tensors)
        encoded = self._encode(key, (*path, "a key"))
        if len(self.tensors) > num_tensors:
            raise StateError(f"{path_in_words(path)} has a tensor as a key or member, which would come back as another")
        return encoded

    def _tensor(self, tensor: Tensor, path: Keys) -> str:
        plain = tensor.detach().resolve_conj().resolve_neg() if type(tensor) in _RESOLVED else tensor
        if refusal := refusal_of(plain):
            raise StateError(f"{path_in_words(path)} {refusal}")
        stem = "/".join(map(_name_of, path)) or "all"
        name, number = stem, 2
        while name in self.tensors or name == TREE:
            name, number = f"{stem}~{number}", number + 1
        self.tensors[name] = plain.cpu().contiguous()
        return name


def join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the values of which these are the tree and the tensors.

    Raises:
        StoreError: the tree is of no values, or lacks a tensor.
    """
    try:
        return _decode(tree, tensors)
    except (KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise StoreError(f"small values cannot be read: {type(error).__name__}: {error}") from None


def split(block_B: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Returns the tree in a block, and its tensors by name, which lie in the memory of the block.

    Raises:
        StoreError: it is no such block.
    """
    data = block_B.numpy().data
    try:
        (size,) = _SIZE.unpack_from(data)
        table = json.loads(bytes(data[_SIZE.size : _SIZE.size + size]))
        base, tensors = aligned(_SIZE.size + size), {}
        for name, (dtype, shape, offset, num_bytes) in table["tensors"].items():
            part_B = block_B[base + offset : base + offset + num_bytes]
            tensors[name] = part_B.view(DTYPES[dtype]).view(shape)
        return table["tree"], tensors
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        raise StoreError(f"small values cannot be read: {type(error).__name__}: {error}") from None


def read(block_B: Tensor) -> Any:
    """Returns the values in a block.

    Raises:
        StoreError: it is no such block.
    """
    tree, tensors = split(block_B)
    return join(tree, {name: tensor.clone() for name, tensor in tensors.items()})


def sizes_of(values: Any) -> dict[str, Bytes]:
    """Returns, by its path, the size of each value right below the root; of values that are no table, the whole."""
    named = values if type(values) in _MAPPINGS else {}
    return {path_in_words((key,)): Encoded(each).num_bytes for key, each in named.items()} or {
        "it": Encoded(values).num_bytes
    }


def aligned(num_bytes: Bytes) -> Bytes:
    """Returns the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def path_in_words(path: Sequence[Any]) -> str:
    """Returns a path as it is written in Python, after `capture()`."""
    return "capture()" + "".join(f"[{key!r}]" for key in path)


# --- the table of kinds ------------------------------------------------------------------------------------------

_RESOLVED: Final = (Tensor, torch.nn.Parameter)
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_SEQUENCES: Final = (tuple, torch.Size)
_SETS: Final = (set, frozenset)
_ATOMS: Final[Mapping[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]]] = {
    int: ("int", hex, lambda text: int(text, 16)),
    float: ("float", lambda value: _REAL.pack(value).hex(), lambda text: _REAL.unpack(bytes.fromhex(text))[0]),
    complex: (
        "complex",
        lambda value: _COMPLEX.pack(value.real, value.imag).hex(),
        lambda text: complex(*_COMPLEX.unpack(bytes.fromhex(text))),
    ),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
}
"""By type, of values that are no tree: the name, and how a text is made of one and one of the text."""


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((name, content),) = tree.items()
    return _DECODERS[name](content, tensors)


def _mapping(kind: type) -> Callable[[Any, Mapping[str, Tensor]], Any]:
    def decode(items: Any, tensors: Mapping[str, Tensor]) -> Any:
        made = kind()
        for key, value in items:
            made[_decode(key, tensors)] = _decode(value, tensors)
        return made

    return decode


def _collection(kind: type) -> Callable[[Any, Mapping[str, Tensor]], Any]:
    return lambda items, tensors: kind(_decode(each, tensors) for each in items)


def _atom(decode: Callable[[str], Any]) -> Callable[[Any, Mapping[str, Tensor]], Any]:
    return lambda text, tensors: decode(text)


_DECODERS: Final[Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]]] = {
    "str": lambda text, tensors: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "tensor": lambda name, tensors: tensors[name],
    "array": lambda name, tensors: tensors[name].numpy(),
    "numpy": lambda name, tensors: tensors[name].numpy()[()],
    **{name: _atom(decode) for name, _, decode in _ATOMS.values()},
    **{kind.__name__: _mapping(kind) for kind in _MAPPINGS},
    **{kind.__name__: _collection(kind) for kind in (*_SEQUENCES, *_SETS)},
}


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _name_of(key: Any) -> str:
    return str(key).encode("utf-8", "backslashreplace").decode()


def _from_numpy(array: Any, path: Keys) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C", copy=True))
    except (TypeError, ValueError):
        raise StateError(
            f"{path_in_words(path)} is of numpy's dtype {array.dtype}, which is not kept: keep numbers"
        ) from None
