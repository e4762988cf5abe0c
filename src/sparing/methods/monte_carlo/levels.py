"""Sample counts that differ by query: a few versions of every value, and the product of weights with them.

out_i = sum_l sum_j A_ij [r_ij = l] H_j^(l)

Counts are rounded up to one of a few levels l, so that few versions H^(l) of the values exist. Queries are taken in
blocks of rows. What a row gets depends, to the bit, on nothing that comes after it: every matrix product has a size
that the shape of the call alone decides, and what only later rows need enters earlier ones as an exact zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.methods.monte_carlo.sampling import Lists, feature_law, ragged_product
from sparing.native.derivatives import once_differentiable

_ROWS = 128  # queries per block
_TOKENS = 16  # tokens that are projected at once


def levels(features: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and `features`."""
    return [0, *(2**i for i in range(max(features - 1, 0).bit_length())), features][: None if features else 1]


def level_of(counts: Tensor, features: int) -> Tensor:
    """Return the number of the first level that holds each count, 0 <= r <= features."""
    return torch.bucketize(counts, torch.tensor(levels(features), device=counts.device)).to(torch.uint8)


def row_blocks(n_q: int, n_k: int) -> list[tuple[int, int, int]]:
    """Return (first row, row after the last, keys that the rows of a causal call can see) for each block."""
    ends = [(start, min(start + _ROWS, n_q)) for start in range(0, n_q, _ROWS)]
    return [(start, end, min(end, n_k)) for start, end in ends]


def block_pairs(n_q: int, n_k: int) -> int:
    """Count the pairs of queries and keys that the blocks hold."""
    return sum((end - start) * keys for start, end, keys in row_blocks(n_q, n_k))


def running_maximum(received: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the largest of the rows up to each row (..., rows, n), and of `before` (..., fewer than n)."""
    if before is not None:
        first = torch.nn.functional.pad(before, (0, received.shape[-1] - before.shape[-1]))
        received = torch.cat([first.unsqueeze(-2), received], dim=-2)
    return received.cummax(-2).values[..., before is not None :, :]


def present(codes: Tensor) -> list[int]:
    """Return the numbers of the levels above zero in a block of rows; one product is run for each."""
    return [level for level in codes.unique().tolist() if level]


def used_levels(blocks: list[Tensor], n_k: int, features: int) -> Tensor:
    """Return which levels some row asks for (levels, n_k), from the level numbers of all blocks of rows."""
    used = torch.zeros(len(levels(features)), n_k, dtype=torch.bool, device=blocks[0].device)
    for codes in blocks:
        keys = torch.arange(codes.shape[-1], device=codes.device)
        used[codes.long(), keys.expand_as(codes)] = True
    return used


def largest_counts(used: Tensor, features: int) -> Tensor:
    """Return the largest level that some row asks for (n_k,), from used (levels, n_k)."""
    return (torch.tensor(levels(features), device=used.device)[:, None] * used).amax(0)


def samples(used: Tensor, features: int, stratified: bool) -> tuple[Tensor, Tensor]:
    """Count draws for each level but the first and the last (levels - 2, n), and draws to skip in a list (levels - 2,).

    Strata belong to a level, and only levels that are used draw any. Without strata a level continues the list of the
    one below, as far as the largest that is used.
    """
    sizes = torch.tensor(levels(features)[1:-1], dtype=torch.long, device=used.device)
    drawn = used[1:-1]
    if stratified:
        return drawn * sizes[:, None], torch.zeros_like(sizes)
    below = torch.nn.functional.pad(sizes, (1, 0))[:-1]
    return drawn.flip(0).cummax(0).values.flip(0) * (sizes - below)[:, None], below


def row_terms(used: Tensor, features: int, stratified: bool) -> Tensor:
    """Count the rows of W that are added up for the versions of each token (n,)."""
    projected = torch.cat([part.any().expand(len(part)) for part in used[-1].split(_TOKENS)])
    return samples(used, features, stratified)[0].sum(0) + features * projected


def project_blocks(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Compute x w (n, e) for the tokens `chosen` (n,), in fixed groups, so that no row depends on other choices."""
    parts = zip(x.split(_TOKENS), chosen.split(_TOKENS), strict=True)
    return torch.cat([part @ w if bool(some.any()) else part.new_zeros(len(part), w.shape[-1]) for part, some in parts])


def versions(x: Tensor, w: Tensor, used: Tensor, lists: Lists) -> Tensor:
    """Return H at every level that is used: x (n, d), w (d, e), used (levels, n) -> (levels, n, e).

    lists: those of one head, with ranks (n,).

    The first level is zero and the last the product itself. Lists of samples are those of `draw_features`: without
    strata, a level holds the first samples of the same list.
    """
    d, many = x.shape[-1], len(used) - 2
    parts = [x.new_zeros(1, len(x), w.shape[-1])][: many + 1]
    if many > 0:
        counts, skip = samples(used, d, lists.stratified)
        streams = Draws(lists.draws.seed, lists.draws.streams.expand(many))
        by_level = replace(lists, ranks=lists.ranks.expand(1, many, -1), draws=streams)
        law = feature_law(w).expand(many, d)
        drawn = ragged_product(x[None], w.expand(many, -1, -1), law, counts[None], by_level, skip)[0]
        if not lists.stratified:
            sizes = torch.tensor(levels(d)[1:-1], dtype=x.dtype, device=x.device).view(-1, 1, 1)
            drawn = (drawn * counts.unsqueeze(-1)).cumsum(0) / sizes
        parts.append(drawn)
    return torch.cat([*parts, project_blocks(x, w, used[-1])[None]])


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Compute weights @ values; a value that overflowed spoils only the rows that use it: 0 * inf would be NaN."""
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return weights @ values
    hit = (weights != 0).to(values.dtype) @ bad.to(values.dtype) > 0
    return (weights @ values.masked_fill(bad, 0.0)).masked_fill(hit, torch.nan)


def weigh_versions(weights: Tensor, table: Tensor, codes: Tensor) -> Tensor:
    """Return sum_j A_ij H_j at row i's level: A (g, rows, n), H (levels, n, e), codes (rows, n) -> (g, rows, e)."""
    out: Tensor = _WeighVersions.apply(weights, table, codes)
    return out


class _WeighVersions(torch.autograd.Function):
    """`weigh_versions` with the weights saved once for the backward pass; plain autograd would save them per level."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, table: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(weights, table, codes)
        out = weights.new_zeros(*weights.shape[:-1], table.shape[-1])
        for level in present(codes):
            out += weigh(weights * (codes == level), table[level])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, table, codes = ctx.saved_tensors
        by_weights, by_table = torch.zeros_like(weights), torch.zeros_like(table)
        for level in present(codes):
            here = (codes == level) & (weights != 0)  # a value that overflowed concerns no other pair
            by_weights += torch.where(here, grad @ table[level].mT, 0.0)
            by_table[level] = ((weights * here).mT @ grad).sum(0)
        return by_weights, by_table, None
