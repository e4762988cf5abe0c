"""Rows divided by their length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import adjacent

schemas.define("unit_rows(Tensor x, float smallest) -> Tensor")
schemas.define("unit_rows_backward(Tensor grad, Tensor x, float smallest) -> Tensor")


def unit_rows(x: Tensor, smallest: float) -> Tensor:
    """x (B, H, n, d) over the length of its rows; one without an entry as large as `smallest` gives zeros."""
    return torch.ops.sparing.unit_rows(adjacent(x), smallest)


@torch.library.register_fake("sparing::unit_rows", lib=schemas)
def _(x: Tensor, smallest: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("sparing::unit_rows_backward", lib=schemas)
def _(grad: Tensor, x: Tensor, smallest: float) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.smallest = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.sparing.unit_rows_backward(adjacent(grad), ctx.saved_tensors[0], ctx.smallest), None


differentiable("unit_rows", _backward, _setup)
