"""Call the kernels that cluster keys, summarise clusters, and attend to few keys and to summaries of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparing.methods.multipole.step_past import StepPast
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
    "multipole(Tensor q, Tensor k, Tensor v, Tensor seen, Tensor own, Tensor mean, Tensor variance, Tensor pole_keys,"
    " Tensor pole_values, Tensor offset, Tensor weight, Tensor spread, Tensor scatter, Tensor labels, Tensor shares,"
    " Tensor levels, int before, int after, int sinks, int block, int keys, bool second, bool by_mass, float cap,"
    " float tolerance, float scale) -> (Tensor out, Tensor lse, Tensor error, Tensor read, Tensor summaries)"
)

schemas.define(
    "multipole_step(Tensor q, Tensor k, Tensor v, Tensor? place, Tensor? own, Tensor(a!) reals, Tensor ints,"
    " int clusters, int ranks, int block, int before, int sinks, int keys, bool second, bool by_mass, float cap,"
    " float tolerance, float scale, float limit) -> (Tensor out, Tensor notes, Tensor within)"
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
    """Return the summaries of clusters, as `sparing.methods.multipole.poles.described`. There is no gradient.

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


def multipole(
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
    return torch.ops.sparing.multipole(
        q, k, v, *tensors, before, after, sinks, block, keys, second, by_mass, cap, tolerance, scale
    )


@torch.library.register_fake("sparing::multipole", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return _outputs(q, v)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    rows = q.shape[:3]
    counts = (q.new_empty(rows, dtype=torch.long) for _ in range(2))
    return q.new_empty(*rows, v.shape[3]), q.new_empty(rows), q.new_empty(rows), *counts


def multipole_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Tensor | None,
    own: Tensor | None,
    past: StepPast,
    settings: tuple[float, ...],
    limit: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H, n_q, e), notes (4, B, H, n_q) and within () for q (B, H, n_q, d), k and v (B, H_kv, n, .).

    Notes: log-sum-exp, predicted error, number of keys and summaries read, number of summaries among them. within:
    False if the joint norm of q and of as many last keys and values is NaN or above the limit. Nothing is computed
    then: output and notes are zeros, and the past is unchanged.

    place: (B, .) position of each rank; None: the same. own: (B, n_q) rank of a query's own key, -1 for none; None: the
    last key, for a single query, which is then added to the past's queries. settings: before, sinks, keys, second,
    by_mass, cap, tolerance, scale, as in `multipole`. There is no gradient.
    """
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    return torch.ops.sparing.multipole_step(
        q, k, v, place, own, past.reals, past.ints, past.clusters, past.ranks, past.block, *settings, limit
    )


class StepNotes(Mapping[str, Tensor]):
    """The notes of `multipole_step` by name. They are sliced on access, so that a step does not pay for unread ones."""

    _rows: ClassVar[dict[str, int]] = {"lse": 0, "error": 1, "touched": 2}

    def __init__(self, notes: Tensor) -> None:
        self.notes = notes

    def __getitem__(self, name: str) -> Tensor:
        row = self.notes[self._rows[name]]
        return row.long() if name == "touched" else row

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return repr(dict(self))


def near_step(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, before: int, sinks: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run `multipole_step` without clusters: a query sees its own key, `before` before it, and the first `sinks`."""
    settings = (before, sinks, 0, False, False, 1.0, 0.0, scale)
    return multipole_step(q, k, v, None, own, StepPast(q, v.shape[3], 1), settings)[:2]


@torch.library.register_fake("sparing::multipole_step", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty(*rows, v.shape[3]), q.new_empty(4, *rows), q.new_empty((), dtype=torch.bool)
