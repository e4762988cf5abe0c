"""Masks and position biases, put together."""

from __future__ import annotations

import torch
from torch import Tensor


def hidden(mask: Tensor) -> Tensor:
    """Where a mask, boolean or additive, hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A bias with the keys hidden that the mask hides; in 16 bits their sum may rise above the lowest number."""
    if mask is None:
        return bias
    total = bias if mask.dtype == torch.bool else bias + mask
    return total.masked_fill(hidden(mask), -torch.inf)
