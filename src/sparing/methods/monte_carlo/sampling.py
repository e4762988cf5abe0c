"""Randomised matrix products: x W from a few sampled features of x, unbiased for every number of samples.

H[j] = (1/r_j) sum_{t < r_j} x[j, s_jt] W[s_jt] / p(s_jt),  s_jt drawn from p, by default p(k) = |W[k]|^2 / |W|_F^2

Equations are those of Kim and Ko, "Fast Monte-Carlo Approximation of the Attention Mechanism" (2022). With r
independent samples of that p E|H - xW|^2 = (|x|^2 |W|_F^2 - |xW|^2) / r, where x counts only features with p > 0; of
any p it is (sum_k x_k^2 |W[k]|^2 / p(k) - |xW|^2) / r.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing.draws import Draws, checksum


def feature_law(w: Tensor) -> Tensor:
    """Return p(k) of eq. 6 in float64: w (..., d, e) -> (..., d). A zero matrix gives zeros."""
    tiny = torch.finfo(torch.float64).tiny
    w = w.detach().double()
    w = w / w.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # squares of any finite weight stay in range
    norms = w.square().sum(-1)
    return norms / norms.sum(-1, keepdim=True).clamp_min(tiny)


def input_law(x: Tensor, valid: Tensor, w: Tensor) -> Tensor:
    """Return p(k) = |X[:, k]| |W[k]| / sum_l |X[:, l]| |W[l]| of eq. 4 in float64: (B, H, d).

    x: (B, n, d). valid: which tokens X holds, (B, H, n). w: (H, d, e).
    """
    tiny = torch.finfo(torch.float64).tiny
    x = x.detach().double()
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # as the weight in `feature_law`
    columns = valid.double() @ x.square()  # |X[:, k]|^2
    sizes = (columns * feature_law(w)).sqrt()
    return sizes / sizes.sum(-1, keepdim=True).clamp_min(tiny)


def sample_counts(received: Tensor, tokens: Tensor, alpha: float, features: int) -> Tensor:
    """Return r_j = min(d, ceil((N M_j / alpha)^2)), eq. 9 with the rounding that keeps its bound.

    received: M_j (..., n), the largest weight that any query gives to token j, or another measure of its weights.
    tokens: N (...), how many tokens count.
    """
    if alpha == 0:
        return torch.full_like(received, features, dtype=torch.long)
    wanted = (tokens.double().unsqueeze(-1) * received.double() / alpha).square().ceil()
    return wanted.clamp_max(features).long()  # clamped first: a tiny alpha asks for more than an integer holds


def whole_counts(received: Tensor, counts: Tensor, features: int) -> Tensor:
    """Spend the same budget on whole tokens: r_j = d for the floor(sum r_j / d) with the largest M_j, 0 for others."""
    place = received.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return features * (place < counts.sum(-1, keepdim=True) // max(features, 1))


def mean_token(x: Tensor, valid: Tensor) -> Tensor:
    """Return the mean of the valid tokens: x (B, n, d), valid (B, H, n) -> (B, H, 1, d)."""
    return (valid.to(x.dtype) / valid.sum(-1, keepdim=True).clamp_min(1) @ x).unsqueeze(-2)


@dataclass(frozen=True, kw_only=True)
class Lists:
    """The lists of random numbers by which tokens sample features."""

    ranks: Tensor  #: (B, H, n), the number of a token among the valid ones, so that padding changes no sample
    draws: Draws
    shared: bool  #: one list per head, keyed by the draw; otherwise one per token, keyed by its rank and the draw
    stratified: bool  #: draw t comes from the t-th of r_j equal parts of the distribution

    @property
    def purpose(self) -> str:
        """Purpose of the random numbers."""
        return "monte_carlo.shared" if self.shared else "monte_carlo.independent"

    @property
    def checksum(self) -> int:
        """Checksum of the purpose, by which kernels draw the same numbers."""
        return checksum(self.purpose)


def draw_features(law: Tensor, counts: Tensor, lists: Lists) -> Tensor:
    """Return the features that each token samples: (B, H, n, d) indices, of which token j uses the first r_j.

    law: p (H, d), or (B, H, d) where it differs by item. counts: r (B, H, n).
    """
    (batch, heads, n), d = counts.shape, law.shape[-1]
    uniform = lists.draws.uniform(lists.purpose, 1 if lists.shared else n, d).expand(batch, heads, n, d)
    uniform = uniform.gather(2, lists.ranks.unsqueeze(-1).expand(batch, heads, n, d))  # from lists by rank
    if lists.stratified:
        uniform = (torch.arange(d, device=law.device) + uniform) / counts.clamp_min(1).unsqueeze(-1)
    return _inverse(law.expand(batch, heads, d), uniform)


def _cumulative(law: Tensor) -> Tensor:
    total = law.cumsum(-1)
    return total / total[..., -1:].clamp_min(torch.finfo(total.dtype).tiny)


def _inverse(law: Tensor, uniform: Tensor) -> Tensor:
    """Return feature k where p(0) + ... + p(k-1) < u <= p(0) + ... + p(k): never one with p = 0."""
    found = torch.searchsorted(_cumulative(law), uniform.flatten(-2).contiguous()).view(uniform.shape)
    return found.clamp_max(law.shape[-1] - 1)  # only needed for a matrix of zeros or NaN


def inverse_law(law: Tensor) -> Tensor:
    """Return 1 / p(k), and 0 for a feature that is never drawn."""
    # Draws have 32 bits, so a feature with p <= 2^-64 is never drawn; 1 / p must not become inf, as 0 * inf is NaN. A
    # NaN stays NaN.
    return torch.where(law <= 2.0**-64, 0.0, 1 / law)


def _scaled_rows(w: Tensor, law: Tensor) -> Tensor:
    """Return W[k] / p(k): what one draw of feature k adds for every unit of x_k."""
    return w * inverse_law(law).to(w.dtype).unsqueeze(-1)


def sampled_product(x: Tensor, w: Tensor, law: Tensor, picks: Tensor, counts: Tensor) -> Tensor:
    """Return H of eq. 5: x (B, H or 1, n, d), w (H, d, e) -> (B, H, n, e). A token without samples gives zeros.

    law: (H, d) or (B, H, d).
    """
    d = x.shape[-1]
    used = torch.arange(d, device=x.device) < counts.unsqueeze(-1)
    hits = x.new_zeros(picks.shape).scatter_add(-1, picks, used.to(x.dtype))  # how often j drew feature k
    return (hits * x) @ _scaled_rows(w, law) / counts.clamp_min(1).unsqueeze(-1)


def mean_square_error(weights: Tensor, x: Tensor, w: Tensor, counts: Tensor, *, shared: bool) -> Tensor:
    """Return E|sum_j A_ij (H_j - x_j W)|^2 of each row of A: (m, n), (n, d), (d, e), r (n,) -> (m,) in float64.

    sum_j A_ij^2 V_j for lists of their own; sum_jl A_ij A_il C_jl / max(r_j, r_l) for prefixes of one list, where
    C = |W|_F^2 X X^T - (XW)(XW)^T and V_j = C_jj / r_j. Tokens with r_j = d are exact; those with r_j = 0 are left out.
    """
    weights, x, w = weights.double(), x.double(), w.double()
    x = x * (w.square().sum(-1) > 0)  # features that are never drawn
    sampled = (counts > 0) & (counts < x.shape[-1])
    x, weights = x * sampled.unsqueeze(-1), weights * sampled
    values, size, r = x @ w, w.square().sum(), counts.clamp_min(1).double()
    if not shared:
        return weights.square() @ ((size * x.square().sum(-1) - values.square().sum(-1)) / r)
    joint = (size * x @ x.mT - values @ values.mT) / r.maximum(r.unsqueeze(-1))
    return ((weights @ joint) * weights).sum(-1)


def ragged_product(
    x: Tensor, w: Tensor, law: Tensor, counts: Tensor, lists: Lists, skip: Tensor | None = None
) -> Tensor:
    """Compute `sampled_product` at the cost of its sum r_j draws: each adds one row of w.

    x (B, n, d), w (H, d, e) -> (B, H, n, e). Tokens with r_j = d, which are to be projected, cost and give nothing.
    law: (H, d), or (B, H, d), which takes one product for each item.
    skip: (H,), how many draws of each list come before the r_j that are used; None for 0.
    """
    if law.ndim == 3:
        parts = zip(x.split(1), law, counts.split(1), lists.ranks.split(1), strict=True)
        return torch.cat([ragged_product(a, w, p, r, replace(lists, ranks=at), skip) for a, p, r, at in parts])
    heads, d, e = w.shape
    batch, _, n = counts.shape
    # One entry per token with heads outermost, then one per draw: draws of a head stand together.
    r = torch.where(counts < d, counts, 0).transpose(0, 1).flatten()
    ends = r.cumsum(0)
    token = torch.arange(len(r), device=r.device).repeat_interleave(r)
    turn = torch.arange(len(token), device=r.device) - (ends - r)[token]
    head = token // (batch * n)
    turn = turn if skip is None else turn + skip[head]
    index = turn if lists.shared else lists.ranks.transpose(0, 1).flatten()[token] * d + turn
    uniform = _uniform(lists.draws, lists.purpose, head, index, d if lists.shared else n * d)
    if lists.stratified:
        uniform = (turn + uniform) / r[token]
    parts = uniform.split(r.view(heads, -1).sum(-1).tolist())
    found = [torch.searchsorted(total, u) for total, u in zip(_cumulative(law), parts, strict=True)]
    picks = torch.cat(found).clamp_max(d - 1)
    amount = x.flatten().index_select(0, token % (batch * n) * d + picks) / r[token]
    out = torch.nn.functional.embedding_bag(
        head * d + picks, _scaled_rows(w, law).flatten(0, 1), torch.nn.functional.pad(ends, (1, 0)), mode="sum",
        per_sample_weights=amount, include_last_offset=True,
    )  # fmt: skip
    return out.view(heads, batch, n, e).transpose(0, 1)


def _uniform(draws: Draws, purpose: str, head: Tensor, index: Tensor, size: int) -> Tensor:
    """Return element `index` of the numbers 0 .. size - 1 of stream `head`, for each pair of them."""
    # Philox makes four numbers at a time: a table of all is cheaper unless less than a quarter of them is needed.
    streams, place = draws.streams.unique(return_inverse=True)
    if 4 * len(index) > size * len(streams):
        return Draws(draws.seed, streams).uniform(purpose, size).flatten()[place[head] * size + index]
    return Draws(draws.seed, draws.streams[head]).uniform_at(purpose, index)


def project_rows(x: Tensor, w: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    """Replace the rows `chosen` (B, H, n) of values (B, H, n, e) by those of x w; only these are computed."""
    batch, heads, n, e = values.shape
    chosen, tokens = chosen.transpose(0, 1).flatten(1), x.flatten(0, 1)  # (H, B n), (B n, d)
    rows = [tokens.index_select(0, c.nonzero().squeeze(-1)) @ part for c, part in zip(chosen, w, strict=True)]
    flat = values.transpose(0, 1).reshape(-1, e)
    flat = flat.index_copy(0, chosen.flatten().nonzero().squeeze(-1), torch.cat(rows))
    return flat.view(heads, batch, n, e).transpose(0, 1)
