"""Attention with a feature map, out_i = phi(q_i).S / phi(q_i).z, at linear cost, causal or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.call import Call
from sparing.dense import divide_rows

_BLOCK = 64


class LogFeatures(NamedTuple):
    """Non-negative features; the weight of a pair is phi_q.phi_k * exp(log_k), with log_k kept apart for its range."""

    phi_q: Tensor  # (B, H, n_q, F)
    phi_k: Tensor  # (B, H, n_k, F)
    log_k: Tensor  # (B, H, n_k), no gradient


def linear_attention(features: LogFeatures, v: Tensor, call: Call, *, normalize: bool = True) -> Tensor:
    """sum_j w_ij v_j, divided by sum_j w_ij if `normalize`, with w_ij = phi_q_i.phi_k_j exp(log_k_j).

    Without `normalize`, log_k must be zero. Rows that see no key give zeros.
    """
    phi_q, phi_k, log_k = features
    if call.keep is not None:
        phi_k = phi_k * call.keep[:, None, :, None]
        log_k = log_k.masked_fill(~call.keep[:, None, :], -torch.inf)
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)  # the last column carries the row sums
    if call.is_causal:
        sums = _causal(phi_q, phi_k, log_k, v, shift=normalize)
    else:
        top = _finite_or_zero(log_k.amax(-1, keepdim=True)) if normalize else torch.zeros_like(log_k[..., :1])
        sums = phi_q @ ((phi_k * (log_k - top).exp().unsqueeze(-1)).mT @ v)
    values, total = sums[..., :-1], sums[..., -1:]
    return divide_rows(values, total) if normalize else values


def _causal(phi_q: Tensor, phi_k: Tensor, log_k: Tensor, v: Tensor, *, shift: bool) -> Tensor:
    """Blocks of queries: their own keys densely under a triangle, all earlier keys through a running state.

    Row i is divided by exp(max_{j <= i} log_k_j), so no number of row i ever depends on a later key.
    """
    n_q, n_k = phi_q.shape[-2], phi_k.shape[-2]
    running = log_k.cummax(-1).values if shift else torch.zeros_like(log_k)
    state = v.new_zeros(*v.shape[:2], phi_k.shape[-1], v.shape[-1])
    level = torch.full_like(running[..., :1], -torch.inf)  # log of the factor that the state is divided by
    out = []
    for start in range(0, n_q, _BLOCK):
        queries = slice(start, min(start + _BLOCK, n_q))
        keys = slice(min(start, n_k), min(queries.stop, n_k))
        width, height = keys.stop - keys.start, queries.stop - queries.start
        tops = running[..., keys]
        if width < height:  # queries beyond the last key see what the last key sees
            last = running[..., n_k - 1 :].expand(*running.shape[:-1], height - width)
            tops = torch.cat([tops, last], dim=-1)
        tops = _finite_or_zero(tops).unsqueeze(-1)  # (B, H, height, 1)
        rows = (phi_q[..., queries, :] @ state) * (level.unsqueeze(-1) - tops).exp()
        if width:
            weights = phi_q[..., queries, :] @ phi_k[..., keys, :].mT
            factors = (log_k[..., None, keys] - tops).masked_fill(_future(height, width, v.device), -torch.inf)
            rows = rows + (weights * factors.exp()) @ v[..., keys, :]
            fresh = _finite_or_zero(running[..., keys.stop - 1 : keys.stop])
            state = state * (level - fresh).exp().unsqueeze(-1)
            state = state + (phi_k[..., keys, :] * (log_k[..., keys] - fresh).exp().unsqueeze(-1)).mT @ v[..., keys, :]
            level = fresh
        out.append(rows)
    return torch.cat(out, dim=-2)


def _future(height: int, width: int, device: torch.device) -> Tensor:
    return torch.ones(height, width, dtype=torch.bool, device=device).triu(1)


def _finite_or_zero(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)
