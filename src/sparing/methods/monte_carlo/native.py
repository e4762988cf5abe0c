"""Wrappers of the kernels of `monte_carlo`: sampled projections of values, and attention that sets sample counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.methods.monte_carlo.sampling import Lists
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows

schemas.define(
    "received(Tensor q, Tensor k, Tensor? keep, Tensor? counted, float scale) -> (Tensor largest, Tensor lse)"
)
schemas.define(
    "sampled_projection(Tensor x, Tensor weight, Tensor? bias, Tensor counts, Tensor ranks, Tensor streams, int seed,"
    " int purpose, bool shared, bool stratified) -> Tensor"
)


def received(q: Tensor, k: Tensor, keep: Tensor | None, counted: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the largest softmax weight that any query gives to each key (B, H, n_k), and the log-sum-exp (B, H, n_q).

    keep: (B, n_k), False for padded keys, which receive nothing. counted: (B, n_q), False for queries whose weights do
    not count. There is no gradient.
    """
    q, k = contiguous_rows(q), contiguous_rows(k)
    keep, counted = (None if mask is None else mask.contiguous() for mask in (keep, counted))
    return torch.ops.sparing.received(q, k, keep, counted, scale)


@torch.library.register_fake("sparing::received", lib=schemas)
def _(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(k.shape[:3]), q.new_empty(q.shape[:3])


def sampled_projection(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, lists: Lists) -> Tensor:
    """Compute x W + b of every head (B, H, n, e), from `counts` sampled features of each token; exact where it is d.

    x (B, n, d), weight (H e, d) and bias (H e) as in `nn.Linear`; counts (B, H, n). The samples are those of
    `draw_features`. There is no gradient.
    """
    tensors = (x, weight, counts, lists.ranks, lists.draws.streams)
    x, weight, counts, ranks, streams = (t.contiguous() for t in tensors)
    bias = None if bias is None else bias.contiguous()
    return torch.ops.sparing.sampled_projection(
        x, weight, bias, counts, ranks, streams, lists.draws.signed_seed, lists.checksum, lists.shared, lists.stratified
    )


@torch.library.register_fake("sparing::sampled_projection", lib=schemas)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, *others: Any) -> Tensor:
    return x.new_empty(*counts.shape, weight.shape[0] // counts.shape[1])
