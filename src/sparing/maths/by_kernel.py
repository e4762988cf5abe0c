"""Results of a kernel that has no gradient of its own, with the gradient of the specification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sparing.call import Call
from sparing.native.derivatives import once_differentiable


class HasKernel(Protocol):
    """A method with a kernel beside its specification."""

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `reference` by kernels, without a gradient."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute the specification."""


class ByKernel(torch.autograd.Function):
    """`by_kernel` of a method; the gradient is that of its `reference`, by plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, method: HasKernel, call: Call) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.method, ctx.call = method, call
        return method.by_kernel(q, k, v, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(a) for t, a in zip(ctx.saved_tensors, asked, strict=True)]
            out = ctx.method.reference(*leaves, replace(ctx.call, statistics=None))
        found = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad))
        return (*(next(found) if a else None for a in asked), None, None)
