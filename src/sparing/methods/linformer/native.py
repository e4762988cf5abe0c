"""Wrapper of the kernel of `linformer`: products with a matrix of random signs, which is drawn and never stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows

_DRAWS = "Tensor? keep, Tensor streams, int seed, int purpose"
schemas.define(f"sign_projection(Tensor x, {_DRAWS}, int slots) -> Tensor")
schemas.define(f"sign_projection_backward(Tensor grad, {_DRAWS}, int tokens) -> Tensor")


def sign_projection(x: Tensor, keep: Tensor | None, draws: Draws, purpose: int, slots: int) -> Tensor:
    """Return E x (B, H, slots, d) for x (B, H, n, d), where E (H, slots, n) has entries +-1 / sqrt(slots).

    A token is multiplied by the column of its rank among the tokens that keep (B, n) marks. The sign of slot s in
    column j is bit s % 32 of the word (j, s // 32) of `draws.bits(name, n, ceil(slots / 32))`, where `purpose` is the
    checksum of the name.
    """
    keep = None if keep is None else keep.contiguous()
    return torch.ops.sparing.sign_projection(
        contiguous_rows(x), keep, draws.streams.contiguous(), draws.signed_seed, purpose, slots
    )


@torch.library.register_fake("sparing::sign_projection", lib=schemas)
def _(x: Tensor, keep: Tensor | None, streams: Tensor, seed: int, purpose: int, slots: int) -> Tensor:
    return x.new_empty(*x.shape[:2], slots, x.shape[3])


@torch.library.register_fake("sparing::sign_projection_backward", lib=schemas)
def _(grad: Tensor, keep: Tensor | None, streams: Tensor, seed: int, purpose: int, tokens: int) -> Tensor:
    return grad.new_empty(*grad.shape[:2], tokens, grad.shape[3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, keep, streams, *ctx.draws, _ = inputs
    ctx.tokens = x.shape[2]
    ctx.save_for_backward(keep, streams)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.sparing.sign_projection_backward(contiguous_rows(grad), *ctx.saved_tensors, *ctx.draws, ctx.tokens)
    return back, *[None] * 5


differentiable("sign_projection", _backward, _setup)
