"""Learned state that some methods have: `sparing.nn` owns it, `attention(state=...)` receives it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparing.call import Call


class DepthwiseConvolution(nn.Module):
    """The residual of Nystromformer and YOSO: each head filters its values along the sequence, (B, H, n, e) -> same."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 1, size, 1))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, v: Tensor) -> Tensor:
        weight = self.weight.to(v.dtype)
        return nn.functional.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])


def convolution_of(call: Call, method: str, size: int) -> DepthwiseConvolution:
    """The convolution that a module passed along; an error names the way out when there is none."""
    if not isinstance(call.state, DepthwiseConvolution):
        raise ValueError(
            f"{method}: convolution={size} has learned weights, and this call passed no state; use it through "
            "sparing.nn.MultiheadAttention, or pass state=method.learned(...)"
        )
    return call.state
