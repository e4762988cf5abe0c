"""Attention with a feature map, out_i = phi(q_i).S / phi(q_i).z, at linear cost, causal or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Shape
from sparing.maths.dense import divide_rows, finite_or_zero
from sparing.maths.long_sums import rows_times, sum_products

BLOCK = 64  #: queries and keys that a causal sum multiplies densely


class LogFeatures(NamedTuple):
    """Non-negative features; the weight of a pair is phi_q.phi_k * exp(log_k), with log_k kept apart for its range."""

    phi_q: Tensor  # (B, H, n_q, F)
    phi_k: Tensor  # (B, H, n_k, F)
    log_k: Tensor  # (B, H, n_k), no gradient


def linear_attention(features: LogFeatures, v: Tensor, call: Call) -> Tensor:
    """Return sum_j w_ij v_j / sum_j w_ij, w_ij = phi_q_i.phi_k_j exp(log_k_j); zeros where the sum is zero."""
    return divide_rows(*linear_sums(features, v, call))


def linear_sums(features: LogFeatures, v: Tensor, call: Call, *, shift: bool = True) -> tuple[Tensor, Tensor]:
    """Return sum_j w_ij v_j (B, H, n_q, e) and sum_j w_ij (B, H, n_q, 1) over the keys that row i sees.

    With `shift`, both are divided by the largest exp(log_k_j) that the row sees; without, log_k must be zero.
    """
    phi_q, phi_k, log_k = features
    if call.mask.keep is not None:
        phi_k = phi_k * call.mask.keep[:, None, :, None]
        log_k = log_k.masked_fill(~call.mask.keep[:, None, :], -torch.inf)
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)  # the last column carries the row sums
    if call.mask.causal:
        sums = _causal(phi_q, phi_k, log_k, v, shift=shift)
    else:
        top = finite_or_zero(log_k.amax(-1, keepdim=True)) if shift else torch.zeros_like(log_k[..., :1])
        sums = rows_times(phi_q, sum_products(phi_k * (log_k - top).exp().unsqueeze(-1), v))
    return sums[..., :-1], sums[..., -1:]


def linear_flops(shape: Shape, features: int) -> float:
    """Return the FLOPs of `linear_sums` for one head."""
    keys = min(shape.queries, shape.keys) if shape.causal else shape.keys
    near = keys * min(BLOCK, keys) if shape.causal else 0  # pairs that are multiplied densely
    return float(
        (shape.queries + keys) * features * 2 * (shape.value_dim + 1) + near * 2 * (features + shape.value_dim + 1)
    )


def feature_weights(features: LogFeatures, visible: Tensor | None) -> Tensor:
    """Return the weights (B, H, n_q, n_k), each row divided by the largest exp(log_k_j) that it sees."""
    phi_q, phi_k, log_k = features
    factors = log_k.unsqueeze(-2).expand(*phi_q.shape[:-1], phi_k.shape[-2])
    factors = factors if visible is None else factors.masked_fill(~visible, -torch.inf)
    return phi_q @ phi_k.mT * (factors - finite_or_zero(factors.amax(-1, keepdim=True))).exp()


def plain_sums(v: Tensor, call: Call, n_q: int) -> tuple[Tensor, Tensor]:
    """Return sum_j v_j (B, H, n_q or 1, e) and how many keys each row sees (B or 1, 1, n_q or 1, 1)."""
    n_k = v.shape[-2]
    keep = (
        v.new_ones(1, n_k) if call.mask.keep is None else call.mask.keep.to(v.dtype)
    )  # padded values are zero already
    if not call.mask.causal:
        return v.sum(-2, keepdim=True), keep.sum(-1)[:, None, None, None]
    last = torch.arange(n_q, device=v.device).clamp_max(n_k - 1)
    return v.cumsum(-2)[..., last, :], keep.cumsum(-1)[:, None, last, None]


def _causal(phi_q: Tensor, phi_k: Tensor, log_k: Tensor, v: Tensor, *, shift: bool) -> Tensor:
    """Sum by blocks of queries: their own keys densely under a triangle, earlier keys through a running state.

    Row i is divided by exp(max_{j <= i} log_k_j), so no number of row i ever depends on a later key.
    """
    both = min(phi_q.shape[-2], phi_k.shape[-2])
    own, late = phi_q.split([both, phi_q.shape[-2] - both], dim=-2)  # late queries come after the last key
    running = log_k.cummax(-1).values if shift else torch.zeros_like(log_k)
    state = v.new_zeros(*v.shape[:2], phi_k.shape[-1], v.shape[-1])
    level = torch.full_like(running[..., :1], -torch.inf)  # log of the factor that the state is divided by
    out = []
    # One split per tensor: slices in a loop would each have a gradient as long as the sequence, quadratic in all.
    parts = (x[:, :, :both].split(BLOCK, dim=2) for x in (own, phi_k, v, log_k, running))
    for queries, keys, values, logs, tops in zip(*parts, strict=True):
        tops = finite_or_zero(tops)  # (B, H, block)
        factors = (logs.unsqueeze(-2) - tops.unsqueeze(-1)).masked_fill(_future(keys), -torch.inf)
        rows = (queries @ state) * (level - tops).exp().unsqueeze(-1)
        out.append(rows + (queries @ keys.mT * factors.exp()) @ values)
        fresh = tops[..., -1:]
        state = state * (level - fresh).exp().unsqueeze(-1)
        state = state + (keys * (logs - fresh).exp().unsqueeze(-1)).mT @ values
        level = fresh
    return torch.cat([*out, late @ state], dim=-2)


def _future(keys: Tensor) -> Tensor:
    """Return which keys of a block come after each query of it, (block, block)."""
    n = keys.shape[-2]
    return torch.ones(n, n, dtype=torch.bool, device=keys.device).triu(1)
