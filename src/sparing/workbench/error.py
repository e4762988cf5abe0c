"""How wrong a method is, split into what it aims at and how well it hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.contract import Method, Projection
from sparing.contract import method as _method
from sparing.functional import attention


class ErrorSplit(NamedTuple):
    """L2 errors of the attention output, all relative to the norm of the exact output, so that parts compare.

    total <= substitution + approximation.
    """

    substitution: float  #: the method's own target against softmax attention
    approximation: float  #: the estimate against the method's own target
    total: float  #: the estimate against softmax attention


@torch.no_grad()
def error_split(
    method: str | Method,
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    *,
    seeds: Sequence[int] = (0,),
    **call: Any,
) -> ErrorSplit:
    """The error of `method` on this call, averaged over seeds for a stochastic method.

    >>> q, k, v = torch.randn(3, 1, 2, 64, 16).unbind(0)
    >>> error_split("kernelized", q, k, v).approximation
    0.0
    """
    chosen = _method(method)
    projected = value.project(key.shape[1]) if isinstance(value, Projection) else value
    exact = attention(query, key, projected, method="exact", **call)
    target = chosen.exact_target()
    scale = max(float(exact.double().norm()), 1e-300)
    seeds = seeds if chosen.supports.stochastic else seeds[:1]
    given = value if chosen.supports.projection else projected
    sums = [0.0, 0.0, 0.0]
    for seed in seeds:
        found = attention(query, key, given, method=chosen, seed=seed, **call)
        own = found if target is None else attention(query, key, projected, method=target, seed=seed, **call)
        for i, (a, b) in enumerate(((own, exact), (found, own), (found, exact))):
            sums[i] += float((a.double() - b.double()).norm()) / scale
    return ErrorSplit(*(s / len(seeds) for s in sums))


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's, of two vectors; equal numbers share the mean of their ranks. NaN if all numbers of one are equal."""

    def ranks(z: Tensor) -> Tensor:
        _, place, count = z.unique(return_inverse=True, return_counts=True)
        return (count.cumsum(0) - (count + 1) / 2)[place].double()

    return float(torch.stack([ranks(x), ranks(y)]).corrcoef()[0, 1])
