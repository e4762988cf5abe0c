"""Wrappers of the kernels of `skip`: attention that leaves out the values of keys of small weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type

_RETURNS = "-> (Tensor out, Tensor lse, Tensor left, Tensor touched)"
schemas.define(
    "skip(Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? leading, Tensor? offsets, float threshold, int stride,"
    f" float scale, bool causal) {_RETURNS}"
)
schemas.define(
    f"skip_step(Tensor q, Tensor k, Tensor v, Tensor? keep, float threshold, int stride, float scale) {_RETURNS}"
)


def skip(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    leading: Tensor | None,
    offsets: Tensor | None,
    threshold: float,
    stride: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, ...]:
    """Return output (B, H, n_q, e), log-sum-exp, share of the weight left out, and values used, each (B, H, n_q).

    q, k and v may each have 16 bits; everything returned is then float32. k and v have H_kv heads.
    keep: (B, n_k), False for padded keys. leading: (B, n_q), True for queries that are grouped apart from the others.
    offsets: (S + 1,) int64 of packed sequences, for a batch of 1. There is no gradient.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep, leading = (None if x is None else x.contiguous() for x in (keep, leading))
    return torch.ops.sparing.skip(q, k, v, keep, leading, offsets, threshold, stride, scale, causal)


@torch.library.register_fake("sparing::skip", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    kind = wide_type(q)
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=kind), *(q.new_empty(q.shape[:3], dtype=kind) for _ in range(3))


def skip_step(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, threshold: float, stride: int, scale: float
) -> tuple[Tensor, ...]:
    """Return the same for the last n_q positions of a sequence, each for itself: no query reads for another.

    k, v: (B, H_kv, n, .), of the type of q, which may have 16 bits. keep: (B, n). Rows of padding give zeros.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    return torch.ops.sparing.skip_step(q, k, v, keep, threshold, stride, scale)


@torch.library.register_fake("sparing::skip_step", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    kind = wide_type(q)
    return q.new_empty(*q.shape[:3], v.shape[3]), *(q.new_empty(q.shape[:3], dtype=kind) for _ in range(3))
