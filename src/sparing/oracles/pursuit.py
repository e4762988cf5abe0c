"""Segment pursuit: a point near the mean from few values, one more value at a time.

Points are values less the mean, u_i = v_i - o, so the aim is a convex combination x of few u_i close to zero. Each
round adds the value whose segment from x comes closest to zero, then (the corrective step) finds better convex weights
on the support by the minor cycles of Wolfe's minimum-norm-point algorithm (1976). With or without it,
|x_r|^2 <= sum_i alpha_i |u_i|^2 / r after r rounds (Jones 1992, Barron 1993). All is batched over the queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny
_FINISHED = 1e-14  # relative distance to the mean at which a query is finished
_APART = 1e-11  # values closer than this count as this far apart: below it, the gain of a segment is rounding


class Combination(NamedTuple):
    """Convex weights on few keys; a slot of weight 0 is unused."""

    indices: Tensor  # (Q, r)
    weights: Tensor  # (Q, r)
    error: Tensor  # (Q,) squared distance to the mean


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return values (n, e), shared by all queries, or (Q, n, e), at index (Q, r) -> (Q, r, e)."""
    if values.ndim == 2:
        return values[index]
    return values.gather(1, index.unsqueeze(-1).expand(*index.shape, values.shape[-1]))


def combine(weights: Tensor, points: Tensor) -> Tensor:
    """Return sum_i w_i p_i: (Q, r), (Q, r, e) -> (Q, e)."""
    return (weights.unsqueeze(1) @ points).squeeze(1)


def pursue(mean: Tensor, values: Tensor, far: Tensor, limit: int, scale: Tensor, corrective: bool) -> Combination:
    """Find at most `limit` keys for each query whose convex combination is close to mean (Q, e).

    far: (Q, n) squared distances |v_i - o|^2, infinite where a key must not be used.
    scale: (Q,) squared size of the values, against which rounding is judged; infinite for a query with no keys.
    """
    first = far.argmin(-1, keepdim=True)
    indices = first.repeat(1, limit)
    points = (take(values, first) - mean.unsqueeze(1)).repeat(1, limit, 1)  # u_i of the slots
    weights = torch.zeros_like(indices, dtype=mean.dtype)
    weights[:, 0] = 1.0
    x = points[:, 0]
    error = _square(x)

    rows = torch.arange(mean.shape[0], device=mean.device)  # queries that are not finished
    going = (error > scale * _FINISHED**2) & (limit > 1)
    # Corrective steps may drop keys, plain ones may repeat some: more rounds than keys.
    for turn in range(4 * limit + 8 if corrective else 2 * limit):
        if not bool(going.all()):
            rows, mean, far, x, scale = (t[going] for t in (rows, mean, far, x, scale))
            values = values if values.ndim == 2 else values[going]
        if not rows.numel():
            break
        open_ = min(turn + 2, limit)  # slots are filled from the front, at most one in a turn
        before, slots, held, vectors = error[rows], indices[rows, :open_], weights[rows, :open_], points[rows, :open_]
        along = x @ values.mT if values.ndim == 2 else (values @ x.unsqueeze(-1)).squeeze(-1)
        along -= (mean * x).sum(-1, keepdim=True)  # <u_i, x>
        key, share = _best_segment(before.unsqueeze(-1), along, far, _APART**2 * scale.unsqueeze(-1))
        slot = (((slots == key) & (held > 0)) * 2 + (held == 0).long()).argmax(-1, keepdim=True)
        held = (held * (1 - share)).scatter_add(-1, slot, share)
        slots = slots.scatter(-1, slot, key)
        fresh = take(values, key) - mean.unsqueeze(1)
        vectors = vectors.scatter(1, slot.unsqueeze(-1).expand_as(fresh), fresh)
        if corrective:
            held = correct(vectors, held)
        x = combine(held, vectors)
        after = _square(x)
        fell = after < before  # otherwise rounding is all that is left
        for whole, part in ((indices, slots), (weights, held), (points, vectors)):
            whole[rows[fell], :open_] = part[fell]
        error[rows[fell]] = after[fell]
        going = fell & (after > scale * _FINISHED**2) & ((held > 0).sum(-1) < limit)
    return Combination(indices, weights, error)


