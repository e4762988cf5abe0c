"""Wrapper of the kernel of `top_keys`: softmax over the keys of largest score of each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type

schemas.define(
    "top_keys(Tensor q, Tensor k, Tensor v, Tensor? keep, int keys, bool causal, float scale, bool with_all)"
    " -> (Tensor out, Tensor lse, Tensor all_lse)"
)


def top_keys(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, keys: int, causal: bool, scale: float, with_all: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H, n_q, e), log-sum-exp over the chosen keys (B, H, n_q), and over all visible keys.

    The last is empty, (B, H, 0), unless asked for by `with_all`. keep: (B, n_k), False for padded keys. There is no
    gradient. q, k and v may have 16 bits; the results are then float32.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    return torch.ops.sparing.top_keys(q, k, v, keep, keys, causal, scale, with_all)


@torch.library.register_fake("sparing::top_keys", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, n_q, _ = q.shape
    shapes = (batch, heads, n_q, v.shape[3]), (batch, heads, n_q), (batch, heads, n_q if others[-1] else 0)
    out, lse, all_lse = (q.new_empty(shape, dtype=wide_type(q)) for shape in shapes)
    return out, lse, all_lse
