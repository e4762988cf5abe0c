"""Compute A H by exact attention, for values that are known before the weights are."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import method
from sparing.methods.exact import Exact


def attend(q: Tensor, k: Tensor, values: Tensor, call: Call) -> Tensor:
    """Multiply A by the values of the key-value heads, as exact attention does."""
    if q.dtype != values.dtype:  # 16 bits, which only the kernel reads beside wider values
        return Exact().by_kernel(q, k[:, :: call.groups], values, call)
    exact, values = method("exact"), values.repeat_interleave(call.groups, dim=1)
    out = exact.native(q, k, values, call)
    return exact.fast(q, k, values, call) if out is None else out


def attend_finite(q: Tensor, k: Tensor, values: Tensor, call: Call) -> Tensor:
    """Run `attend` so that a value that overflowed spoils only the rows that use it: 0 * inf would be NaN."""
    bad = ~values.detach().isfinite()
    if not bool(bad.any()):
        return attend(q, k, values, call)
    hit = attend(q.detach(), k.detach(), bad.to(values.dtype), call) != 0
    return attend(q, k, values.masked_fill(bad, 0.0), call).masked_fill(hit, torch.nan)
