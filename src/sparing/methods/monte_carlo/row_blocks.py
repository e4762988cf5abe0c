"""Causal softmax attention of one key-value head by blocks of rows, with the sample counts of every row.

Row i asks for r_ij samples of token j, by the largest weight that token j received up to row i. `levels.py` has what
is computed from these counts; here is where they come from, and what is known about the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.maths import dense
from sparing.methods.monte_carlo.levels import (
    block_pairs,
    largest_counts,
    level_of,
    levels,
    present,
    row_blocks,
    row_terms,
    running_maximum,
)

Budget = Callable[[Tensor, Tensor], Tensor]  # M (rows, n) and N (rows,) -> r (rows, n)


class RowBlock(NamedTuple):
    """Some rows of one key-value head, and the keys 0, ..., n - 1, among which are all that the rows see."""

    weights: Tensor  # A (g, rows, n) of the g query heads
    lse: Tensor  # (g, rows)
    seen: Tensor  # (rows, n) which keys some query head sees
    codes: Tensor  # (rows, n) the number of the level of r

    @property
    def share(self) -> Tensor:
        """1 / N_i for the keys that row i sees, in the type of the weights."""
        return self.seen.to(self.weights.dtype) / self.seen.sum(-1, keepdim=True).clamp_min(1)


def weigh_rows(
    q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None, counted: Tensor | None, scale: float, budget: Budget,
    features: int,
) -> list[RowBlock]:  # fmt: skip
    """Weigh the keys k (n_k, d) for the queries q (g, n_q, d), and count samples, by blocks of rows.

    visible, bias: (g or 1, n_q, n_k). counted: (n_q,), False for queries that do not change the counts of others.
    """
    places = row_blocks(q.shape[1], len(k))
    found, largest = [], None
    for (start, end, n), rows in zip(places, q.split([end - start for start, end, _ in places], dim=1), strict=True):
        scores = rows @ k[:n].mT * scale
        if bias is not None:
            scores = scores + bias[:, start:end, :n]
        shown = visible[:, start:end, :n]
        weights, lse = dense.softmax(scores.masked_fill(~shown, -torch.inf))
        received = weights.detach().amax(0)
        if counted is not None:
            received = received.masked_fill(~counted[start:end, None], 0.0)
        received = running_maximum(received, largest)
        largest, seen = received[-1], shown.any(0)
        codes = level_of(budget(received, seen.sum(-1)), features)
        found.append(RowBlock(weights, lse, seen, codes))
    return found


def cut_rows(weights: Tensor, lse: Tensor, seen: Tensor, counts: Tensor, features: int) -> list[RowBlock]:
    """Cut a head with known weights (g, n_q, n_k) and counts (n_q, n_k) into blocks."""
    codes = level_of(counts, features)
    return [
        RowBlock(weights[:, start:end, :n], lse[:, start:end], seen[start:end, :n], codes[start:end, :n])
        for start, end, n in row_blocks(*counts.shape)
    ]


def row_work(blocks: list[RowBlock], used: Tensor, features: int, *, estimator: str) -> dict[str, Tensor]:
    """Return the work of one head: counts, products and terms of `inspect()`. used: (levels, n_k)."""
    products, counts = 0, largest_counts(used, features)
    for block in blocks:
        products += block.codes.numel() * (len(present(block.codes)) if estimator not in ("drop", "mean") else 1)
    pairs = block_pairs(sum(len(block.seen) for block in blocks), used.shape[-1])
    by_mean, stratified = estimator == "mean", estimator == "stratified"
    return {
        "counts": counts,
        "padded_rate": counts.double().mean() / max(features, 1),
        "products": torch.tensor(products / pairs, dtype=torch.float64, device=used.device),
        "terms": torch.full_like(counts, features) if by_mean else row_terms(used, features, stratified),
    }


def row_facts(blocks: list[RowBlock], used: Tensor, x: Tensor, size: Tensor, *, estimator: str) -> dict[str, Tensor]:
    """Return what `inspect()` notes of one head, beyond its work.

    used: (levels, n_k). x: (n_k, d). size: |W|_F. estimator: that of the method.
    """
    d, by_mean = x.shape[-1], estimator == "mean"
    sizes = torch.tensor(levels(d), device=x.device)
    norms = x.norm(dim=-1)
    certificate, bound, valid = [], [], torch.zeros_like(used[0])
    for block in blocks:
        n = block.codes.shape[-1]
        counts = sizes[block.codes.long()]
        off = norms[:n]
        if by_mean:
            off = torch.cdist(block.share @ x[:n], x[:n], compute_mode="donot_use_mm_for_euclid_dist")
        off = off * counts.clamp_min(1).to(x.dtype).rsqrt() * (counts < d)
        certificate.append((block.weights * off).sum(-1) * size)
        bound.append((block.share * norms[:n]).sum(-1) * size)
        valid[:n] |= block.seen.any(0)
    counts = largest_counts(used, d)
    return {
        "lse": torch.cat([b.lse for b in blocks], -1),
        "rate": (counts * valid).sum().double() / (valid.sum().clamp_min(1) * max(d, 1)),
        "certificate": torch.cat(certificate, -1),
        "bound": torch.cat(bound),  # for an alpha of 1
    }


def stack_facts(heads: Iterable[dict[str, Tensor]], batch: int) -> dict[str, Tensor]:
    """Stack the facts of all heads of all batch items, one item after the other, as (B, H, ...)."""
    found = list(heads)
    return {name: torch.stack([f[name] for f in found]).unflatten(0, (batch, -1)) for name in found[0]}
