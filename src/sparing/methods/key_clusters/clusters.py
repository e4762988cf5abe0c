"""Cluster keys by k-means in the metric of the queries.

Two keys may share a cluster if the queries hardly tell them apart: (k - k')^T M (k - k') with M = mean of q q^T. With
M = L L^T that is the plain distance between the rows k L. These are rounded to integers, small enough that every
product and sum of k-means is exact in float32: the clusters do not depend on the order of computation.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.methods.key_clusters import native

_RIDGE = 1e-3  # share of the mean eigenvalue that is added to M: directions without queries still count a little
_DIGITS = 22  # bits of the largest sum of products
_LONGEST = 16.0  # queries longer than this times the median length of their chunk are shortened to it


class Moments(NamedTuple):
    """Moments of the queries up to the end of each chunk, in float64; earlier chunks may count less."""

    mean: Tensor  # (B, H, T, d)
    second: Tensor  # (B, H, T, d, d): mean of q q^T

    def at(self, chunks: Tensor) -> Moments:
        """Return the moments of these chunks, in this order."""
        return Moments(self.mean[:, :, chunks], self.second[:, :, chunks])

    @property
    def covariance(self) -> Tensor:
        """The covariance of the queries, (B, H, T, d, d)."""
        return self.second - self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)

    @property
    def variance(self) -> Tensor:
        """The mean of |q - mean|^2, (B, H, T)."""
        return self.second.diagonal(dim1=-2, dim2=-1).sum(-1) - self.mean.square().sum(-1)


class Rows(NamedTuple):
    """Some of the rows of a chunk."""

    place: Tensor  # (..., m)
    counts: Tensor  # (..., m) boolean: False in slots that are not used


class Sums(NamedTuple):
    """The sums that `Moments` are computed from."""

    total: Tensor  # (B, 1, T, 1) number (or weight) of rows, float64
    first: Tensor  # (B, H, T, d)
    second: Tensor  # (B, H, T, d, d)

    @property
    def moments(self) -> Moments:
        total = self.total.masked_fill(self.total == 0, 1.0)
        return Moments(self.first / total, self.second / total.unsqueeze(-1))


def sums(q: Tensor, counts: Tensor, size: int, remember: float = 1.0, before: Sums | None = None) -> Sums:
    """Return the sums of q (B, H, T * size, d) up to the end of each of T chunks.

    counts: (B, T * size), False for rows to leave out. remember: factor of a row's weight per chunk after its own.
    before: sums (T = 1) over earlier chunks, to which these are added.
    """
    counts = counts.unflatten(1, (-1, size))  # (B, T, size)
    rows = q.double().unflatten(2, (-1, size)).masked_fill(~counts[:, None, :, :, None], 0.0)  # (B, H, T, size, d)
    rows = _shortened(rows, counts[:, None])
    total = counts.sum(-1)[:, None, :, None].double()
    found = Sums(total, rows.sum(-2), rows.mT @ rows)
    for one, start in zip(found, (None,) * 3 if before is None else before, strict=True):
        parts = one.unbind(2)
        if start is not None:
            parts[0].add_(start[:, :, 0], alpha=remember)
        for previous, part in pairwise(parts):
            part.add_(previous, alpha=remember)
    return found


def _shortened(rows: Tensor, counts: Tensor) -> Tensor:
    """Return rows (..., size, d) cut to at most `_LONGEST` times the median length, so that no outlier dominates."""
    length = torch.linalg.vector_norm(rows, dim=-1)  # (..., size)
    median = length.masked_fill(~counts, torch.nan).nanmedian(-1, keepdim=True).values.nan_to_num(0.0)
    longest = _LONGEST * median
    beyond = (length > longest) & (longest > 0)
    return rows * torch.where(beyond, longest / length, 1.0).unsqueeze(-1) if bool(beyond.any()) else rows


def sample(rows: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return up to `most` rows of (B, H, n, d), evenly spaced among those that count (B, n), and which ones count."""
    total = counts.sum(-1, keepdim=True)
    rank = torch.arange(min(most, rows.shape[2]), device=rows.device) * (-(-total // most)).clamp_min(1)
    place = (~counts).long().argsort(dim=-1, stable=True).gather(1, rank.clamp_max(rows.shape[2] - 1))
    return rows_at(rows, place), rank < total


def rows_at(x: Tensor, place: Tensor) -> Tensor:
    """Return the rows `place` (B, m) of x (B, H, n, d), as (B, H, m, d)."""
    # One index for the whole batch would be expanded to every entry, which takes ten times as long.
    return torch.stack([item.index_select(1, at) for item, at in zip(x, place, strict=True)])


def factor(second: Tensor) -> Tensor:
    """Return L with L L^T = M (..., d, d), after making M positive definite; the identity where M is zero."""
    eye = torch.eye(second.shape[-1], dtype=second.dtype, device=second.device)
    size = second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    # In units of its size, so that neither large nor tiny queries lead to overflow.
    unit = second / size.masked_fill(size == 0, 1.0)
    return torch.linalg.cholesky(torch.where(size == 0, eye, unit + _RIDGE * eye)) * torch.where(
        size == 0, 1.0, size.sqrt()
    )


def whole_numbers(x: Tensor, valid: Tensor) -> Tensor:
    """Return rows (..., n, d) as integers, scaled so that the largest valid entry is as large as exact sums allow."""
    x = x.masked_fill(~valid.unsqueeze(-1), 0.0)
    largest = x.abs().amax((-2, -1), keepdim=True)
    return (x * (largest_number(x.shape[-1]) / largest.masked_fill(largest == 0, 1.0))).round().float()


def largest_number(width: int) -> int:
    """Return the largest entry that rows of `width` integers may have."""
    return max(int((2**_DIGITS / width) ** 0.5), 1)


def spread_out(valid: Tensor, wanted: Tensor, draws: Draws, purpose: str, first: int = 0) -> Rows:
    """Cut the valid rows of (B, T, n) into equal stretches and draw one of each, as (B, H, T, m).

    wanted: (B, T) number of stretches; if there are fewer valid rows, all are returned. first: the number of the first
    chunk.
    """
    rows = valid.sum(-1)[:, None, :, None]
    wanted = torch.minimum(wanted[:, None, :, None], rows)
    number = torch.arange(max(int(wanted.max()), 1), device=valid.device)
    chunks = valid.shape[1]
    # Draws are numbered by chunk and stretch, so that they do not depend on the rest of the batch.
    if chunks == 1 and first == 0:
        within = draws.uniform(purpose, 1, len(number))  # the same numbers as below, at less cost
    else:
        chunk = first + torch.arange(chunks, device=valid.device).unsqueeze(-1)
        within = draws.uniform_at(purpose, (chunk * 2**32 + number).unsqueeze(0))  # (H, T, m)
    counts = number < wanted
    low, high = (edge * rows // wanted.clamp_min(1) for edge in (number, number + 1))
    rank = torch.where(counts, low + (within * (high - low)).long(), 0)  # (B, H, T, m)
    place = (~valid).long().argsort(dim=-1, stable=True)  # valid rows first
    return Rows(place[:, None].expand(*rank.shape[:3], -1).gather(-1, rank), counts.expand(rank.shape))


def cluster(k: Tensor, factor: Tensor, valid: Tensor, start: Rows, lesson: Rows, steps: int) -> Tensor:
    """Return the cluster of each key of T chunks of k (B, H, n_k, d), as (B, H, T, size).

    valid: (B, T, size); keys where it is False get -1. factor: (B, H, T, d, d), of the metric. start, lesson:
    (B, H, T, ...), as in `kmeans`.
    """
    _, chunks, size = valid.shape
    rows = k[:, :, : chunks * size].unflatten(2, (chunks, size)).double() @ factor
    valid = valid[:, None].expand(rows.shape[:4])
    x = whole_numbers(rows, valid)
    first, taught = (Rows(*(t.flatten(0, 2) for t in some)) for some in (start, lesson))
    return kmeans(x.flatten(0, 2), valid.flatten(0, 2), first, taught, steps).view(valid.shape)


def native_cluster(k: Tensor, factor: Tensor, valid: Tensor, start: Rows, lesson: Rows, steps: int) -> Tensor:
    """Compute `cluster` by kernels."""
    x = native.metric_rows(k, factor, valid, largest_number(k.shape[-1]))
    shape = (*factor.shape[:3], valid.shape[2])
    first, taught = (Rows(*(t.flatten(0, 2) for t in some)) for some in (start, lesson))
    return native.kmeans(x, valid[:, None].expand(shape).flatten(0, 2), first, taught, steps).view(shape)


def kmeans(x: Tensor, valid: Tensor, start: Rows, lesson: Rows, steps: int) -> Tensor:
    """Return the cluster of each row of x (U, n, d), integers from `whole_numbers`, as (U, n); -1 where valid is False.

    start: (U, c) rows that are the first centres. lesson: (U, m) rows that move the centres. A row joins the nearest
    centre, the first of equally near ones. A centre without rows stays where it is.
    """
    width = x.shape[-1]
    centres, rows = (x.gather(1, t.unsqueeze(-1).expand(-1, -1, width)) for t in (start.place, lesson.place))
    counts = lesson.counts.unsqueeze(-1).to(x.dtype)
    for _ in range(steps):
        share = torch.zeros(*lesson.place.shape, centres.shape[1], dtype=x.dtype, device=x.device)
        share = share.scatter(2, _nearest(rows, centres, start.counts).unsqueeze(-1), counts)  # (U, m, c)
        held = share.sum(1).double().unsqueeze(-1)
        moved = ((share.mT.double() @ rows.double()) / held.clamp_min(1)).round().float()
        centres = torch.where(held > 0, moved, centres)
    return _nearest(x, centres, start.counts).masked_fill(~valid, -1)


def _nearest(rows: Tensor, centres: Tensor, counts: Tensor) -> Tensor:
    """Return the nearest centre of each row: that of the largest x.c - c.c/2, which is exact in float32."""
    penalty = (centres.square().sum(-1) / 2).masked_fill(~counts, torch.inf)
    return (rows @ centres.mT - penalty.unsqueeze(1)).argmax(-1)
