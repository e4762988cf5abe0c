"""Means over runs of consecutive valid tokens."""

from __future__ import annotations

from torch import Tensor


def segment_means(x: Tensor, ranks: Tensor, count: Tensor, valid: Tensor | None, segments: int) -> Tensor:
    """Average x (B, H, n, d) over runs of valid tokens; run i holds ranks floor(i N/m) to floor((i+1) N/m) - 1."""
    segment = ((ranks + 1) * segments - 1) // count.clamp_min(1)[:, None]  # (B or 1, n)
    segment = segment.expand(x.shape[0], -1)
    weight = x.new_ones(x.shape[0], x.shape[2]) if valid is None else valid.to(x.dtype)
    index = segment[:, None, :, None].expand(x.shape)
    sums = x.new_zeros(*x.shape[:2], segments, x.shape[3]).scatter_add(2, index, x * weight[:, None, :, None])
    sizes = x.new_zeros(x.shape[0], segments).scatter_add(1, segment, weight)
    return sums / sizes.clamp_min(1)[:, None, :, None]
