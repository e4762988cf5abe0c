"""Parts of dense attention that references share: logits, a softmax that handles empty rows, weighted sums."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.call import Call


def logits(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Return scale * q.k plus an additive mask, -inf where the query may not look: (B, H, n_q, n_k)."""
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.mask.bias is not None:
        scores = scores + call.mask.bias
    visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weights, log-sum-exp) over the last axis. A row of -inf gives zero weights and -inf."""
    top = finite_or_zero(scores.detach().amax(-1, keepdim=True))
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0), (total.log() + top).squeeze(-1)


def divide_rows(sums: Tensor, total: Tensor) -> Tensor:
    """Divide sums by non-negative totals; a row whose total is zero, or too small to divide by, gives zeros."""
    empty = vanishes(total)
    return (sums / total.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def vanishes(total: Tensor) -> Tensor:
    """Return which non-negative numbers are zero, or so small that dividing by them is not safe."""
    return total < smallest(total.dtype)


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest number that is safe to divide by."""
    return torch.finfo(dtype).tiny * 1e8


def finite_or_zero(x: Tensor) -> Tensor:
    """Replace -inf, the maximum of no scores, by zero, so that it can be subtracted as a shift."""
    return x.masked_fill(x == -torch.inf, 0.0)
