"""Softmax of every query over all valid keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type, widened

_CALL = "Tensor? keep, Tensor? bias, float scale"
schemas.define(
    f"attend(Tensor q, Tensor k, Tensor v, {_CALL}, bool causal=False, Tensor? offsets=None)"
    " -> (Tensor out, Tensor lse, Tensor top, Tensor total)"
)
schemas.define(
    f"attend_backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top, Tensor total,"
    f" {_CALL}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    *,
    causal: bool = False,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output (B, H, n_q, e), log-sum-exp (B, H, n_q)) of q (B, H, n_q, d) over k and v (B, H_kv, n_k, .).

    q, k and v may each have 16 bits; output and log-sum-exp are then float32.
    keep: (B, n_k), False for padded keys. bias: (B, n_k), added to the scores of a key; -inf hides it. It gets no
    gradient.
    causal: query i sees keys 0..i. offsets: (S + 1,) int64, for a batch of 1 with n_q == n_k: sequence s owns the rows
    offsets[s] to offsets[s + 1] of q, k and v, and sees no other.
    There is no gradient for causal calls, offsets and shared key heads. What a query gets depends, to the bit, on
    nothing but the query and the keys that it sees, in their order.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep, bias = (None if x is None else x.contiguous() for x in (keep, bias))
    out, lse, *_ = torch.ops.sparing.attend(q, k, v, keep, bias, scale, causal, offsets)
    return out, lse


@torch.library.register_fake("sparing::attend", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    kind = wide_type(q)
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=kind), *(q.new_empty(q.shape[:3], dtype=kind) for _ in range(3))


@torch.library.register_fake("sparing::attend_backward", lib=schemas)
def _(grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, keep, bias, ctx.scale, causal, offsets = inputs
    ctx.covered = not causal and offsets is None and k.shape[1] == q.shape[1]
    out, _, *norm = output
    ctx.mark_non_differentiable(*norm)
    ctx.save_for_backward(q, k, v, keep, bias, out, *norm)


def _backward(ctx: Any, grad: Tensor, lse_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.covered:
        raise NotImplementedError(
            "attend has no gradient for causal calls, offsets and shared key heads; detach its inputs"
        )
    q, k, v, keep, bias, out, top, total = ctx.saved_tensors
    q, k, v = (widened(x) for x in (q, k, v))  # gradients have no 16-bit kernels
    grads = torch.ops.sparing.attend_backward(
        contiguous_rows(grad), lse_grad.contiguous(), q, k, v, out, top, total, keep, bias, ctx.scale
    )
    return (*grads, *[None] * 5)


differentiable("attend", _backward, _setup)
