"""Feature maps of kernels: kappa(q, k) = phi(q).phi(k), exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.maths.linear import LogFeatures


def elu_features(q: Tensor, k: Tensor, *, shift: bool) -> LogFeatures:
    """Return phi(x) = 1 + ELU(x): 1 + x above zero, exp(x) below; with `shift`, up to a factor per query."""
    phi_q, _ = _one_plus_elu(q, shift)
    return LogFeatures(phi_q, *_one_plus_elu(k, shift))


def _one_plus_elu(x: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """Return (phi, log), 1 + ELU(x) = phi exp(log); with `shift` the largest entry of each phi is one."""
    if not shift:
        return torch.where(x > 0, 1 + x, x.clamp_max(0).exp()), torch.zeros_like(x[..., 0])
    # Where all entries are negative, exp(largest entry) goes to the logarithm: nothing underflows together.
    top = x.detach().amax(-1, keepdim=True).clamp_max(0)
    phi = torch.where(x > 0, 1 + x, (x.clamp_max(0) - top).exp())
    size = phi.detach().amax(-1, keepdim=True)
    return phi / size, (top + size.log()).squeeze(-1)


def square_features(x: Tensor) -> Tensor:
    """Return phi with phi(x).phi(y) = (x.y)^2: d squares and, times sqrt(2), d (d - 1) / 2 products of coordinates."""
    double = x * 2.0**0.5
    # Products of slices: gathering pairs of coordinates takes longer than the matrix product that follows.
    pairs = [double[..., a : a + 1] * x[..., a + 1 :] for a in range(x.shape[-1] - 1)]
    return torch.cat([x.square(), *pairs], dim=-1)
