"""Pieces of dense attention that references share: logits, a softmax that survives empty rows, weighted sums."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.call import Call


def logits(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """scale * q.k plus an additive mask; -inf where the query may not look. (B, H, n_q, n_k)"""
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask
    visible = call.visible(q.shape[-2], k.shape[-2], q.device)
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, log-sum-exp) over the last axis. A row of -inf gives zero weights and a log-sum-exp of -inf."""
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0), (total.log() + top).squeeze(-1)


def divide_rows(sums: Tensor, total: Tensor) -> Tensor:
    """sums / total for non-negative totals; a row whose total is zero, or too small to divide by, gives zeros."""
    empty = total < torch.finfo(total.dtype).tiny * 1e8
    return (sums / total.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
