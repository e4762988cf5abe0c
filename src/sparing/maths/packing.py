"""Padded sequences with their valid tokens moved to the front, so that short items of a batch cost little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sparing.call import Call

Attend = Callable[[Tensor, Tensor, Tensor, Call], Tensor]


def place_of_rank(valid: Tensor) -> Tensor:
    """Return the position of the valid token of each rank, (B, n); the padded positions follow the last rank."""
    return (~valid).long().argsort(dim=-1, stable=True)


def valid_first(valid: Tensor | None, *tokens: Tensor) -> tuple[Tensor, ...]:
    """Return tokens (B, H, n, d) in the order of their ranks; as they are if all are valid (None)."""
    if valid is None:
        return tokens
    order = place_of_rank(valid)[:, None, :, None]
    return tuple(t.take_along_dim(order, dim=2) for t in tokens)


def pack(valid: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
    """Return the valid tokens in their order, cut to the width w of the longest item: (valid (B, w), tokens...)."""
    width = max(int(valid.sum(-1).max()), 1)
    order = place_of_rank(valid)[:, :width]
    return valid.gather(1, order), *(t.take_along_dim(order[:, None, :, None], dim=2) for t in tokens)


def attend_items(out: Tensor, items: Tensor, attend: Attend, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Replace the batch items `items` of `out` by what `attend` gives for them on their valid keys alone."""
    keep = call.mask.keep
    q, k, v = q[items], k[items], v[items]
    if keep is not None:
        keep, k, v = pack(keep[items], k, v)
    return out.index_copy(
        0, items, attend(q, k, v, replace(call.with_mask(keep=keep, influence=None), statistics=None))
    )
