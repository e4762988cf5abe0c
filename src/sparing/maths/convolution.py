"""The learned convolution of Nystromformer and YOSO: `sparing.nn` owns it, `attention(state=...)` receives it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from sparing.call import Call
from sparing.contract import Supports


class DepthwiseConvolution(nn.Module):
    """Filter the values of each head along the sequence, (B, H, n, e) -> same, as Nystromformer and YOSO do."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 1, size, 1))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, v: Tensor) -> Tensor:
        weight = self.weight.to(v.dtype)
        return nn.functional.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])


# The functions below are for methods with a field `convolution`, the width of the filters; None for no convolution.


def check_width(method: str, size: int | None) -> None:
    """Refuse an even width."""
    if size is not None and size % 2 == 0:
        raise ValueError(f"{method}: convolution={size} must be odd, so that the output is not shifted")


def beside_convolution(supports: Supports, size: int | None) -> Supports:
    """Return what a method supports beside a convolution, which sees later tokens and needs n_q = n_k."""
    if size is None:
        return supports
    return replace(supports, causal=False, cross_attention=False, position_based=True, native_16bit=False)


def learned_convolution(heads: int, size: int | None) -> DepthwiseConvolution | None:
    """Return the state that `Method.learned` returns."""
    return None if size is None else DepthwiseConvolution(heads, size)


def add_convolution(out: Tensor, v: Tensor, call: Call, method: str, size: int | None) -> Tensor:
    """Add the filtered values to the output."""
    return out if size is None else out + convolution_of(call, method, size, v.shape[1])(v)


def convolution_of(call: Call, method: str, size: int, heads: int) -> DepthwiseConvolution:
    """Return the convolution that a module passed; raise with the way out if there is none, or another one."""
    if not isinstance(call.state, DepthwiseConvolution):
        raise ValueError(
            f"{method}: convolution={size} has learned weights, and this call passed no state; use it through "
            "sparing.nn.MultiheadAttention, or pass state=method.learned(...)"
        )
    have_heads, _, have_size, _ = call.state.weight.shape
    if (have_heads, have_size) != (heads, size):
        raise ValueError(
            f"{method}: state has {have_heads} heads and convolution={have_size}, but the call has {heads} heads and "
            f"convolution={size}; pass state=method.learned({heads}, ...)"
        )
    return call.state
