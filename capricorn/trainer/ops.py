"""Op boundaries in forward and backward, and the all-to-all that moves rows between experts' ranks.

Knows how to tell a hook when an op begins and ends; must not know what the ops compute.

Shapes: N rows held before the exchange, M rows held after it, D width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from capricorn.hooks import OpKey, OpKind, TrainerHook
from capricorn.trainer.exchange import Network

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


class _Mark(Function):
    """The identity; in backward, notifies once the gradients of all its tensors are known."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[OpKey], None], op: OpKey, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.notify, ctx.op = notify, op
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.notify(ctx.op)
        return None, None, *grads


def _mark(notify: Callable[[OpKey], None], op: OpKey, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors, those with a gradient passed through one mark."""
    marked = iter(_Mark.apply(notify, op, *(t for t in tensors if t.requires_grad)))  # type: ignore[no-untyped-call]
    return tuple(next(marked) if t.requires_grad else t for t in tensors)


def run_op(hook: TrainerHook | None, layer: int, kind: OpKind, fn: Callable[..., Result], *tensors: Tensor) -> Result:
    """Runs `fn(*tensors)` as one op: the hook hears its begin and end in forward, and again in backward.

    All tensors that carry gradient into or out of the op must be arguments or results of `fn`; else its backward would
    run outside the marks. Without a hook nothing is marked.

    Args:
        hook: hears the op; None marks nothing.
        layer: of the op.
        kind: of the op.
        fn: computes it.
        *tensors: the arguments of `fn`.
    """
    if hook is None:
        return fn(*tensors)
    forward, backward = OpKey(layer, "forward", kind), OpKey(layer, "backward", kind)
    inputs = _mark(hook.on_op_end, backward, tensors)
    hook.on_op_begin(forward)
    result = fn(*inputs)
    hook.on_op_end(forward)
    if isinstance(result, Tensor):
        return _mark(hook.on_op_begin, backward, (result,))[0]
    return _mark(hook.on_op_begin, backward, result)


class _AllToAll(Function):
    """Rows out to each rank by `send`, rows in from each rank by `receive`; backward is the reverse exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        network: Network,
        hook: TrainerHook | None,
        layer: int,
        kind: OpKind,
    ) -> Tensor:
        ctx.reverse = receive, send, network, hook, OpKey(layer, "backward", kind)
        return _exchange(rows_ND, send, receive, network, hook, OpKey(layer, "forward", kind))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _exchange(grads[0], *ctx.reverse), None, None, None, None, None, None


def _exchange(
    rows_ND: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    network: Network,
    hook: TrainerHook | None,
    op: OpKey,
) -> Tensor:
    if hook is not None:
        hook.on_op_begin(op)
    if len(send) == 1:
        rows_MD = rows_ND.view_as(rows_ND)
    else:
        rows_MD = rows_ND.new_empty(sum(receive), rows_ND.shape[1])
        network.all_to_all(rows_MD, rows_ND.contiguous(), receive, send)
    if hook is not None:
        hook.on_op_end(op)
    return rows_MD


def all_to_all(
    rows_ND: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    network: Network,
    hook: TrainerHook | None,
    layer: int,
    kind: OpKind,
) -> Tensor:
    """Returns the rows [M, D] that the ranks send here, by sender; an op of its own in both directions.

    Collective, also for a rank that sends or receives nothing.

    Args:
        rows_ND: the rows to send, by receiver.
        send: number of rows for each rank; sums to N.
        receive: number of rows from each rank; sums to M.
        network: of the ranks.
        hook: hears the begin and end of the communication alone.
        layer: of the op.
        kind: `dispatch` or `combine`.
    """
    rows_MD: Tensor = _AllToAll.apply(rows_ND, send, receive, network, hook, layer, kind)  # type: ignore[no-untyped-call]
    return rows_MD


class _Permute(Function):
    """Rows in another order. Its backward gathers; that of `index_select` adds, on CUDA in no fixed order."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return rows_ND.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def permute(rows_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Returns the rows that `order_N` names, in that order; `inverse_N` is the inverse permutation."""
    permuted_ND: Tensor = _Permute.apply(rows_ND, order_N, inverse_N)  # type: ignore[no-untyped-call]
    return permuted_ND


class _Spread(Function):
    """Each row several times, in a given order, without a copy in between."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, copies: int, order_A: Tensor, inverse_A: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_A)
        ctx.copies = copies
        return rows_ND.index_select(0, order_A // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_AD = grads[0].index_select(0, ctx.saved_tensors[0])
        return grad_AD.view(-1, ctx.copies, grad_AD.shape[1]).sum(1), None, None, None


def spread(rows_ND: Tensor, copies: int, order_A: Tensor, inverse_A: Tensor) -> Tensor:
    """Returns each row several times, in a given order, without a copy in between.

    Args:
        rows_ND: the rows.
        copies: how often each occurs; A = N * copies in all.
        order_A: names the copies in the order of the result.
        inverse_A: the inverse of `order_A`.
    """
    spread_AD: Tensor = _Spread.apply(rows_ND, copies, order_A, inverse_A)  # type: ignore[no-untyped-call]
    return spread_AD


def sort_order(keys_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the stable order that sorts the keys, and its inverse."""
    order_N = torch.argsort(keys_N, stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return order_N, inverse_N
