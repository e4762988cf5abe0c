"""Dense softmax attention in float64, and how far a result in another type may be from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparing
from sparing.methods.exact import Exact
from tests.fuzz.door_inputs import Built


class Truth(NamedTuple):
    """The exact result, and the error that rounding explains."""

    output: Tensor  # (B, H, n_q, e) in float64
    lse: Tensor  # (B, H, n_q)
    allowed: Tensor  # (B, H, n_q, e)
    lse_allowed: Tensor


def is_softmax(method: sparing.Method) -> bool:
    """Whether a method computes softmax attention itself."""
    return isinstance(method, Exact) or str(method) in ("kernel", "kernel(kind='exp')")


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a call in this type computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounding(dtype: torch.dtype, size: Tensor) -> Tensor:
    """Return the error of writing a result of this size in a type: 0 for those that calls compute in."""
    if dtype in (torch.float32, torch.float64):
        return torch.zeros_like(size)
    info = torch.finfo(dtype)
    return info.eps * size + info.tiny


def softmax(built: Built, floor: float = 16.0) -> Truth:
    """Dense attention, and the error that a stable algorithm may make in the type of the call.

    Each logit may be off by its rounding, d + 4 roundings of |scale| sum_c |q_c k_c|; weights and output move with it.
    Beyond that a result may err twice as much as torch's own attention in that type, and by `floor` roundings of the
    weighted sizes of the values.
    """
    x, info = built.wide(), torch.finfo(compute_type(built.x.q.dtype))
    output, lse, weights, logits, k, v = dense(built)
    noise = (x.q.shape[-1] + 4) * info.eps * abs(built.scale) * (x.q.abs() @ k.abs().mT)
    # Products below the smallest number vanish, be they formed with the scale or without.
    if x.q.shape[-1]:
        noise = noise + x.q.shape[-1] * info.tiny * (1 + abs(built.scale) + k.abs().amax() + x.q.abs().amax())
    if built.bias is not None:
        noise = noise + 4 * info.eps * built.bias.abs().masked_fill(built.bias == -torch.inf, 0.0)
    most = (logits + noise - _lse(logits - noise)).exp().clamp_max(1.0)
    least = (logits - noise - _lse(logits + noise)).exp()
    moved = torch.maximum(most - weights, weights - least).nan_to_num(0.0).masked_fill(~built.visible, 0.0)
    size = weights @ v.abs()
    reach = _largest_visible(v.abs(), built.visible)
    allowed = torch.minimum(moved @ v.abs() + moved.sum(-1, keepdim=True) * output.abs(), 2 * reach)
    allowed = allowed + floor * info.eps * torch.maximum(size, output.abs()) + info.tiny
    # Sums of n_k terms explain as much and no more, also where torch is wrong.
    allowed = allowed + torch.minimum(2 * _plain_error(built, output), k.shape[-2] * info.eps * reach)
    allowed = allowed + rounding(built.x.q.dtype, output.abs())
    worst = noise.masked_fill(~built.visible, 0.0).amax(-1) + 8 * info.eps * (1 + lse.abs())
    return Truth(output, lse, allowed, worst)


class Dense(NamedTuple):
    """Attention by its formula, with what it was computed from."""

    output: Tensor
    lse: Tensor
    weights: Tensor
    logits: Tensor
    k: Tensor
    v: Tensor


def dense(built: Built) -> Dense:
    """Dense attention in float64; rows that see nothing are zeros. Differentiable."""
    x = built.wide()
    groups = x.q.shape[1] // max(x.k.shape[1], 1)
    k, v = (t.repeat_interleave(groups, 1) for t in (x.k, built.values(x)))
    logits = x.q @ k.mT * built.scale
    logits = (logits if built.bias is None else logits + built.bias).masked_fill(~built.visible, -torch.inf)
    weights, total, _ = _exponentials(logits)
    weights = weights / total.masked_fill(total == 0, 1.0)  # not exp(logits - lse), which rounds where these are large
    return Dense(weights @ v, _lse(logits).squeeze(-1), weights, logits, k, v)


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(exp(logits - top), their sum, top), over the last axis."""
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (logits - top).exp()
    return weights, weights.sum(-1, keepdim=True), top


def _lse(logits: Tensor) -> Tensor:
    _, total, top = _exponentials(logits)
    return total.masked_fill(total == 0, 1.0).log().masked_fill(total == 0, -torch.inf) + top


def _largest_visible(sizes: Tensor, visible: Tensor) -> Tensor:
    """(B, H, n_q, 1): of the values that a row sees; of all, where that saves a large table."""
    most = sizes.amax(-1)  # (B, H, n_k)
    if visible.numel() > 2**20:
        return most.amax(-1)[..., None, None]
    return most.unsqueeze(-2).expand(visible.shape).masked_fill(~visible, 0.0).amax(-1, keepdim=True)


def plain(built: Built) -> Tensor:
    """Return what `scaled_dot_product_attention` gives in the type that the call computes in. Differentiable."""
    kind = compute_type(built.x.q.dtype)
    x = built.x.map(lambda t: t.to(kind))
    groups = x.q.shape[1] // max(x.k.shape[1], 1)
    k, v = (t.repeat_interleave(groups, 1) for t in (x.k, built.values(x)))
    mask = torch.zeros(built.visible.shape, dtype=kind)
    mask = mask if built.bias is None else mask + built.bias.to(kind)
    mask = mask.masked_fill(~built.visible, -torch.inf)
    return scaled_dot_product_attention(x.q, k, v, mask, scale=built.options["scale"])


def _plain_error(built: Built, truth: Tensor) -> Tensor:
    """The largest error of `plain`, where it gives a number."""
    error = (plain(built).double() - truth).abs()[built.sees]
    return error.nan_to_num(0.0, 0.0, 0.0).amax() if error.numel() else torch.zeros((), dtype=torch.float64)
