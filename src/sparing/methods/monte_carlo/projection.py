"""Compute H + b, the values of all tokens from their samples: in plain PyTorch, or by a kernel that draws the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.contract import Projection
from sparing.methods.monte_carlo.native import sampled_projection
from sparing.methods.monte_carlo.sampling import Lists, feature_law, project_rows, ragged_product
from sparing.native.derivatives import once_differentiable


def project(v: Projection, counts: Tensor, lists: Lists, law: Tensor | None) -> Tensor:
    """Compute H + b (B, H_kv, n_k, e) in plain PyTorch; tokens without samples give b.

    law: p (H_kv, d) or (B, H_kv, d); None where all counts are 0 or d, so that nothing is drawn.
    """
    heads = counts.shape[1]
    w = v.weight.unflatten(0, (heads, -1)).mT
    if law is not None:
        values = ragged_product(v.x, w, law, counts, lists)
    else:
        values = v.x.new_zeros(1).expand(*counts.shape, w.shape[-1])
    values = project_rows(v.x, w, counts == v.x.shape[-1], values)
    return values if v.bias is None else values + v.bias.view(heads, 1, -1)


def project_by_kernel(v: Projection, counts: Tensor, lists: Lists, *, sampled: bool) -> Tensor:
    """Compute `project` by a kernel, with p of eq. 6; sampled: False where nothing is drawn."""
    keep = not (torch.is_grad_enabled() and v.weight.requires_grad)  # one that is trained changes before its next use
    values: Tensor = _ByKernel.apply(*v, counts, lists, sampled, keep)
    return values


def fill(values: Tensor, v: Projection, counts: Tensor, center: Tensor) -> Tensor:
    """Add the projected `center` to the values of tokens that are not exact."""
    filled = values + center @ v.weight.unflatten(0, (counts.shape[1], -1)).mT
    return torch.where((counts == v.x.shape[-1]).unsqueeze(-1), values, filled)


class _ByKernel(torch.autograd.Function):
    """`project` by a kernel; the gradient, with the same samples, by plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, lists: Lists, sampled: bool,
        keep: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, counts)
        ctx.lists, ctx.sampled = lists, sampled
        return sampled_projection(x, weight, bias, counts, lists, keep=keep)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, counts = ctx.saved_tensors
        asked = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves: list[Any] = [
                t if t is None else t.detach().requires_grad_(a) for t, a in zip(tensors, asked, strict=True)
            ]
            law = feature_law(leaves[1].unflatten(0, (counts.shape[1], -1)).mT) if ctx.sampled else None
            values = project(Projection(*leaves), counts, ctx.lists, law)
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(values, wanted, grad))
        return (*(next(found) if a else None for a in asked), None, None, None, None)
