"""Small values: whatever plain Python and tensors they are, they come back exactly, or are refused by path."""

from __future__ import annotations

import contextlib
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capricorn.errors import StateError, StoreError
from capricorn.systems.small_values import ALIGNMENT, Encoded, read, split
from tests.support.states import fingerprint, plain_values

Pair = namedtuple("Pair", "left right")


class Colour(enum.IntEnum):
    RED = 1


class Quantised(Tensor):
    pass


def round_trip(values: Any) -> Any:
    encoded = Encoded(values)
    block_B = torch.full((encoded.num_bytes,), 255, dtype=torch.uint8)
    encoded.write(block_B)
    return read(block_B)


@settings(max_examples=150, deadline=None)
@given(values=plain_values())
def test_any_tree_of_plain_values_and_tensors_comes_back_exactly(values: Any) -> None:
    assert fingerprint(round_trip(values)) == fingerprint(values)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 1 << 62, -(1 << 63), 1 << 63, 7**9000, -(7**9000), 0.1, -0.0, math.inf, -math.inf, math.nan,
        struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0], 5e-324, 1.7976931348623157e308, 3 - 0j,
        complex(math.nan, -0.0), "", "\x00\n\"", "ä😀", "\ud83d\ude00", b"", bytes(range(256)), bytearray(b"a"), [], (),
        {}, set(), frozenset(), [[[]]], (1, (2, [3])), {"dict": [1]}, {"tensor": "x"}, {1: "a", "1": "b"}, {None: 0},
        {True: 1, 2.5: 2, (1, "a"): 3, b"k": 4}, {frozenset({1, 2}): 0}, OrderedDict(b=1, a=2), Counter("abca"),
        torch.Size([2, 3]), {1, "1", 2.0, None}, {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {".tree": torch.ones(1)}, torch.ones(1), np.arange(6, dtype=np.uint32).reshape(2, 3), np.float64(0.1),
        np.float32(math.nan), np.asfortranarray(np.ones((2, 3))), np.bool_(True), np.array(3), np.random.get_state(),
        [torch.ones(2, 3).t(), torch.ones(1).expand(5), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(())],
        torch.nn.Parameter(torch.ones(2)), torch.ones(3)[1:],
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_what_is_easily_lost_comes_back_exactly(value: Any) -> None:
    for tree in (value, {"key": value}, [value, value]):
        assert fingerprint(round_trip(tree)) == fingerprint(tree)


def circle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def inside_out(value: Any) -> Any:
    return {"loader": {"items": [0, value]}}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: print, "builtin_function_or_method"),
        (object, "object"),
        (lambda: defaultdict(list), "defaultdict"),
        (lambda: Pair(1, 2), "Pair"),
        (lambda: Colour.RED, "Colour"),
        (lambda: torch.float32, "dtype"),
        (lambda: np.array([object()]), "numpy's dtype object"),
        (lambda: np.array(["a"]), "numpy's dtype"),
        (lambda: np.ones(3, dtype=">f4"), "numpy's dtype"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.ones(2).as_subclass(Quantised), "Quantised"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
        (lambda: {torch.ones(2): 1}, "tensor as a key"),
        (circle, "holds itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(StateError) as caught:
        Encoded(inside_out(make()))
    assert str(caught.value).startswith("capture()['loader']['items'][1]"[:24])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tensors_of_a_block_have_names_made_of_their_paths() -> None:
    values = {"rng": torch.ones(3), "optimizer": {"state": [{"step": torch.zeros(())}]}, 7: torch.ones(1)}
    encoded = Encoded(values)
    block_B = torch.empty(encoded.num_bytes, dtype=torch.uint8)
    encoded.write(block_B)
    _, tensors = split(block_B)
    assert list(tensors) == ["rng", "optimizer/state/0/step", "7"]
    assert all((tensor.data_ptr() - block_B.data_ptr()) % ALIGNMENT == 0 for tensor in tensors.values())


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_block_is_never_more_than_a_store_error(at: int, flip: int) -> None:
    encoded = Encoded({"rng": torch.arange(4), "epoch": 3, "name": "\ud800"})
    block_B = torch.empty(encoded.num_bytes, dtype=torch.uint8)
    encoded.write(block_B)
    block_B[at % len(block_B)] ^= flip
    with contextlib.suppress(StoreError):
        read(block_B)
