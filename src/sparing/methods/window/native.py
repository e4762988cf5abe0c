"""Wrapper of the kernel of `window`: softmax over a band of keys and over shared keys that every query sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type, widened

_LIMITS = "Tensor? keep, Tensor? shared, int left, int right, bool causal, float scale"
schemas.define(f"window(Tensor q, Tensor k, Tensor v, {_LIMITS}) -> (Tensor out, Tensor lse, Tensor top, Tensor total)")
schemas.define(
    f"window_backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top, Tensor total,"
    f" {_LIMITS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)

schemas.define(
    "window_step(Tensor q, Tensor k, Tensor v, int left, int first, float scale) -> (Tensor out, Tensor lse)"
)


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    shared: Tensor | None,
    left: int,
    right: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (output (B, H, n, e), log-sum-exp (B, H, n)); query i sees keys i - left to i + right and the shared ones.

    q, k and v may have 16 bits; output and log-sum-exp are then float32.
    keep: (B, n), False for padded keys. shared: (B, s) positions, -1 for none; if `causal`, later queries see them.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    shared = None if shared is None else shared.contiguous()
    out, lse, *_ = torch.ops.sparing.window(q, k, v, keep, shared, left, right, causal, scale)
    return out, lse


@torch.library.register_fake("sparing::window", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *limits: Any) -> tuple[Tensor, ...]:
    kind = wide_type(q)
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=kind), *(q.new_empty(q.shape[:3], dtype=kind) for _ in range(3))


@torch.library.register_fake("sparing::window_backward", lib=schemas)
def _(grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, keep, shared, *ctx.limits = inputs
    out, _, *norm = output
    ctx.mark_non_differentiable(*norm)
    ctx.save_for_backward(q, k, v, keep, shared, out, *norm)


def _backward(ctx: Any, grad: Tensor, lse_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, keep, shared, out, top, total = ctx.saved_tensors
    q, k, v = (widened(x) for x in (q, k, v))  # gradients have no 16-bit kernels
    grads = torch.ops.sparing.window_backward(
        contiguous_rows(grad), lse_grad.contiguous(), q, k, v, out, top, total, keep, shared, *ctx.limits
    )
    return (*grads, *[None] * 6)


differentiable("window", _backward, _setup)


def window_step(q: Tensor, k: Tensor, v: Tensor, left: int, first: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return output (B, H, n_q, e) and log-sum-exp (B, H, n_q) of the last n_q positions of a sequence.

    A query sees its own key, `left` before it and the first ones. k, v: (B, H_kv, n, .), of the type of q, which may
    have 16 bits. There is no gradient.
    """
    return torch.ops.sparing.window_step(*(contiguous_rows(x) for x in (q, k, v)), left, first, scale)


@torch.library.register_fake("sparing::window_step", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide_type(q))
