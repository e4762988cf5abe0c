"""Unit vectors whose products are those of vectors of any length: the lift of Neyshabur and Srebro (2015).

    q' = [q / sqrt(t), sqrt(1 - |q|^2 / t), 0],   k' = [k / sqrt(t), 0, sqrt(1 - |k|^2 / t)],   <q', k'> = <q, k> / t

The temperature t bounds the squared length of all queries and keys (Zeng et al. 2021, remark 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.call import Call
from sparing.native.tensors import wide_type

_LONGEST = 1 - 2.0**-20  # squared length of q / sqrt(t): the derivative of the added entry is infinite at 1


def lifted(q: Tensor, k: Tensor, temperature: float | None, call: Call) -> tuple[Tensor, Tensor]:
    """Return unit vectors (B, H, n, d + 2) with the products of q and k, divided by the temperature.

    temperature: t. A vector longer than sqrt(t) is shortened to it. None takes the largest squared length of each
        sequence and head, of keys that are not padding and queries that may influence other rows.
    """
    dtype = wide_type(q)
    q, k = q.double(), k.double()
    if temperature is None:
        longest = torch.maximum(_longest(q, call.mask.influence), _longest(k, call.mask.keep))
        root = longest.masked_fill(longest == 0, 1.0) / (_LONGEST - 2.0**-40) ** 0.5  # so that rounding shortens none
    else:
        root = q.new_full((1, 1, 1, 1), temperature**0.5)
    call.note(temperature=root.square().flatten(1).expand(*q.shape[:2]))
    return _lift(q / root, place=0).to(dtype), _lift(k / root, place=1).to(dtype)


def _longest(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the largest length of the valid rows, (B, H, 1, 1)."""
    x = x if valid is None else x.masked_fill(~valid[:, None, :, None], 0.0)
    top = x.detach().abs().amax((-2, -1), keepdim=True)
    nothing = top == 0
    top = top.masked_fill(nothing, 1.0)  # squares of huge or tiny entries would be out of range
    size = (x / top).square().sum(-1, keepdim=True).amax(-2, keepdim=True)
    return (size.masked_fill(nothing, 1.0).sqrt() * top).masked_fill(nothing, 0.0)


def _lift(x: Tensor, place: int) -> Tensor:
    """Add an entry that makes the length 1, and a zero where the other side has its own."""
    size = x.square().sum(-1, keepdim=True)
    x = x * (_LONGEST / size.clamp_min(_LONGEST)).sqrt()
    rest = (1 - x.square().sum(-1, keepdim=True)).clamp_min(1 - _LONGEST).sqrt()
    added = [rest, torch.zeros_like(rest)]
    return torch.cat([x, added[place], added[1 - place]], dim=-1)
