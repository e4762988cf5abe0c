"""Dense logits, a block of queries at a time, so that memory stays bounded on long sequences."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Shape

_PAIRS = 2**22  # logits held at a time


def blocks(q: Tensor, k: Tensor, call: Call) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, visible, logits) for successive queries; both (B, H, rows, n_k), logits -inf where hidden."""
    full = (*q.shape[:-1], k.shape[-2])
    visible = call.mask.visible(full[2], full[3], q.device)
    visible = (torch.ones((), dtype=torch.bool, device=q.device) if visible is None else visible).expand(full)
    bias = None if call.mask.bias is None else call.mask.bias.to(q.dtype).expand(full)
    step = max(1, _PAIRS // (full[0] * full[1] * full[3]))
    for rows in (slice(start, start + step) for start in range(0, full[2], step)):
        scores = q[:, :, rows] @ k.mT * call.scale
        if bias is not None:
            scores = scores + bias[:, :, rows]
        yield rows, visible[:, :, rows], scores.masked_fill(~visible[:, :, rows], -torch.inf)


def pairs_held(shape: Shape) -> float:
    """Count query-key pairs in memory at a time, for the cost of a method that uses `blocks`."""
    row = shape.batch * shape.heads * shape.keys
    return float(min(row * shape.queries, max(row, _PAIRS)))
