"""Collision probability of the rotation hash argmax([-R x; R x]), as a function of the angle between two vectors."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_STEPS = 64  # angles at which the law is computed: multiples of pi / _STEPS
_NODES = 40  # quadrature points per axis
_FAR = 7.0  # the normal density is cut off here
_NEVER = -60.0  # smallest log p; keeps 1 / p finite in float32


@lru_cache(maxsize=256)
def log_collision_law(buckets: int) -> Tensor:
    """Return log p at the angles 0, pi/64, ..., pi, in float64, for Gaussian rotations and 1 or even buckets.

    p = C int int_{u, w > 0} f(u, w) F(u, w)^(C/2 - 1) du dw: one of the C directions wins for both vectors; f is the
    density of two standard normal numbers whose correlation is the cosine, F(u, w) = P(|U| < u, |W| < w).
    For C = 2 and C = 4 this is 1 - angle / pi and its square. Opposite vectors never collide; between the last angle
    before and pi the law is held constant, so that it has no zero.
    """
    if buckets == 1:
        return torch.zeros(_STEPS + 1, dtype=torch.float64)
    angle = torch.arange(1, _STEPS, dtype=torch.float64) * math.pi / _STEPS
    law = 1 - angle / math.pi if buckets == 2 else torch.cat([_collide(buckets, few) for few in angle.split(8)])
    log_law = law.log().clamp_min(_NEVER)
    return torch.cat([torch.zeros(1, dtype=torch.float64), log_law, log_law[-1:]])


def log_collision(cosine: Tensor, laws: Tensor) -> Tensor:
    """Return log p for cosines (B, ...), linear between the angles of the laws (B or 1, angles)."""
    place = torch.arccos(cosine.clamp(-1.0, 1.0)) * ((laws.shape[1] - 1) / math.pi)
    low = place.floor().clamp_max(laws.shape[1] - 2).long()
    laws = laws.to(cosine.dtype).expand(cosine.shape[0], -1)
    left, right = (laws.gather(1, index.flatten(1)).view_as(cosine) for index in (low, low + 1))
    return torch.lerp(left, right, place - low)


def _collide(buckets: int, angle: Tensor) -> Tensor:
    """Compute the double integral for each angle, with w in units of its standard deviation given u."""
    nodes, weights = _legendre(_NODES)
    rho, sigma = angle.cos().view(-1, 1, 1, 1), angle.sin().view(-1, 1, 1, 1)
    u = ((nodes + 1) * _FAR / 2).view(-1, 1, 1)
    lowest = (-rho * u / sigma).clamp(-_FAR, _FAR)  # where w = 0
    z = lowest + (nodes.view(-1, 1) + 1) * (_FAR - lowest) / 2
    w = rho * u + sigma * z
    x = nodes * u
    inside = torch.special.ndtr((w - rho * x) / sigma) - torch.special.ndtr((-w - rho * x) / sigma)
    both = (weights * u * _density(x) * inside).sum(-1, keepdim=True).clamp(0.0, 1.0)  # F(u, w)
    across = (weights.view(-1, 1) * (_FAR - lowest) / 2 * _density(z) * both ** (buckets // 2 - 1)).sum((-2, -1))
    return buckets * (weights * _FAR / 2 * _density(u.flatten()) * across).sum(-1)


def _legendre(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss-Legendre quadrature on [-1, 1], from the Jacobi matrix."""
    k = torch.arange(1, count, dtype=torch.float64)
    beside = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
    return nodes, 2 * vectors[0].square()


def _density(x: Tensor) -> Tensor:
    return (-x * x / 2).exp() / math.sqrt(2 * math.pi)
