"""Randomised matrix products: x W from a few sampled features of x, unbiased for every number of samples.

H[j] = (1/r_j) sum_{t < r_j} x[j, s_jt] W[s_jt] / p(s_jt),  s_jt drawn from p(k) = |W[k]|^2 / |W|_F^2

Equations are those of Kim and Ko, "Fast Monte-Carlo Approximation of the Attention Mechanism" (2022). With r
independent samples E|H - xW|^2 = (|x|^2 |W|_F^2 - |xW|^2) / r, where x counts only features with p > 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.draws import Draws


def feature_law(w: Tensor) -> Tensor:
    """p(k) of eq. 6 in float64: w (..., d, e) -> (..., d). A zero matrix gives zeros."""
    tiny = torch.finfo(torch.float64).tiny
    w = w.detach().double()
    w = w / w.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # squares of any finite weight stay in range
    norms = w.square().sum(-1)
    return norms / norms.sum(-1, keepdim=True).clamp_min(tiny)


def sample_counts(received: Tensor, tokens: Tensor, alpha: float, features: int) -> Tensor:
    """r_j = min(d, ceil((N M_j / alpha)^2)), eq. 9 with the rounding that keeps its bound.

    received: M_j (..., n), the largest weight that any query gives to token j.
    tokens: N (...), how many tokens count.
    """
    if alpha == 0:
        return torch.full_like(received, features, dtype=torch.long)
    wanted = (tokens.double().unsqueeze(-1) * received.double() / alpha).square().ceil()
    return wanted.clamp_max(features).long()  # clamped first: a tiny alpha asks for more than an integer holds


def draw_features(
    law: Tensor, counts: Tensor, ranks: Tensor, draws: Draws, *, shared: bool, stratified: bool
) -> Tensor:
    """The features that each token samples: (B, H, n, d) indices, of which token j uses the first r_j.

    law: p (H, d). counts: r (B, H, n). ranks: (B, H, n), the number of a token among the valid ones, so that padding
        changes no sample.
    shared: one list per head, keyed by the draw; otherwise one list per token, keyed by its rank and the draw.
    stratified: draw t comes from the t-th of r_j equal parts of the distribution.
    """
    heads, d = law.shape
    batch, _, n = counts.shape
    if shared:
        uniform = draws.uniform("monte_carlo.shared", 1, d).expand(heads, n, d)
    else:
        uniform = draws.uniform("monte_carlo.independent", n, d)
    if stratified:
        uniform = _by_rank(uniform, ranks)
        uniform = (torch.arange(d, device=law.device) + uniform) / counts.clamp_min(1).unsqueeze(-1)
        return _inverse(law.expand(batch, heads, d), uniform)
    return _by_rank(_inverse(law, uniform), ranks)


def _by_rank(lists: Tensor, ranks: Tensor) -> Tensor:
    """(H, n, d) lists, one per rank -> (B, H, n, d), one per token."""
    batch, d = ranks.shape[0], lists.shape[-1]
    return lists.expand(batch, *lists.shape).gather(2, ranks.unsqueeze(-1).expand(*ranks.shape, d))


def _inverse(law: Tensor, uniform: Tensor) -> Tensor:
    """Feature k where p(0) + ... + p(k-1) < u <= p(0) + ... + p(k): never one with p = 0."""
    total = law.cumsum(-1)
    total = total / total[..., -1:].clamp_min(torch.finfo(total.dtype).tiny)
    found = torch.searchsorted(total.contiguous(), uniform.flatten(-2).contiguous()).view(uniform.shape)
    return found.clamp_max(law.shape[-1] - 1)  # only a zero (or NaN) matrix gets here


def sampled_product(x: Tensor, w: Tensor, law: Tensor, picks: Tensor, counts: Tensor) -> Tensor:
    """H of eq. 5: x (B, H or 1, n, d), w (H, d, e) -> (B, H, n, e). A token without samples gives zeros."""
    d = x.shape[-1]
    used = torch.arange(d, device=x.device) < counts.unsqueeze(-1)
    hits = x.new_zeros(picks.shape).scatter_add(-1, picks, used.to(x.dtype))  # how often j drew feature k
    # Draws have 32 bits: a feature below 2^-64 is never drawn, and 0 * inf must not come of it.
    inverse = torch.where(law > 2.0**-64, 1 / law, 0.0).to(w.dtype)
    return (hits * x) @ (w * inverse.unsqueeze(-1)) / counts.clamp_min(1).unsqueeze(-1)
