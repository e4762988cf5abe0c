"""Infinite and NaN entries stay in the rows that may see them.

0 * NaN is NaN, so one bad entry behind a mask, in the future of a causal call or in a padded slot would spread through
any matrix product. Bad entries are taken out before a method runs, and the rows that legitimately see one are marked.
Queries and keys so large that their products overflow are shrunk, each as a whole: attention is saturated long before.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.call import Call
from sparing.method import Method, Projection


class Clean(NamedTuple):
    """Inputs without non-finite entries."""

    q: Tensor
    k: Tensor
    v: Tensor | Projection
    spoiled: Tensor | None  # boolean, broadcastable to (B, H, n_q, e): entries of the output that must be NaN


def quarantine(q: Tensor, k: Tensor, v: Tensor | Projection, method: Method, call: Call) -> Clean:
    """Zero the padded keys and values, take out non-finite entries, say which output entries they spoil."""
    payload = v.x if isinstance(v, Projection) else v  # (B, H_kv, n_k, e) or (B, n_k, in)
    if call.keep is not None:
        padded = ~call.keep
        k = k.masked_fill(padded[:, None, :, None], 0.0)
        payload = payload.masked_fill(padded.view(padded.shape[0], *[1] * (payload.ndim - 3), -1, 1), 0.0)
    spoiled = None
    limit = limit_of(q.dtype)
    if not all(_largest(t) <= limit for t in (q, k, payload)):
        bad_q, bad_k = ~q.isfinite().all(-1), ~k.isfinite().all(-1)
        bad_v = ~payload.isfinite()
        if any(bool(bad.any()) for bad in (bad_q, bad_k, bad_v)):
            spoiled = _spoiled(bad_q, bad_k, bad_v, method, call)
        q, k = (_shrink(t.masked_fill(bad.unsqueeze(-1), 0.0), limit) for t, bad in ((q, bad_q), (k, bad_k)))
        payload = payload.masked_fill(bad_v, 0.0)
    cleaned = v._replace(x=payload) if isinstance(v, Projection) else payload
    return Clean(q, k, cleaned, spoiled)


def is_tame(tensor: Tensor) -> bool:
    """Whether surely no entry is infinite, NaN or so large that it would be shrunk; cheap for few entries.

    16-bit types are computed in float32.
    """
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor, dtype=wide)) <= limit_of(wide)


def are_tame(q: Tensor, k: Tensor, v: Tensor, start: int) -> bool:
    """The same of q, and of k and v (B, H, n, .) from position `start` on."""
    return all(is_tame(x) for x in (q, k[:, :, start:], v[:, :, start:]))


@cache
def limit_of(dtype: torch.dtype) -> float:
    """The norm up to which everything is surely tame."""
    return torch.finfo(dtype).max ** 0.5 / 1e7  # products times a scale of up to 1e8 stay finite


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN if there is a NaN."""
    if not tensor.numel():
        return 0.0
    in_memory_order = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    low, high = torch.aminmax(in_memory_order)  # one pass; a norm of order infinity takes ten times longer
    return float(torch.maximum(high, -low))


def _shrink(rows: Tensor, limit: float) -> Tensor:
    """Rows with an entry beyond the limit, scaled down to it; the others as they are, to the bit."""
    largest = rows.detach().abs().amax(-1, keepdim=True)
    return rows * (limit / largest.clamp_min(limit))


def _spoiled(bad_q: Tensor, bad_k: Tensor, bad_v: Tensor, method: Method, call: Call) -> Tensor:
    """(B, H, n_q, e or 1): a bad query spoils its row, a bad key or value the rows that may look at it."""
    n_q, n_k = bad_q.shape[-1], bad_k.shape[-1]
    if bad_v.ndim == 3:  # hidden states of a Projection: every width of every head
        bad_v = bad_v.any(-1)[:, None, :, None]
    bad = (bad_v | bad_k.unsqueeze(-1)).repeat_interleave(call.groups, dim=1)  # (B, H, n_k, e)
    reach = method.reach(n_q, n_k, bad.device, call)
    if call.mask is None and reach is None:  # padded keys are zero, hence not bad
        last = torch.arange(n_q, device=bad.device).clamp_max(n_k - 1)
        seen = bad.cummax(-2).values[..., last, :] if call.is_causal else bad.any(-2, keepdim=True)
    else:
        visible = call.visible(n_q, n_k, bad.device)
        visible = reach if visible is None else visible if reach is None else visible & reach
        assert visible is not None
        seen = visible.expand(*bad.shape[:2], n_q, n_k).float() @ bad.float() > 0
    return seen | bad_q.unsqueeze(-1)
