"""Matrix products that sum over many tokens, in runs that are summed apart.

A matrix product in float32 may add all terms to one running sum, which loses three digits over 10^5 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 128  #: tokens that one matrix product sums over


def sum_products(x: Tensor, y: Tensor) -> Tensor:
    """Return x^T y, (..., n, F) and (..., n, e) -> (..., F, e)."""
    whole = x.shape[-2] // RUN * RUN
    runs = (x[..., :whole, :].unflatten(-2, (-1, RUN)).mT @ y[..., :whole, :].unflatten(-2, (-1, RUN))).sum(-3)
    return runs + x[..., whole:, :].mT @ y[..., whole:, :]


def rows_times(x: Tensor, table: Tensor) -> Tensor:
    """Return x table, (..., n, F) and (..., F, e) -> (..., n, e), with the table's gradient summed the same way."""
    whole = x.shape[-2] // RUN * RUN
    runs = (x[..., :whole, :].unflatten(-2, (-1, RUN)) @ table.unsqueeze(-3)).flatten(-3, -2)
    return torch.cat([runs, x[..., whole:, :] @ table], dim=-2)
