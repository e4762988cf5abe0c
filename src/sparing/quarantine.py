"""Keep non-finite and extreme entries in the rows that may see them.

0 * NaN is NaN, so one bad entry behind a mask, in the future of a causal call or in a padded slot would spread through
any matrix product. Bad entries are taken out before a method runs, and the rows that legitimately see one become NaN.
Entries so large that a product could overflow in float32 are taken out as well; the rows that see one are computed
from all entries in float64, whose range holds every product of float32 numbers. A row that sees none of them is
computed as if they were not there, to the bit.

In float64 there is no wider type. Softmax sees scale * query.key alone, so methods that stand for it get large queries
and small keys, or the reverse, at sizes that meet in the middle; products that overflow even so are refused.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparing import native
from sparing.call import Call
from sparing.contract import Method, Projection
from sparing.native import moderate
from sparing.native.tensors import wide_type, widened

LARGEST_SCALE = 1e8  #: largest scale of float32 calls; calls with a larger one are computed in float64


class Wide(NamedTuple):
    """The call in float64, for rows that see an extreme entry."""

    q: Tensor
    k: Tensor
    v: Tensor | Projection
    rows: Tensor  # boolean, broadcastable to (B, H, n_q, e): entries of the output that come from this call


class Clean(NamedTuple):
    """Inputs without non-finite and extreme entries."""

    q: Tensor
    k: Tensor
    v: Tensor | Projection
    call: Call  # its mask holds no NaN
    spoiled: Tensor | None  # boolean, broadcastable to (B, H, n_q, e): entries of the output that must be NaN
    wide: Wide | None


def quarantine(
    q: Tensor, k: Tensor, v: Tensor | Projection, method: Method, call: Call, *, balance: bool = True
) -> Clean:
    """Zero padded keys and values, take out non-finite and extreme entries, and find the output entries that see them.

    q, k, v: tensors of 16 bits are returned as such if nothing has to be taken out, else in float32.
    balance: whether float64 queries and keys may be rescaled so that their products stay the same.
    """
    payload = v.x if isinstance(v, Projection) else v  # (B, H_kv, n_k, e) or (B, n_k, in)
    if call.mask.keep is not None:
        padded = ~call.mask.keep
        k = k.masked_fill(padded[:, None, :, None], 0.0)
        payload = payload.masked_fill(padded.view(padded.shape[0], *[1] * (payload.ndim - 3), -1, 1), 0.0)
    spoiled, wide = None, None
    if call.mask.bias is not None:
        call, spoiled = _without_nan(call, q.shape[-2], k.shape[-2])
    limit = limit_of(wide_type(q), call.scale)
    if not all(_largest(t) <= limit for t in (q, k, payload)):
        q, k, payload = (widened(t) for t in (q, k, payload))
        bad_q, bad_k = ~q.isfinite().all(-1), ~k.isfinite().all(-1)
        bad_v = ~payload.isfinite()
        q, k = (t.masked_fill(bad.unsqueeze(-1), 0.0) for t, bad in ((q, bad_q), (k, bad_k)))
        if q.dtype == torch.float64:
            if balance and method.supports.training_free:
                q, k = _balanced(q, k, limit, call)
            if call.mask.influence is not None:  # padded queries, which no other row may depend on
                far = _extreme(q, limit) & ~call.mask.influence[:, None]
                bad_q, q = bad_q | far, q.masked_fill(far.unsqueeze(-1), 0.0)
            _refuse_extreme(q, k, limit, call.scale)
        if any(bool(bad.any()) for bad in (bad_q, bad_k, bad_v)):
            reach = method.reach(q.shape[-2], k.shape[-2], q.device, call)
            seen = _rows_that_see(bad_q, bad_k, bad_v, reach, call)
            spoiled = seen if spoiled is None else spoiled | seen
        payload = payload.masked_fill(bad_v, 0.0)
        if q.dtype != torch.float64:
            q, k, payload, wide = _split(q, k, payload, v, limit, method, call)
    return Clean(q, k, _with_payload(v, payload), call, spoiled, wide)


def _split(
    q: Tensor, k: Tensor, payload: Tensor, v: Tensor | Projection, limit: float, method: Method, call: Call
) -> tuple[Tensor, Tensor, Tensor, Wide | None]:
    """Return (q, k, payload) without extreme entries, and the rows that see one."""
    far_q, far_k = (_extreme(t, limit) for t in (q, k))
    far_v = payload.abs() > limit
    if not any(bool(far.any()) for far in (far_q, far_k, far_v)):
        return q, k, payload, None
    rows = _rows_that_see(far_q, far_k, far_v, None, call)
    if method.supports.mixes_queries:
        mixed = far_q if call.mask.influence is None else far_q & call.mask.influence[:, None]
        mixed = mixed.cummax(-1).values if call.mask.causal else mixed.any(-1, keepdim=True)
        rows = rows | mixed.unsqueeze(-1)
    full = _with_payload(v, payload)
    wide_v = full.map(Tensor.double) if isinstance(full, Projection) else full.double()
    wide = Wide(q.double(), k.double(), wide_v, rows)
    q, k = (t.masked_fill(far.unsqueeze(-1), 0.0) for t, far in ((q, far_q), (k, far_k)))
    return q, k, payload.masked_fill(far_v, 0.0), wide


def _with_payload(v: Tensor | Projection, payload: Tensor) -> Tensor | Projection:
    return v._replace(x=payload) if isinstance(v, Projection) else payload


def _without_nan(call: Call, n_q: int, n_k: int) -> tuple[Call, Tensor | None]:
    """Return the call with zeros for NaN and +inf in its additive mask, and the rows that see one (B, H, n_q, 1)."""
    mask = call.mask.bias
    assert mask is not None
    if mask.numel() == 0 or float(mask.detach().amax()) < math.inf:  # amax returns NaN if there is one
        return call, None
    bad = mask.isnan() | (mask == math.inf)
    visible = call.mask.visible(n_q, n_k, mask.device)
    assert visible is not None
    return call.with_mask(pattern=mask.masked_fill(bad, 0.0)), (visible & bad).any(-1, keepdim=True)


def _extreme(rows: Tensor, limit: float) -> Tensor:
    """Return which rows hold an entry beyond the limit."""
    return rows.detach().abs().amax(-1) > limit


def _balanced(q: Tensor, k: Tensor, limit: float, call: Call) -> tuple[Tensor, Tensor]:
    """Return q and k with one scaled down and the other up where an entry is too large; refuse products that overflow.

    Each key head is multiplied by a power of two and its queries are divided by it, so no product changes by a bit.
    """
    heard = (
        q.detach()
        if call.mask.influence is None
        else q.detach().masked_fill(~call.mask.influence[:, None, :, None], 0.0)
    )
    size_q = heard.abs().amax((-2, -1)).unflatten(1, (-1, call.groups)).amax(-1)  # (B, H_kv)
    size_k = k.detach().abs().amax((-2, -1))
    tiny = torch.finfo(q.dtype).tiny
    exponents = [size.clamp_min(tiny).frexp().exponent for size in (size_q, size_k)]
    half = ((exponents[0] - exponents[1]) // 2).clamp(-1000, 1000)  # 2^half and its inverse are finite
    factor = torch.exp2(half.to(q.dtype)).masked_fill(torch.maximum(size_q, size_k) <= limit, 1.0)
    beyond = torch.maximum(size_q / factor, size_k * factor) > limit
    if bool(beyond.any()):
        largest_q, largest_k = (float(size[beyond][0]) for size in (size_q, size_k))
        raise ValueError(
            f"query holds entries of up to {largest_q:.3g} and key entries of up to {largest_k:.3g}, and with "
            f"scale={call.scale:.3g} their products overflow float64; scale query or key down (only scale * query.key "
            "matters to softmax)"
        )
    return q / factor.repeat_interleave(call.groups, dim=1)[..., None, None], k * factor[..., None, None]


def _refuse_extreme(q: Tensor, k: Tensor, limit: float, scale: float) -> None:
    for name, t in (("query", q), ("key", k)):
        largest = _largest(t)
        if largest > limit:
            raise ValueError(
                f"{name} holds entries of up to {largest:.3g}, and with scale={scale:.3g} products of entries beyond "
                f"{limit:.3g} overflow float64; scale {name} down"
            )


def is_moderate(tensor: Tensor) -> bool:
    """Return whether the entries are surely finite, and too small for a product to overflow; cheap for few entries.

    16-bit types are computed in float32.
    """
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor, dtype=wide)) <= limit_of(wide)


def are_moderate(q: Tensor, k: Tensor, v: Tensor, start: int) -> bool:
    """Return whether q, and k and v (B, H, n, .) from position `start` on, are moderate."""
    if native.ready(q, half=True):
        return moderate.are_moderate(q, k, v, start, limit_of(wide_type(q)))
    return all(is_moderate(x) for x in (q, k[:, :, start:], v[:, :, start:]))


@lru_cache(maxsize=64)
def limit_of(dtype: torch.dtype, scale: float = LARGEST_SCALE) -> float:
    """Return the size of entries up to which sums of a million products, times the scale, are finite."""
    return (torch.finfo(dtype).max / max(abs(scale), LARGEST_SCALE) / 1e6) ** 0.5


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude; NaN if there is a NaN."""
    if not tensor.numel():
        return 0.0
    in_memory_order = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    low, high = torch.aminmax(in_memory_order)  # one pass; a norm of order infinity takes ten times longer
    return float(torch.maximum(high, -low))


