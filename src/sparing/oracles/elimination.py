"""Caratheodory's theorem, constructively: the same mean from at most e + 1 of the points.

e + 2 points in e dimensions are affinely dependent: sum_i c_i p_i = 0 and sum_i c_i = 0 for some c. Moving the weights
along c keeps the mean and the sum, until the first weight reaches zero. Doing so on means of groups of points first
halves the number of points in each round (Maalouf, Jubran and Feldman 2019). All is batched over the queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_TINY = torch.finfo(torch.float64).tiny


def dependency(points: Tensor) -> Tensor:
    """Return c (Q, e + 2) with sum_i c_i p_i = 0 and sum_i c_i = 0, for points (Q, e + 2, e)."""
    lifted = torch.cat([points, torch.ones_like(points[..., :1])], dim=-1)
    size = lifted.norm(dim=-1, keepdim=True)  # far points must not drown the others' digits
    # The last column of the complete Q factor is orthogonal to every column of `lifted`, whatever its rank.
    return torch.linalg.qr(lifted / size, mode="complete").Q[..., -1] / size.squeeze(-1)


def remove_one(weights: Tensor, points: Tensor) -> Tensor:
    """Return weights (Q, e + 2) of the same sum and mean of which at least one is zero."""
    c = dependency(points)
    ratio = torch.where(c > 0, weights / c, torch.inf)
    step, first = ratio.min(-1, keepdim=True)
    moved = (weights - step * c).clamp_min(0.0).scatter(-1, first, 0.0)
    return torch.where((weights > 0).all(-1, keepdim=True), moved, weights)


def reduce_points(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return (slots, weights), (Q, e + 1) each: which of points (Q, m, e), m > e + 1, carry the mean, how much."""
    count, width = points.shape[1:]
    slots = torch.arange(width + 2, device=points.device).expand(points.shape[0], -1)
    held, window = remove_one(weights[:, : width + 2], points[:, : width + 2]), points[:, : width + 2]
    for fresh in range(width + 2, count):
        place = held.argmin(-1, keepdim=True)  # a slot of weight zero
        slots = slots.scatter(-1, place, fresh)
        held = held.scatter(-1, place, weights[:, fresh : fresh + 1])
        window = window.scatter(1, place.unsqueeze(-1).expand(-1, 1, width), points[:, fresh : fresh + 1])
        held = remove_one(held, window)
    order = held.sort(dim=-1, descending=True, stable=True).indices[:, : width + 1]
    return slots.gather(-1, order), held.gather(-1, order)


def eliminate(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Move weights (Q, n) on values (Q, n, e) to at most e + 1 keys with the same mean: (indices, weights)."""
    width = values.shape[2]
    points = values - (weights.unsqueeze(1) @ values)
    points = points.masked_fill((weights == 0).unsqueeze(-1), 0.0)
    # Points are divided by their typical size, so that the column of ones beside them has the same magnitude.
    sizes = points.norm(dim=-1)
    spread = torch.maximum((weights * sizes.square()).sum(-1).sqrt(), 1e-8 * sizes.amax(-1))
    points = points / spread.masked_fill(spread == 0, 1.0)[:, None, None]
    indices = torch.arange(weights.shape[1], device=weights.device).expand(weights.shape)
    while weights.shape[1] > width + 1:
        size = -(-weights.shape[1] // (2 * width + 2))  # keys per group
        short = -weights.shape[1] % size
        held = pad(weights, (0, short)).unflatten(1, (-1, size))  # (Q, groups, size)
        names = pad(indices, (0, short)).unflatten(1, (-1, size))
        members = pad(points, (0, 0, 0, short)).unflatten(1, (-1, size))  # (Q, groups, size, e)
        mass = held.sum(-1)
        share = held / mass.clamp_min(_TINY).unsqueeze(-1)
        kept, new = reduce_points(mass, (share.unsqueeze(-2) @ members).squeeze(-2))
        choose = kept.unsqueeze(-1).expand(-1, -1, size)
        weights = (share.gather(1, choose) * new.unsqueeze(-1)).flatten(1)
        indices = names.gather(1, choose).flatten(1)
        points = members.gather(1, choose.unsqueeze(-1).expand(*choose.shape, width)).flatten(1, 2)
    return indices, weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
