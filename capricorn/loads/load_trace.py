"""The experts' shares of a training's load, read from a trace. Knows no model, no router and no tensor.

Shapes: I iterations of a run, M MoE layers, E experts, S samples of a trace.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from capricorn.errors import ConfigError
from capricorn.files import open_file

Shares: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

KEYS = ("iterations", "load_share")


def cap_shares(load: npt.ArrayLike, top_k: int) -> Shares:
    """Returns the loads [..., E] as shares: each row sums to 1 and none exceeds 1/top_k, the most an expert can get.

    The excess goes to the other experts in proportion to their loads, or alike if they have none.
    """
    share = np.asarray(load, dtype=np.float64)
    share = share / share.sum(-1, keepdims=True)
    cap = 1 / top_k
    # The excess may lift others over the cap; each pass but the last caps one more, and no more than top_k fit.
    for _ in range(top_k):
        full = share >= cap
        rest = np.where(full, 0, share)
        rest = np.where(rest.any(-1, keepdims=True), rest, ~full)
        room = np.maximum(1 - cap * full.sum(-1, keepdims=True), 0)
        total = np.maximum(rest.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
        share = np.where(full, cap, rest * (room / total))
    return np.minimum(share, cap)


class TraceSize(NamedTuple):
    """How much a trace holds."""

    last: int
    """Iteration of its last sample."""
    num_layers: int
    num_experts: int


def trace_size(path: Path) -> TraceSize:
    """Returns how much a trace holds.

    Raises:
        ConfigError: the file cannot be read or is no trace.
    """
    iterations_S, load_SME = _read(path)
    return TraceSize(int(iterations_S[-1]), *load_SME.shape[1:])


def trace_shares(
    path: Path, *, num_layers: int, num_experts: int, top_k: int, first: int, num_iterations: int
) -> Shares:
    """Returns the shares [I, M, E] of a trace from its iteration `first` on, interpolated between its samples.

    Before its first and after its last sample a trace stays as it is there. The layers are taken spread evenly over
    those of the trace; if it has a multiple of the experts, neighbours are merged.

    Args:
        path: the .npz file.
        num_layers: M.
        num_experts: E.
        top_k: experts of each token.
        first: iteration of the trace that the run begins with.
        num_iterations: I.

    Raises:
        ConfigError: the file cannot be read, is no trace, or its experts do not divide among the model's.
    """
    iterations_S, load_SME = _read(path)
    num_samples, num_recorded, recorded_experts = load_SME.shape
    if recorded_experts % num_experts:
        raise ConfigError(
            f"trace {path} has {recorded_experts} experts a layer, the model {num_experts}; "
            f"take a model with {recorded_experts} experts or a divisor of it, or another trace"
        )
    iteration_I = np.arange(first, first + num_iterations)
    position_I = np.interp(iteration_I, iterations_S, np.arange(num_samples))
    before_I = position_I.astype(np.int64)
    after_I = np.minimum(before_I + 1, num_samples - 1)
    weight_I1 = (position_I - before_I)[:, None]

    shares_IME = np.empty((num_iterations, num_layers, num_experts))
    for index in range(num_layers):
        # The middle of its part of the trace, so that a model with few layers does not take the outermost ones.
        recorded = (2 * index + 1) * num_recorded // (2 * num_layers)
        merged_SE = load_SME[:, recorded].reshape(num_samples, num_experts, -1).sum(-1)
        share_SE = cap_shares(merged_SE, top_k)
        mixed_IE = (1 - weight_I1) * share_SE[before_I] + weight_I1 * share_SE[after_I]
        shares_IME[:, index] = np.minimum(mixed_IE, 1 / top_k)
    return shares_IME


def _read(path: Path) -> tuple[Ints, Shares]:
    """Returns the iterations [S] and loads [S, layers, experts] of a trace, checked."""
    try:
        with open_file(path) as stream:
            if not zipfile.is_zipfile(stream):
                raise ConfigError(f"trace {path} is no .npz file; save one with numpy.savez")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                if missing := [key for key in KEYS if key not in file.files]:
                    raise ConfigError(
                        f"trace {path} has no array {' and no '.join(missing)}; it needs {' and '.join(KEYS)}"
                    )
                iterations, load = (np.asarray(file[key]) for key in KEYS)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror or error}; check the path") from None
    except (ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        # All that a damaged archive, an object array or a foreign compression makes numpy and zipfile raise.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"trace {path} cannot be read as .npz: {reason}; save it again with numpy.savez") from None
    if fault := _fault(iterations, load):
        raise ConfigError(f"trace {path}: {fault}")
    return iterations.astype(np.int64), load.astype(np.float64)


def _fault(iterations: npt.NDArray[np.generic], load: npt.NDArray[np.generic]) -> str:
    """Returns, in words, how the arrays of a trace are wrong and how they should be; empty if they are right."""
    if iterations.dtype.kind not in "iu" or iterations.ndim != 1 or not len(iterations):
        return f"iterations is {_describe(iterations)}; write a list of whole numbers"
    if load.dtype.kind not in "iuf" or load.ndim != 3 or not load.size or len(load) != len(iterations):
        return f"load_share is {_describe(load)}; write numbers [{len(iterations)} iterations, layers, experts]"
    if (np.diff(iterations.astype(np.int64)) <= 0).any():
        return "iterations do not increase; sort the samples, with one for each iteration"
    values = load.astype(np.float64)
    # No comparison holds for a NaN, and an infinity shows in the sum.
    if not ((values >= 0).all() and (values.sum(-1) > 0).all() and np.isfinite(values.sum(-1)).all()):
        return "load_share has a negative or not finite value, or a layer without load; write shares of each layer"
    return ""


def _describe(array: npt.NDArray[np.generic]) -> str:
    return f"{array.dtype} {list(array.shape)}"
