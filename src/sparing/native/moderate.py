"""Find entries that are not finite, or so large that products could overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows

schemas.define("are_moderate(Tensor q, Tensor k, Tensor v, int start, float limit) -> bool")


def are_moderate(q: Tensor, k: Tensor, v: Tensor, start: int, limit: float) -> bool:
    """Return whether no entry of q, or of k and v from position `start` on, is NaN or exceeds the limit in magnitude.

    q, k, v: (B, H, n, .), of one type, which may have 16 bits.
    """
    return torch.ops.sparing.are_moderate(*map(contiguous_rows, (q, k, v)), start, limit)


@torch.library.register_fake("sparing::are_moderate", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, start: int, limit: float) -> bool:
    raise RuntimeError("sparing::are_moderate depends on the entries, which a fake tensor does not have")
