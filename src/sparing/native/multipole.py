"""Clusters of keys, and attention to few keys and to summaries of the clusters of the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.library import schemas
from sparing.native.tensors import adjacent

schemas.define(
    "kmeans(Tensor x, Tensor valid, Tensor start, Tensor start_used, Tensor lesson, Tensor lesson_used, int steps)"
    " -> Tensor labels"
)
schemas.define(
    "multipole(Tensor q, Tensor k, Tensor v, Tensor seen, Tensor own, Tensor alarm, Tensor pole_keys,"
    " Tensor pole_values, Tensor offset, Tensor weight, Tensor spread, Tensor scatter, Tensor labels, Tensor shares,"
    " Tensor levels, int before, int after, int sinks, int block, int keys, bool second, bool by_mass, float cap,"
    " float scale) -> (Tensor out, Tensor lse, Tensor error, Tensor touched)"
)


def kmeans(x: Tensor, valid: Tensor, start: tuple[Tensor, Tensor], lesson: tuple[Tensor, Tensor], steps: int) -> Tensor:
    """(U, n) clusters of the rows x (U, n, d) of whole numbers, as `sparing.maths.clusters.kmeans` finds them."""
    tensors = (t.contiguous() for t in (x, valid, *start, *lesson))
    return torch.ops.sparing.kmeans(*tensors, steps)


@torch.library.register_fake("sparing::kmeans", lib=schemas)
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.long)


def multipole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    own: Tensor,
    alarm: Tensor,
    poles: tuple[Tensor, ...],
    labels: Tensor,
    shares: Tensor,
    levels: Tensor,
    before: int,
    after: int,
    sinks: int,
    block: int,
    keys: int,
    second: bool,
    by_mass: bool,
    cap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output (B, H, n_q, e), log-sum-exp, predicted error and touched keys (B, H, n_q)).

    Keys are in the order of their ranks. seen, own: (B, n_q) keys that a query sees, and the rank of its own. poles:
    keys (B, H, C, d), weighted sums of the values (B, H, C, e), offset, weight, spread and scatter (B, H, C) of the
    summaries. labels, shares: (levels, B, H, n_k) cluster of a key within its level and its weight there. levels:
    (levels, 3) keys and clusters of a chunk, and chunks. block: 0 if not causal. There is no gradient.
    """
    q, k, v = (adjacent(x) for x in (q, k, v))
    tensors = (t.contiguous() for t in (seen, own, alarm, *poles, labels, shares, levels))
    return torch.ops.sparing.multipole(
        q, k, v, *tensors, before, after, sinks, block, keys, second, by_mass, cap, scale
    )


@torch.library.register_fake("sparing::multipole", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    rows = q.shape[:3]
    return (
        q.new_empty(*rows, v.shape[3]), q.new_empty(rows), q.new_empty(rows), q.new_empty(rows, dtype=torch.long)
    )  # fmt: skip
