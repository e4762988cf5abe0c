"""Nystromformer: softmax attention through landmark means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob
from sparing.maths import dense
from sparing.maths.convolution import (
    add_convolution,
    beside_convolution,
    check_width,
    convolution_of,
    learned_convolution,
)
from sparing.maths.linalg import inverse_iteration
from sparing.maths.packing import attend_items
from sparing.maths.segments import segment_means
from sparing.methods.nystrom.native import inverse_iteration as native_inverse_iteration
from sparing.native import segments as native_segments
from sparing.native.attend import attend

_RANK = 1e-6  # singular values of A below this fraction of the largest are noise and count as zero
_SVD = 22  # FLOPs of a singular value decomposition, in units of m^3


@dataclass(frozen=True, kw_only=True)
class Nystrom(Method):
    """Softmax attention through landmark means (Xiong et al., "Nystromformer", 2021).

    out = F A^+ (G V),  F = softmax(s Q K~^T),  A = softmax(s Q~ K~^T),  G = softmax(s Q~ K^T)

    Q~ and K~ are means over `landmarks` segments of consecutive valid tokens, of equal length up to one token. A^+
    comes from `iterations` steps of a third-order iteration, or from an exact pseudo-inverse. A sequence with at most
    `landmarks` valid queries or keys gets exact softmax attention. Weights can be negative and need not sum to one.

    landmarks: number of segments of queries, and of keys.
    solver: "iterative" (the paper's) or "exact", the pseudo-inverse in float64. Stopping the iteration early
        regularises: on attention that the segments do not capture, "exact" can be far worse.
    iterations: number of steps of the iterative solver.
    convolution: width of a learned depth-wise convolution of the values, which is added to the output; None for none.
        It must be odd, and needs n_q = n_k. Its weights live in a module: see `sparing.nn.MultiheadAttention`.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="nystrom(landmarks=16)").shape
    torch.Size([1, 2, 128, 16])
    """

    name = "nystrom"
    budget = "landmarks"
    supports = Supports(mixes_queries=True, position_based=True, native_16bit=True, training_free=True)

    landmarks: int = knob(64, minimum=1)
    solver: str = knob("iterative", choices=("iterative", "exact"))
    iterations: int = knob(6, minimum=1)
    convolution: int | None = knob(None, kind=int, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_width(self.name, self.convolution)

    def claims(self) -> Supports:
        own = replace(type(self).supports, native_16bit=self.solver == "iterative")
        return beside_convolution(own, self.convolution)

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if self.convolution is not None:
            convolution_of(call, self.name, self.convolution, q.shape[1])

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        short = self.short(q, k, call)[:, None, None, None]
        out = torch.where(short, softmax_attention(q, k, v, call), self.approximate(q, k, v, call))
        return self.residual(out, v, call)

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if min(q.shape[-2], k.shape[-2]) <= self.landmarks:
            return self.residual(softmax_attention(q, k, v, call), v, call)
        out = self.approximate(q, k, v, call)
        items = self.short(q, k, call).expand(q.shape[0]).nonzero().squeeze(-1)
        out = attend_items(out, items, softmax_attention, q, k, v, call) if len(items) else out
        return self.residual(out, v, call)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.solver == "exact":  # a pseudo-inverse in float64, for which torch calls LAPACK
            return None
        if min(q.shape[-2], k.shape[-2]) <= self.landmarks:
            return self.residual(attend(q, k, v, call.mask.keep, None, call.scale)[0], v, call)
        q_means = native_segments.segment_means(q, call.mask.influence, self.landmarks)
        k_means = native_segments.segment_means(k, call.mask.keep, self.landmarks)
        middle = (q_means @ k_means.mT * call.scale).softmax(-1)
        last, _ = attend(q_means, k, v, call.mask.keep, None, call.scale)
        inverse = native_inverse_iteration(middle, self.start(middle), self.iterations)
        out, _ = attend(q, k_means, inverse @ last, None, None, call.scale)
        if call.mask.keep is not None or call.mask.influence is not None:
            items = self.short(q, k, call).expand(q.shape[0]).nonzero().squeeze(-1)
            if len(items):
                keep = None if call.mask.keep is None else call.mask.keep[items]
                out = out.index_copy(0, items, attend(q[items], k[items], v[items], keep, None, call.scale)[0])
        return self.residual(out, v, call)

    def short(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return which items (B or 1,) have at most `landmarks` valid queries or keys, so that exact costs no more."""
        _, queries = call.mask.query_ranks(q.shape[-2], q.device)
        _, keys = call.mask.key_ranks(k.shape[-2], k.device)
        return (queries <= self.landmarks) | (keys <= self.landmarks)

    def approximate(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute F A^+ (G V); only valid for items with more valid queries and keys than landmarks."""
        dtype = v.dtype
        if self.solver == "exact":  # A is often nearly singular, and its inverse amplifies the rounding of F, A and G
            q, k, v = q.double(), k.double(), v.double()
        q_means = segment_means(q, *call.mask.query_ranks(q.shape[-2], q.device), call.mask.influence, self.landmarks)
        k_means = segment_means(
            k, *call.mask.key_ranks(k.shape[-2], k.device), call.mask.keep, self.landmarks
        )  # (B, H, m, d)
        first = (q @ k_means.mT * call.scale).softmax(-1)  # F (B, H, n_q, m)
        middle = (q_means @ k_means.mT * call.scale).softmax(-1)  # A (B, H, m, m)
        last = softmax_attention(q_means, k, v, call)  # G V (B, H, m, e)
        if self.solver == "exact":
            return (first @ (torch.linalg.pinv(middle, rtol=_RANK) @ last)).to(dtype)
        return first @ (inverse_iteration(middle, self.start(middle), self.iterations) @ last)

    @staticmethod
    def start(middle: Tensor) -> Tensor:
        """Return the start of the iteration, A^T / (||A||_1 ||A||_inf), for A whose rows sum to one."""
        return middle.mT / middle.sum(-2).amax(-1)[..., None, None]

    def residual(self, out: Tensor, v: Tensor, call: Call) -> Tensor:
        return add_convolution(out, v, call, self.name, self.convolution)

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, landmarks=max(shape.queries, shape.keys, 1))

    def learned(self, heads: int, head_dim: int, value_dim: int, max_length: int | None) -> nn.Module | None:
        return learned_convolution(heads, self.convolution)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        m, units, width = self.landmarks, shape.batch * shape.heads, 2 * shape.head_dim + 1 + 2 * shape.value_dim
        if min(shape.queries, shape.keys) <= m:  # exact
            work, numbers, m = shape.pairs * width, shape.pairs, shape.keys
        else:
            inverse = _SVD * m**3 if self.solver == "exact" else self.iterations * 8 * m**3
            work = (shape.queries + shape.keys) * m * width + 2 * m * m * (shape.head_dim + shape.value_dim) + inverse
            numbers = (shape.queries + shape.keys + 4 * m) * m
        filters = 2 * shape.keys * shape.value_dim * (self.convolution or 0)
        size = 8 if self.solver == "exact" else 4
        return Cost(units * float(work + filters) + shape.projection_flops, float(units * size * numbers), m)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Compute exact attention from the dense matrix of weights."""
    return dense.softmax(dense.logits(q, k, call))[0] @ v
