"""Wrappers of the kernels of `monte_carlo`: sampled projections of values, and attention that sets sample counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.methods.monte_carlo.kept import Tables, tables_of
from sparing.methods.monte_carlo.sampling import Lists
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type

_STARTS, _PARTS = 4097, 16  # as in csrc/monte_carlo

schemas.define(
    "received(Tensor q, Tensor k, Tensor? keep, Tensor? counted, float scale) -> (Tensor largest, Tensor lse)"
)
schemas.define(
    "sampled_projection(Tensor x, Tensor weight, Tensor? bias, Tensor counts, Tensor ranks, Tensor streams, int seed,"
    " int purpose, bool shared, bool stratified, Tensor? rows=None, Tensor? inverse=None, Tensor? ladder=None,"
    " Tensor? starts=None) -> Tensor"
)
schemas.define(
    "projection_tables(Tensor weight, int heads) -> (Tensor rows, Tensor inverse, Tensor ladder, Tensor starts)"
)
schemas.define("weight_fingerprint(Tensor weight) -> Tensor")


def received(q: Tensor, k: Tensor, keep: Tensor | None, counted: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the largest softmax weight that any query gives to each key (B, H, n_k), and the log-sum-exp (B, H, n_q).

    keep: (B, n_k), False for padded keys, which receive nothing. counted: (B, n_q), False for queries whose weights do
    not count. q and k may have 16 bits, with results in float32. There is no gradient.
    """
    q, k = contiguous_rows(q), contiguous_rows(k)
    keep, counted = (None if mask is None else mask.contiguous() for mask in (keep, counted))
    return torch.ops.sparing.received(q, k, keep, counted, scale)


@torch.library.register_fake("sparing::received", lib=schemas)
def _(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    wide = wide_type(q)
    return q.new_empty(k.shape[:3], dtype=wide), q.new_empty(q.shape[:3], dtype=wide)


def sampled_projection(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, lists: Lists, *, keep: bool = True
) -> Tensor:
    """Compute x W + b of every head (B, H, n, e), from `counts` sampled features of each token; exact where it is d.

    x (B, n, d), weight (H e, d) and bias (H e) as in `nn.Linear`; counts (B, H, n). The samples are those of
    `draw_features`. x, weight and bias may have 16 bits, with a result in float32. There is no gradient.

    keep: whether to keep with the weight what depends on it alone (`kept.py`).
    """
    tensors = (x, weight, counts, lists.ranks, lists.draws.streams)
    x, weight, counts, ranks, streams = (t.contiguous() for t in tensors)
    bias = None if bias is None else bias.to(wide_type(x)).contiguous()
    tables = tables_of(weight, counts.shape[1]) if keep else ()
    return torch.ops.sparing.sampled_projection(
        x, weight, bias, counts, ranks, streams, lists.draws.signed_seed, lists.checksum, lists.shared,
        lists.stratified, *tables,
    )  # fmt: skip


@torch.library.register_fake("sparing::sampled_projection", lib=schemas)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, *others: Any) -> Tensor:
    return x.new_empty(*counts.shape, weight.shape[0] // counts.shape[1], dtype=wide_type(x))


@torch.library.register_fake("sparing::projection_tables", lib=schemas)
def _(weight: Tensor, heads: int) -> Tables:
    size, features = torch.library.get_ctx().new_dynamic_size(), weight.shape[1]  # rows are padded by instruction set
    wide = wide_type(weight)
    return Tables(
        weight.new_empty(heads, size, dtype=wide), weight.new_empty(heads, features, dtype=wide),
        weight.new_empty(heads, features, dtype=torch.float64), weight.new_empty(heads, _STARTS, dtype=torch.int32),
    )  # fmt: skip


@torch.library.register_fake("sparing::weight_fingerprint", lib=schemas)
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(_PARTS, dtype=torch.int64)
