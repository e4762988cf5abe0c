"""Wrappers of the kernels of `lsh`: softmax over the keys that hash rounds show, and the hash."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sparing.native.autograd import differentiable
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows, wide_type, widened

Rule = Literal["bucket", "causal", "rank"]
_RULES: tuple[Rule, ...] = ("bucket", "causal", "rank")  # in the order of the enumeration in lsh_arcs.h

_LIMITS = "Tensor in_q, Tensor in_k, Tensor? keep, Tensor? influence, int chunk, int rule, bool once, float scale"
schemas.define("rotation_buckets(Tensor x, Tensor rotations, Tensor used) -> Tensor")
schemas.define(
    f"lsh(Tensor q, Tensor k, Tensor v, {_LIMITS}) -> (Tensor out, Tensor lse, Tensor top, Tensor total, Tensor hits)"
)
schemas.define(
    f"lsh_backward(Tensor grad, Tensor lse_grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top, Tensor total,"
    f" {_LIMITS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def rotation_buckets(x: Tensor, rotations: Tensor, buckets: Tensor) -> Tensor:
    """Return `sparing.maths.hashing.rotation_buckets` of all rounds: (rounds, B, H, n) as int32.

    rotations: (H, rows, rounds, d) in float64. buckets: (B or 1,).
    """
    used = (buckets // 2).expand(x.shape[0]).contiguous()
    return torch.ops.sparing.rotation_buckets(contiguous_rows(x.detach()), rotations.contiguous(), used)


def lsh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    in_q: Tensor,
    in_k: Tensor,
    keep: Tensor | None,
    influence: Tensor | None,
    chunk: int,
    rule: Rule,
    once: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output (B, H, n_q, e), log-sum-exp and hits (B, H, n_q)) over the keys that the rounds show.

    in_q, in_k: (rounds, B, H, n) buckets as int32. rule: `by_bucket`, `by_bucket_causal` or `by_rank` of
    `sparing.methods.lsh.arcs`. once: a key that several rounds show counts once, else as often as it is shown. Where
    n_q = n_k, a query that no round shows a key sees its own. q, k and v may have 16 bits; output and log-sum-exp are
    then float32.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    keep, influence = (None if x is None else x.contiguous() for x in (keep, influence))
    which = _RULES.index(rule)
    out, lse, *_, hits = torch.ops.sparing.lsh(q, k, v, in_q, in_k, keep, influence, chunk, which, once, scale)
    return out, lse, hits


@torch.library.register_fake("sparing::rotation_buckets", lib=schemas)
def _(x: Tensor, rotations: Tensor, used: Tensor) -> Tensor:
    return x.new_empty(rotations.shape[2], *x.shape[:3], dtype=torch.int32)


@torch.library.register_fake("sparing::lsh", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *limits: Any) -> tuple[Tensor, ...]:
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide_type(q))
    return out, *(out.new_empty(q.shape[:3]) for _ in range(3)), q.new_empty(q.shape[:3], dtype=torch.int64)


@torch.library.register_fake("sparing::lsh_backward", lib=schemas)
def _(grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, in_q, in_k, keep, influence, *ctx.limits = inputs
    out, _, top, total, hits = output
    ctx.mark_non_differentiable(top, total, hits)
    ctx.save_for_backward(q, k, v, in_q, in_k, keep, influence, out, top, total)


def _backward(ctx: Any, grad: Tensor, lse_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, in_q, in_k, keep, influence, out, top, total = ctx.saved_tensors
    q, k, v = (widened(x) for x in (q, k, v))  # gradients have no 16-bit kernels
    grads = torch.ops.sparing.lsh_backward(
        contiguous_rows(grad), lse_grad.contiguous(), q, k, v, out, top, total, in_q, in_k, keep, influence, *ctx.limits
    )
    return (*grads, *[None] * 8)


differentiable("lsh", _backward, _setup)
