"""Sums over tokens weighted by features phi_f(x) of each token, which are formed block by block and never kept.

With S = sum_j phi(k_j) v_j^T over the keys, phi(q_i).S is attention with the kernel phi(q).phi(k), at linear cost.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type, widened


class Map(IntEnum):
    """What phi_f(x) is. Values that could overflow or vanish are kept up to a factor per token, which cancels."""

    GAUSSIAN = 0  #: exp(factor |x - p_f|^2), one point p_f for each feature
    EXPONENTIAL = 1  #: exp(p_f.y - |y|^2 / 2), y = factor x
    ELU = 2  #: 1 + ELU(x_f)
    PLAIN_ELU = 3  #: 1 + ELU(x_f), without a factor per token


schemas.define(
    "feature_sums(Tensor x, Tensor? points, Tensor values, Tensor? keep, int map, float factor)"
    " -> (Tensor sums, Tensor mass, Tensor level)"
)
schemas.define(
    "feature_mix(Tensor x, Tensor? points, Tensor table, Tensor? mass, int map, float factor)"
    " -> (Tensor out, Tensor total)"
)
schemas.define(
    "feature_sums_backward(Tensor grad_sums, Tensor grad_mass, Tensor x, Tensor? points, Tensor values, Tensor? keep,"
    " Tensor level, int map, float factor) -> (Tensor grad_x, Tensor grad_points, Tensor grad_values)"
)
schemas.define(
    "feature_mix_backward(Tensor grad, Tensor x, Tensor? points, Tensor table, Tensor? mass, Tensor out, Tensor total,"
    " int map, float factor) -> (Tensor grad_x, Tensor grad_points, Tensor grad_table, Tensor grad_mass)"
)


def feature_sums(
    x: Tensor, points: Tensor | None, values: Tensor, keep: Tensor | None, kind: Map, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum_j phi_f(x_j) values_j (B, H, F, e) and sum_j phi_f(x_j) (B, H, F), over exp(level) (B, H).

    Gradients treat the level as a constant, as it cancels in a quotient; they reach the points of GAUSSIAN only.

    x: (B, H, n, d). points: (B, H, F, d) or None. values: (B, H, n, e). keep: (B, n), False for tokens to leave out.
    x and values may have 16 bits; the results are then float32.
    """
    points = None if points is None else contiguous_rows(points)
    keep = None if keep is None else keep.contiguous()
    return torch.ops.sparing.feature_sums(contiguous_rows(x), points, contiguous_rows(values), keep, int(kind), factor)


def feature_mix(
    x: Tensor, points: Tensor | None, table: Tensor, mass: Tensor | None, kind: Map, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return sum_f phi_f(x_i) table_f (B, H, n, e) over its total sum_f phi_f(x_i) mass_f (B, H, n).

    Where a total is too small to divide by, the row is zero. Without a mass nothing is divided, and there is no total.
    x may have 16 bits.
    """
    points = None if points is None else contiguous_rows(points)
    mass = None if mass is None else mass.contiguous()
    return torch.ops.sparing.feature_mix(contiguous_rows(x), points, contiguous_rows(table), mass, int(kind), factor)


def _features(x: Tensor, points: Tensor | None) -> int:
    return x.shape[3] if points is None else points.shape[2]


@torch.library.register_fake("sparing::feature_sums", lib=schemas)
def _(
    x: Tensor, points: Tensor | None, values: Tensor, keep: Tensor | None, kind: int, factor: float
) -> tuple[Tensor, ...]:
    shape = (*x.shape[:2], _features(x, points))
    sums = x.new_empty(*shape, values.shape[3], dtype=wide_type(x))
    return sums, sums.new_empty(shape), sums.new_empty(x.shape[:2])


@torch.library.register_fake("sparing::feature_mix", lib=schemas)
def _(
    x: Tensor, points: Tensor | None, table: Tensor, mass: Tensor | None, kind: int, factor: float
) -> tuple[Tensor, ...]:
    totals = (*x.shape[:2], 0 if mass is None else x.shape[2])
    return table.new_empty(*x.shape[:3], table.shape[3]), table.new_empty(totals)


@torch.library.register_fake("sparing::feature_sums_backward", lib=schemas)
def _(
    grad_sums: Tensor, grad_mass: Tensor, x: Tensor, points: Tensor | None, values: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), _grad_of_points(x, points, others[-2]), x.new_empty(values.shape)


@torch.library.register_fake("sparing::feature_mix_backward", lib=schemas)
def _(
    grad: Tensor, x: Tensor, points: Tensor | None, table: Tensor, mass: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    for_mass = x.new_empty(0 if mass is None else mass.shape)
    return x.new_empty(x.shape), _grad_of_points(x, points, others[-2]), x.new_empty(table.shape), for_mass


def _grad_of_points(x: Tensor, points: Tensor | None, kind: int) -> Tensor:
    return x.new_empty(points.shape if points is not None and kind == Map.GAUSSIAN else 0)


def _setup_sums(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, points, values, keep, ctx.kind, ctx.factor = inputs
    ctx.save_for_backward(x, points, values, keep, output[2])


def _sums_backward(ctx: Any, grad_sums: Tensor, grad_mass: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, points, values, keep, level = ctx.saved_tensors
    x, values = widened(x), widened(values)  # gradients have no 16-bit kernels
    found = torch.ops.sparing.feature_sums_backward(
        contiguous_rows(grad_sums), grad_mass.contiguous(), x, points, values, keep, level, ctx.kind, ctx.factor
    )
    grad_x, grad_points, grad_values = found
    return grad_x, grad_points if ctx.kind == Map.GAUSSIAN else None, grad_values, None, None, None


def _setup_mix(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.kind, ctx.factor = inputs
    ctx.save_for_backward(*tensors, *output)


def _mix_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under checkpointing they can be unpacked only once
    found = torch.ops.sparing.feature_mix_backward(
        contiguous_rows(grad), widened(saved[0]), *saved[1:], ctx.kind, ctx.factor
    )
    grad_x, grad_points, grad_table, grad_mass = found
    divided = saved[3] is not None
    return (
        grad_x,
        grad_points if ctx.kind == Map.GAUSSIAN else None,
        grad_table,
        grad_mass if divided else None,
        None,
        None,
    )


differentiable("feature_sums", _sums_backward, _setup_sums)
differentiable("feature_mix", _mix_backward, _setup_mix)
