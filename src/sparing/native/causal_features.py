"""Causal attention with the kernel phi(q).phi(k), at linear cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.features import Map
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type, widened

_SETTINGS = "int map, float q_factor, float k_factor, bool divide"
schemas.define(
    f"feature_causal(Tensor q, Tensor k, Tensor v, Tensor? points, Tensor? keep, {_SETTINGS})"
    " -> (Tensor out, Tensor total)"
)
schemas.define(
    "feature_causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? points, Tensor? keep, Tensor out,"
    f" Tensor total, {_SETTINGS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def feature_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Tensor | None,
    keep: Tensor | None,
    kind: Map,
    factors: tuple[float, float] = (1.0, 1.0),
    *,
    divide: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return sum_{j <= i} w_ij v_j / sum_{j <= i} w_ij (B, H, n_q, e), w_ij = phi(q_i).phi(k_j), and the totals.

    Where a total is too small to divide by, the row is zero. Totals are known up to a factor per row. Without `divide`
    that holds for the rows too; PLAIN_ELU has no such factor. No gradient reaches the points.

    q, k and v may have 16 bits; the results are then float32.
    factors: of the queries and of the keys. keep: (B, n_k), False for keys to leave out.
    """
    points = None if points is None else contiguous_rows(points)
    keep = None if keep is None else keep.contiguous()
    return torch.ops.sparing.feature_causal(
        contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), points, keep, int(kind), *factors, divide
    )


@torch.library.register_fake("sparing::feature_causal", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    kind = wide_type(q)
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=kind), q.new_empty(q.shape[:3], dtype=kind)


@torch.library.register_fake("sparing::feature_causal_backward", lib=schemas)
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.kind, ctx.q_factor, ctx.k_factor, ctx.divide = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    settings = (ctx.kind, ctx.q_factor, ctx.k_factor, ctx.divide)
    q, k, v, *others = ctx.saved_tensors
    found = torch.ops.sparing.feature_causal_backward(
        contiguous_rows(grad), *(widened(x) for x in (q, k, v)), *others, *settings
    )
    return (*found, *[None] * 6)


differentiable("feature_causal", _backward, _setup)
