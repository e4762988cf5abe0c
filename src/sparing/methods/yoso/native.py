"""Wrappers of the kernels of `yoso`: sums over tokens whose hash codes collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type, widened

_SAMPLING = "Tensor streams, Tensor bits, int seed, int[] purposes, int hashes, bool gaussian"
_CALL = f"Tensor q, Tensor k, Tensor v, Tensor? keep, {_SAMPLING}, bool causal, bool exact, float? unit"
schemas.define(f"yoso_codes(Tensor x, {_SAMPLING}) -> Tensor")
schemas.define(f"yoso({_CALL}) -> (Tensor out, Tensor inverse)")
schemas.define(
    f"yoso_backward(Tensor grad, Tensor? out, Tensor? inverse, {_CALL}, bool to_q, bool to_k, bool to_v)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def codes(
    x: Tensor, streams: Tensor, bits: Tensor, seed: int, purposes: Sequence[int], hashes: int, gaussian: bool
) -> Tensor:
    """Return the codes (B, H, n, hashes) of tokens x (B, H, n, d) as int64; other arguments as in `collision_sums`."""
    return torch.ops.sparing.yoso_codes(
        contiguous_rows(x), streams.contiguous(), bits.contiguous(), seed, purposes, hashes, gaussian
    )


def collision_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    streams: Tensor,
    bits: Tensor,
    seed: int,
    purposes: Sequence[int],
    hashes: int,
    gaussian: bool,
    causal: bool,
    exact: bool,
    unit: float | None = None,
) -> Tensor:
    """Return B V (B, H, n_q, e), where B_ij is the fraction of the hashes in which query i and key j collide.

    q, k: rows of any norm; only their direction counts. Each of q, k and v may have 16 bits; sums are then float32.
    keep: (B, n_k), False for padded keys.
    streams (H,), seed (a signed 64-bit integer), purposes: key of the random numbers, one purpose per group of hashes.
    bits: (B or 1,), bits per code. gaussian: normal hyperplanes instead of Hadamard matrices.
    exact: use the derivative of the collision probability instead of the paper's lower bound.
    unit: divide output rows by their norm; a row without an entry of at least `unit` gives zeros and no gradient.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    out, _ = torch.ops.sparing.yoso(
        q, k, v, keep, streams.contiguous(), bits.contiguous(), seed, purposes, hashes, gaussian, causal, exact, unit
    )
    return out


@torch.library.register_fake("sparing::yoso_codes", lib=schemas)
def _(x: Tensor, streams: Tensor, bits: Tensor, seed: int, purposes: Any, hashes: int, gaussian: bool) -> Tensor:
    return x.new_empty(*x.shape[:3], hashes, dtype=torch.int64)


@torch.library.register_fake("sparing::yoso", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide_type(q))
    return out, out.new_empty(0 if others[-1] is None else q.shape[:3])


@torch.library.register_fake("sparing::yoso_backward", lib=schemas)
def _(
    grad: Tensor, out: Tensor | None, inverse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    wanted = zip((q, k, v), others[-3:], strict=True)
    return tuple(q.new_empty(x.shape if needed else 0) for x, needed in wanted)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, keep, streams, bits, *ctx.settings = inputs
    # Rows of unit length and their inverse norms are enough to recover the sums, which are then not saved.
    kept = (None, None) if ctx.settings[-1] is None else output
    ctx.save_for_backward(*kept, q, k, v, keep, streams, bits)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    out, inverse, q, k, v, keep, streams, bits = ctx.saved_tensors
    q, k, v = (widened(x) for x in (q, k, v))  # gradients have no 16-bit kernels
    needed = ctx.needs_input_grad[:3]
    # The codes are drawn again, so that what is saved does not grow with the number of hashes.
    grads = torch.ops.sparing.yoso_backward(
        contiguous_rows(grad), out, inverse, q, k, v, keep, streams, bits, *ctx.settings, *needed
    )
    grad_q, grad_k, grad_v = (g if wanted else None for g, wanted in zip(grads, needed, strict=True))
    return grad_q, grad_k, grad_v, *[None] * 10


differentiable("yoso", _backward, _setup)