def _rows_that_see(bad_q: Tensor, bad_k: Tensor, bad_v: Tensor, reach: Tensor | None, call: Call) -> Tensor:
    """Return the output entries (B, H, n_q, e or 1) that see a marked entry.

    A marked query is seen by its own row, a marked key or value by the rows that may look at it.

    reach: the keys that the method lets a query use (`Method.reach`); None for all that the call shows to it.
    """
    n_q, n_k = bad_q.shape[-1], bad_k.shape[-1]
    if bad_v.ndim == 3:  # hidden states of a Projection, which reach every column of every head
        bad_v = bad_v.any(-1)[:, None, :, None]
    bad = (bad_v | bad_k.unsqueeze(-1)).repeat_interleave(call.groups, dim=1)  # (B, H, n_k, e)
    if call.mask.pattern is None and call.mask.offsets is None and reach is None:  # padded keys are zero, hence not bad
        last = torch.arange(n_q, device=bad.device).clamp_max(n_k - 1)
        seen = bad.cummax(-2).values[..., last, :] if call.mask.causal else bad.any(-2, keepdim=True)
    else:
        visible = call.mask.visible(n_q, n_k, bad.device)
        visible = reach if visible is None else visible if reach is None else visible & reach
        assert visible is not None
        seen = visible.expand(*bad.shape[:2], n_q, n_k).float() @ bad.float() > 0
    return seen | bad_q.unsqueeze(-1)