def _best_segment(now: Tensor, along: Tensor, far: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key whose segment from x is nearest to zero, and its share g: min |(1 - g) x + g u_i|^2.

    now: (Q, 1) |x|^2; along: (Q, n) <u_i, x>; far: (Q, n) |u_i|^2; apart: (Q, 1) the least |u_i - x|^2 that counts.
    """
    slope = (now - along).clamp_min_(0.0)
    length = torch.maximum((far - 2 * along).add_(now), apart)  # |u_i - x|^2
    # The gain is slope^2 / length where g < 1, and that holds: |x| never exceeds the smallest |u_i|.
    key = (slope / length).mul_(slope).argmax(-1, keepdim=True)
    return key, (slope.gather(-1, key) / length.gather(-1, key)).clamp(0.0, 1.0)


def correct(points: Tensor, weights: Tensor) -> Tensor:
    """Improve convex weights on the support (weights > 0) of points (Q, r, e); keys may be dropped.

    Walk towards the minimiser over the affine hull. If it lies outside the simplex, stop at the facet, drop the key
    whose weight is zero there and repeat on what is left.
    """
    start, weights = weights, weights.clone()
    rows = torch.arange(weights.shape[0], device=weights.device)
    for _ in range(weights.shape[1]):
        vectors, held = points[rows], weights[rows]
        used = held > 0
        goal = _affine_minimiser(vectors, used)
        # The solution of a singular system is useless; the objective shows it.
        useful = _square(combine(goal, vectors)) <= _square(combine(held, vectors))
        goal = torch.where(useful.unsqueeze(-1), goal, held)
        leaving = used & (goal <= 0)
        reach = torch.where(leaving, held / (held - goal).clamp_min(_TINY), torch.inf)
        step = reach.amin(-1, keepdim=True)
        stopped = (
            (held + step.clamp_max(1.0) * (goal - held)).clamp_min(0.0).masked_fill(leaving & (reach == step), 0.0)
        )
        inside = ~leaving.any(-1)
        weights[rows] = torch.where(inside.unsqueeze(-1), goal, stopped)
        rows = rows[~inside]
        if not rows.numel():
            break
    weights = weights / weights.sum(-1, keepdim=True)
    better = _square(combine(weights, points)) <= _square(combine(start, points))
    return torch.where(better.unsqueeze(-1), weights, start)


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def _affine_minimiser(points: Tensor, used: Tensor) -> Tensor:
    """Return argmin |sum_i y_i p_i|^2 with sum_i y_i = 1 over the used points; y may be negative. (Q, r)"""
    ones = used.to(points.dtype)
    points = points * ones.unsqueeze(-1)
    sizes = points.square().sum(-1).masked_fill(~used, torch.inf)
    # The constraint has the weight of the smallest point: with more, small points would lose their digits in P P^T.
    scale = sizes.amin(-1, keepdim=True).clamp_min(_TINY)
    # y is proportional to (P P^T + s 1 1^T)^-1 1; unused slots get an identity block.
    matrix = points @ points.mT + scale.unsqueeze(-1) * (ones.unsqueeze(-1) * ones.unsqueeze(-2))
    matrix.diagonal(dim1=-2, dim2=-1).add_(scale * (1 - ones))
    factor = torch.linalg.cholesky_ex(matrix).L

    def solve(right: Tensor) -> Tensor:
        return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)

    y = solve(scale * ones)
    # One refinement against the points themselves undoes most of what squaring them into P P^T lost.
    rest = scale * (1 - y.sum(-1, keepdim=True)) * ones - (points @ combine(y, points).unsqueeze(-1)).squeeze(-1)
    y = (y + solve(rest)) * ones
    return y / y.sum(-1, keepdim=True)
