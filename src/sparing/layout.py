"""Bring the shapes that `scaled_dot_product_attention` takes to [batch, heads, length, width], and results back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing.contract import Projection


class Layout(NamedTuple):
    """A call's tensors with four dimensions each."""

    query: Tensor
    key: Tensor
    value: Tensor | Projection
    attn_mask: Tensor | None
    leading: torch.Size | None  #: the result's sizes before length and width; None where nothing was changed
    flat: bool = False  #: packed sequences came as [total, heads, width]

    def restore(self, result: Tensor) -> Tensor:
        """Return a result that begins with [batch, heads] in the shape of the caller's tensors."""
        if self.flat:
            return result[0].transpose(0, 1)
        return result if self.leading is None else result.reshape((*self.leading, *result.shape[2:]))


def four_dimensional(
    query: Tensor, key: Tensor, value: Tensor | Projection, attn_mask: Tensor | None, enable_gqa: bool
) -> Layout:
    """Add, broadcast and flatten the dimensions before length and width; leave alone what the checks will refuse.

    Three dimensions are [batch, length, width] of one head, or [heads, length, width] if heads are shared. Of more than
    four, all before the heads are the batch. A width of 0 becomes one coordinate that is zero: all logits are 0, as in
    SDPA, and no method meets a vector without entries.
    """
    if _has_no_width(query) and _has_no_width(key):
        query, key = pad(query, (0, 1)), pad(key, (0, 1))
    unchanged = Layout(query, key, value, attn_mask, None)
    tensors = [t for t in (query, key, value) if isinstance(t, Tensor) and t.layout == torch.strided]
    if len(tensors) < 3 or any(t.is_nested or t.ndim < 2 for t in tensors):
        return unchanged
    q, k, v = tensors
    if enable_gqa and q.ndim > 2 and min(k.ndim, v.ndim) > 2 and k.shape[-3] != v.shape[-3]:
        if any(not t.shape[-3] or q.shape[-3] % t.shape[-3] for t in (k, v)):
            return unchanged
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        tensors, unchanged = [q, k, v], Layout(q, k, v, attn_mask, None)
    fixed = 1 if enable_gqa else 2  # leading dimensions that must agree as they are
    if q.ndim == k.ndim == v.ndim == 4 and q.shape[:fixed] == k.shape[:fixed] == v.shape[:fixed]:
        return unchanged
    most = max(t.ndim for t in tensors)
    kept = 3 if enable_gqa and most > 2 else 2  # dimensions that are not broadcast
    leading = [_padded(t.shape[:-2], most - 2) for t in tensors]
    try:
        shared = torch.broadcast_shapes(*(sizes[: most - kept] for sizes in leading))
    except RuntimeError:
        return unchanged
    q, k, v = (t.expand(*shared, *t.shape[-kept:]) for t in tensors)
    result = q.shape[:-2]
    if isinstance(attn_mask, Tensor) and attn_mask.ndim > 2 and most != 4:
        attn_mask = _flat_mask(attn_mask, result, enable_gqa)
    q, k, v = (_four(t, enable_gqa) for t in (q, k, v))
    return Layout(q, k, v, attn_mask, result)


def _has_no_width(t: Tensor) -> bool:
    """Return whether an argument is a dense tensor whose last size is 0."""
    return isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested and t.shape[-1:] == (0,)


def _padded(sizes: torch.Size, count: int) -> torch.Size:
    return torch.Size([1] * (count - len(sizes)) + list(sizes))


def _four(t: Tensor, enable_gqa: bool) -> Tensor:
    if t.ndim == 3:
        return t.unsqueeze(0 if enable_gqa else 1)
    return t[None, None] if t.ndim == 2 else t.flatten(0, -4)


def _flat_mask(mask: Tensor, leading: torch.Size, enable_gqa: bool) -> Tensor:
    """Return the mask of tensors with these leading dimensions, with four; unchanged if it does not fit them."""
    sizes = _padded(mask.shape[:-2], len(leading))
    if len(sizes) > len(leading) or any(have not in (1, want) for have, want in zip(sizes, leading, strict=True)):
        return mask
    if len(leading) == 1:
        return mask.unsqueeze(0 if enable_gqa else 1)
    mask = mask.reshape(*sizes, *mask.shape[-2:])
    if any(size != 1 for size in sizes[:-1]):
        mask = mask.expand(*leading[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)
