"""Call the kernels that cluster keys, summarise clusters, and attend to few keys and to summaries of the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows

schemas.define(
    "kmeans(Tensor x, Tensor valid, Tensor start, Tensor start_used, Tensor lesson, Tensor lesson_used, int steps)"
    " -> Tensor labels"
)
schemas.define("metric_rows(Tensor k, Tensor factor, Tensor valid, int limit) -> Tensor")
schemas.define(
    "summaries(Tensor k, Tensor v, Tensor labels, Tensor mean, Tensor covariance, int clusters, float scale,"
    " float faintest, float nothing) -> (Tensor keys, Tensor values, Tensor offset, Tensor weight, Tensor spread,"
    " Tensor scatter, Tensor shares)"
)
schemas.define(
    "key_clusters(Tensor q, Tensor k, Tensor v, Tensor seen, Tensor own, Tensor mean, Tensor variance,"
    " Tensor pole_keys, Tensor pole_values, Tensor offset, Tensor weight, Tensor spread, Tensor scatter, Tensor labels,"
    " Tensor shares, Tensor levels, int before, int after, int sinks, int block, int keys, bool second, bool by_mass,"
    " float cap, float tolerance, float scale) -> (Tensor out, Tensor lse, Tensor error, Tensor read, Tensor summaries)"
)


def kmeans(x: Tensor, valid: Tensor, start: tuple[Tensor, Tensor], lesson: tuple[Tensor, Tensor], steps: int) -> Tensor:
    """Return the clusters (U, n) of the rows x (U, n, d) of integers, as `clusters.kmeans` finds them."""
    tensors = (t.contiguous() for t in (x, valid, *start, *lesson))
    return torch.ops.sparing.kmeans(*tensors, steps)


@torch.library.register_fake("sparing::kmeans", lib=schemas)
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.long)


def metric_rows(k: Tensor, factor: Tensor, valid: Tensor, limit: int) -> Tensor:
    """Return chunks of the keys k (B, H, n_k, d) times factor (B, H, T, d, d), rounded to integers: (B H T, size, d).

    factor: lower triangular, float64. valid: (B, T, size). Rounding is that of `clusters.whole_numbers`.
    """
    return torch.ops.sparing.metric_rows(contiguous_rows(k), factor.mT.contiguous(), valid.contiguous(), limit)


@torch.library.register_fake("sparing::metric_rows", lib=schemas)
def _(k: Tensor, factor: Tensor, valid: Tensor, limit: int) -> Tensor:
    batch, heads, _, d = k.shape
    chunks, size = valid.shape[1:]
    return k.new_empty(batch * heads * chunks, size, d, dtype=torch.float32)


def summaries(
    k: Tensor,
    v: Tensor,
    labels: Tensor,
    mean: Tensor,
    covariance: Tensor,
    clusters: int,
    scale: float,
    faintest: float,
    nothing: float,
) -> tuple[Tensor, ...]:
    """Return the summaries of clusters, as `sparing.methods.key_clusters.poles.described`. There is no gradient.

    These are mean keys (B, H, C, d), weighted sums of the values (B, H, C, e), offset, weight, spread and scatter
    (B, H, C), and the weights of the keys (B, H, n_k).

    labels: (B, H, n_k), -1 for keys outside all clusters. mean, covariance: (B, H, T, d) and (B, H, T, d, d) of the
    queries. clusters: number of clusters in each of T chunks. faintest: least log-weight. nothing: smaller spreads are
    taken to be zero.
    """
    k, v = contiguous_rows(k), contiguous_rows(v)
    tensors = (t.contiguous() for t in (labels, mean, covariance))
    return torch.ops.sparing.summaries(k, v, *tensors, clusters, scale, faintest, nothing)


@torch.library.register_fake("sparing::summaries", lib=schemas)
def _(k: Tensor, v: Tensor, labels: Tensor, mean: Tensor, covariance: Tensor, clusters: int, *others: Any) -> Any:
    rows = (*k.shape[:2], clusters * mean.shape[2])
    four = (k.new_empty(rows) for _ in range(4))
    return k.new_empty(*rows, k.shape[3]), k.new_empty(*rows, v.shape[3]), *four, k.new_empty(k.shape[:3])


def key_clusters(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    own: Tensor,
    mean: Tensor,
    variance: Tensor,
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
    tolerance: float,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return output (B, H, n_q, e), log-sum-exp, predicted error, numbers of keys and of summaries read (B, H, n_q).

    Keys are in the order of their ranks. seen, own: (B, n_q) keys that a query sees, and the rank of its own. mean,
    variance: (B, H, T, d) and (B, H, T) of the queries up to the end of each chunk of the first level. poles: keys
    (B, H, C, d), weighted sums of the values (B, H, C, e), offset, weight, spread, scatter (B, H, C) of the summaries.
    labels, shares: (levels, B, H, n_k) cluster of a key within its level and its weight there. levels: (levels, 3) keys
    per chunk, clusters per chunk, and chunks. block: keys of a block, 0 if not causal. There is no gradient.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    tensors = (t.contiguous() for t in (seen, own, mean, variance, *poles, labels, shares, levels))
    return torch.ops.sparing.key_clusters(
        q, k, v, *tensors, before, after, sinks, block, keys, second, by_mass, cap, tolerance, scale
    )


@torch.library.register_fake("sparing::key_clusters", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    rows = q.shape[:3]
    counts = (q.new_empty(rows, dtype=torch.long) for _ in range(2))
    return q.new_empty(*rows, v.shape[3]), q.new_empty(rows), q.new_empty(rows), *counts
