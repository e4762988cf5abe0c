"""Wrapper of the kernel of `nystrom`: the third-order iteration for inverses of small matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas

schemas.define("inverse_iteration(Tensor a, Tensor start, int steps) -> Tensor")
schemas.define(
    "inverse_iteration_backward(Tensor grad, Tensor a, Tensor start, int steps) -> (Tensor grad_a, Tensor grad_start)"
)


def inverse_iteration(a: Tensor, start: Tensor, steps: int) -> Tensor:
    """Iterate Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4 from `start`, for matrices (..., m, m)."""
    flat = (x.reshape(-1, *a.shape[-2:]).contiguous() for x in (a, start))
    return torch.ops.sparing.inverse_iteration(*flat, steps).view(a.shape)


@torch.library.register_fake("sparing::inverse_iteration", lib=schemas)
def _(a: Tensor, start: Tensor, steps: int) -> Tensor:
    return a.new_empty(a.shape)


@torch.library.register_fake("sparing::inverse_iteration_backward", lib=schemas)
def _(grad: Tensor, a: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, start, ctx.steps = inputs
    ctx.save_for_backward(a, start)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.sparing.inverse_iteration_backward(grad.contiguous(), *ctx.saved_tensors, ctx.steps)
    return (*grads, None)


differentiable("inverse_iteration", _backward, _setup)
