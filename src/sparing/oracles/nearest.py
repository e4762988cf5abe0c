"""The convex combination of at most r values nearest to the attention output, for a block of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.maths.dense import divide_rows
from sparing.oracles.elimination import eliminate
from sparing.oracles.pursuit import Combination, combine, pursue, take

_ACCEPTED = 1e-12  # relative error above which an exact combination is computed again, by elimination
_ENTRIES = 2**22  # most entries of an array that elimination gathers


def largest(scores: Tensor, keys: int) -> Tensor:
    """Return the `keys` largest of scores [..., n] in each row as a boolean [..., n]; ties go to the lower index."""
    keys = min(keys, scores.shape[-1])
    last = scores.topk(keys).values[..., -1:]
    above, tied = scores > last, scores == last
    return above | (tied & (tied.cumsum(-1) <= keys - above.sum(-1, keepdim=True)))


def nearest(weights: Tensor, values: Tensor, allowed: Tensor, keys: int, corrective: bool) -> Combination:
    """Compute OVA for one block: weights (Q, n), values (n, e) or (Q, n, e)."""
    n, width = values.shape[-2:]
    limit = min(keys, width + 1, n) if corrective else min(keys, n)
    mean = mean_of(weights, values)
    far = distances(mean, values).masked_fill(~allowed, torch.inf)
    empty = ~allowed.any(-1)
    scale = (weights * values.square().sum(-1)).sum(-1).masked_fill(empty, torch.inf)
    found = pursue(mean, values, far, limit, scale, corrective)
    if corrective and limit == min(width + 1, n):
        found = _made_exact(found, weights, values, mean, scale * _ACCEPTED**2)
    elif limit > 1:
        top = largest(weights, limit).nonzero()[:, 1].view(-1, limit)
        if corrective:  # the optimum on the largest weights, in case that the greedy choice is worse
            best = pursue(mean, take(values, top), far.gather(-1, top), limit, scale, corrective)
            best = best._replace(indices=top.gather(-1, best.indices))
        else:  # with room for all keys nothing is left to choose
            missed = torch.where(allowed.sum(-1) <= limit, 0.0, torch.inf).to(mean)
            best = Combination(top, weights.gather(-1, top), missed)
        found = _better(found, best)
    return found._replace(weights=found.weights.masked_fill(empty.unsqueeze(-1), 0.0))


def _made_exact(found: Combination, weights: Tensor, values: Tensor, mean: Tensor, accepted: Tensor) -> Combination:
    """Eliminate keys one by one where rounding kept the pursuit from the mean itself."""
    n, width = values.shape[-2:]
    for rows in (found.error > accepted).nonzero().squeeze(-1).split(max(1, _ENTRIES // (n * width))):
        each = values.expand(rows.numel(), n, width) if values.ndim == 2 else values[rows]
        indices, held = eliminate(weights[rows], each)
        error = combine(held, take(each, indices) - mean[rows].unsqueeze(1)).square().sum(-1)
        best = _better(Combination(*(t[rows] for t in found)), Combination(indices, held, error))
        for whole, part in zip(found, best, strict=True):
            whole[rows] = part
    return found


def _better(one: Combination, other: Combination) -> Combination:
    """Return for each query the one of two combinations that is nearer to the mean."""
    second = other.error < one.error
    rows = second.unsqueeze(-1)
    return Combination(
        torch.where(rows, other.indices, one.indices),
        torch.where(rows, other.weights, one.weights),
        torch.where(second, other.error, one.error),
    )


def mean_of(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights @ values: (Q, n) and (n, e) or (Q, n, e) -> (Q, e)."""
    return weights @ values if values.ndim == 2 else combine(weights, values)


def distances(mean: Tensor, values: Tensor) -> Tensor:
    """Return |v_i - o|^2 (Q, n) from differences: expanding the square would lose half the digits of a close value."""
    exact = "donot_use_mm_for_euclid_dist"
    if values.ndim == 2:
        return torch.cdist(mean, values, compute_mode=exact).square()
    return torch.cdist(mean.unsqueeze(1), values, compute_mode=exact).squeeze(1).square()


def unit(weights: Tensor) -> Tensor:
    """Divide rows by their sum; rows of zeros stay."""
    return divide_rows(weights, weights.sum(-1, keepdim=True))
