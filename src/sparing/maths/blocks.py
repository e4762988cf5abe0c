"""Attention in parts: sums of weighted values over disjoint sets of keys, merged by their log-sum-exp."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.maths.dense import divide_rows, finite_or_zero


class Part(NamedTuple):
    """The contribution of one set of keys to each query. The shift `top` cancels and has no gradient."""

    sums: Tensor  # (..., n, e): sum_j exp(score_j - top) v_j
    total: Tensor  # (..., n, 1): sum_j exp(score_j - top)
    top: Tensor  # (..., n, 1): the largest score; -inf for a query that sees none of the keys

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (output, log-sum-exp); a query without keys gives zeros and -inf."""
        return divide_rows(self.sums, self.total), (self.total.log() + self.top).squeeze(-1)


def part(scores: Tensor, v: Tensor) -> Part:
    """Return the part of keys with scores (..., n, m), -inf where a query may not look, and values (..., m, e)."""
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - finite_or_zero(top)).exp()
    return Part(weights @ v, weights.sum(-1, keepdim=True), top)


def merge(a: Part, b: Part) -> Part:
    """Return the part of both sets of keys. It takes no logarithm, so that empty sets have a finite gradient."""
    top = torch.maximum(a.top, b.top)
    shift = finite_or_zero(top)
    of_a, of_b = (a.top - shift).exp(), (b.top - shift).exp()
    return Part(a.sums * of_a + b.sums * of_b, a.total * of_a + b.total * of_b, top)
