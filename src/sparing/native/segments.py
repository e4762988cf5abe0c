"""Means over runs of consecutive valid tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type

schemas.define("segment_means(Tensor x, Tensor? keep, int segments) -> Tensor")
schemas.define("segment_means_backward(Tensor grad, Tensor? keep, int tokens) -> Tensor")


def segment_means(x: Tensor, keep: Tensor | None, segments: int) -> Tensor:
    """Average x (B, H, n, d) over m runs, as equal as can be, of tokens that keep (B, n) holds valid: (B, H, m, d).

    Run i holds the valid tokens of ranks floor(i N/m) to floor((i + 1) N/m) - 1; the mean of an empty run is zero.
    x may have 16 bits; the means are then float32.
    """
    return torch.ops.sparing.segment_means(contiguous_rows(x), None if keep is None else keep.contiguous(), segments)


@torch.library.register_fake("sparing::segment_means", lib=schemas)
def _(x: Tensor, keep: Tensor | None, segments: int) -> Tensor:
    return x.new_empty(*x.shape[:2], segments, x.shape[3], dtype=wide_type(x))


@torch.library.register_fake("sparing::segment_means_backward", lib=schemas)
def _(grad: Tensor, keep: Tensor | None, tokens: int) -> Tensor:
    return grad.new_empty(*grad.shape[:2], tokens, grad.shape[3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, keep, _ = inputs
    ctx.tokens = x.shape[2]
    ctx.save_for_backward(keep)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (keep,) = ctx.saved_tensors
    return torch.ops.sparing.segment_means_backward(contiguous_rows(grad), keep, ctx.tokens), None, None


differentiable("segment_means", _backward, _setup)
