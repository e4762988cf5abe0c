"""Nystromformer: softmax attention through landmark means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparing import dense
from sparing.call import Call
from sparing.linalg import inverse_iteration
from sparing.method import Cost, Method, Shape, Supports, Unsupported, knob
from sparing.state import DepthwiseConvolution, convolution_of


@dataclass(frozen=True, kw_only=True)
class Nystrom(Method):
    """Softmax attention through landmark means (Xiong et al., "Nystromformer", 2021).

    out = F A^+ (G V),  F = softmax(s Q K~^T),  A = softmax(s Q~ K~^T),  G = softmax(s Q~ K^T)

    Q~ and K~ are means over `landmarks` segments of consecutive valid tokens, of equal length up to one token. A^+
    comes from `iterations` steps of a third-order iteration, or from an exact pseudo-inverse. A sequence with no more
    valid queries or keys than landmarks gets exact softmax attention. Weights can be negative and need not sum to one.

    landmarks: segments of queries and of keys.
    solver: "iterative" (the paper's) or "exact".
    iterations: steps of the iterative solver.
    convolution: width of a learned depth-wise convolution of the values, added to the output; odd; None for none.
        Its weights live in a module: see `sparing.nn.MultiheadAttention`.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="nystrom(landmarks=16)").shape
    torch.Size([1, 2, 128, 16])
    """

    name = "nystrom"
    budget = "landmarks"
    supports = Supports(position_based=True, training_free=True)

    landmarks: int = knob(64, minimum=1)
    solver: str = knob("iterative", choices=("iterative", "exact"))
    iterations: int = knob(6, minimum=1)
    convolution: int | None = knob(None, kind=int, minimum=1)

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if self.convolution is not None:
            convolution_of(call, self.name, self.convolution)
            if q.shape[-2] != k.shape[-2]:
                raise Unsupported(f"nystrom(convolution={self.convolution}) needs n_q == n_k; set convolution=None")

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q_ranks, q_count = call.query_ranks(q.shape[-2], q.device)
        k_ranks, k_count = call.key_ranks(k.shape[-2], k.device)
        out = None
        if bool(((q_count > self.landmarks) & (k_count > self.landmarks)).any()):
            q_means = segment_means(q, q_ranks, q_count, call.influence, self.landmarks)  # (B, H, m, d)
            k_means = segment_means(k, k_ranks, k_count, call.keep, self.landmarks)
            first = (q @ k_means.mT * call.scale).softmax(-1)  # F (B, H, n_q, m)
            middle = (q_means @ k_means.mT * call.scale).softmax(-1)  # A (B, H, m, m)
            last, _ = dense.softmax(dense.logits(q_means, k, replace(call, mask=None)))  # G (B, H, m, n_k)
            if self.solver == "exact":
                out = first @ (torch.linalg.pinv(middle) @ (last @ v))
            else:
                # Row sums of A are one, so this start is A^T / (||A||_1 ||A||_inf), norms per matrix.
                start = middle.mT / middle.sum(-2).amax(-1)[..., None, None]
                out = first @ (inverse_iteration(middle, start, self.iterations) @ (last @ v))
        small = (q_count <= self.landmarks) | (k_count <= self.landmarks)
        if bool(small.any()):
            weights, _ = dense.softmax(dense.logits(q, k, call))
            out = weights @ v if out is None else torch.where(small[:, None, None, None], weights @ v, out)
        assert out is not None
        return out if self.convolution is None else out + convolution_of(call, self.name, self.convolution)(v)

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, landmarks=max(shape.queries, shape.keys, 1))

    def learned(self, heads: int, head_dim: int, value_dim: int, max_length: int | None) -> nn.Module | None:
        return None if self.convolution is None else DepthwiseConvolution(heads, self.convolution)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        m, units = min(self.landmarks, shape.queries, shape.keys), shape.batch * shape.heads
        tall = (shape.queries + shape.keys) * m * (2 * shape.head_dim + 1 + 2 * shape.value_dim)
        small = 2 * m * m * (shape.head_dim + shape.value_dim) + self.iterations * 8 * m**3
        filters = 2 * shape.keys * shape.value_dim * (self.convolution or 0)
        return Cost(
            units * float(tall + small + filters) + shape.projection_flops,
            4.0 * units * (shape.queries + shape.keys + 4 * m) * m,
            m,
        )


def segment_means(x: Tensor, ranks: Tensor, count: Tensor, valid: Tensor | None, segments: int) -> Tensor:
    """Means of x (B, H, n, d) over runs of valid tokens; run i holds the ranks floor(i N/m) to floor((i+1) N/m) - 1."""
    segment = ((ranks + 1) * segments - 1) // count.clamp_min(1)[:, None]  # (B or 1, n)
    segment = segment.expand(x.shape[0], -1)
    weight = x.new_ones(x.shape[0], x.shape[2]) if valid is None else valid.to(x.dtype)
    index = segment[:, None, :, None].expand(x.shape)
    sums = x.new_zeros(*x.shape[:2], segments, x.shape[3]).scatter_add(2, index, x * weight[:, None, :, None])
    sizes = x.new_zeros(x.shape[0], segments).scatter_add(1, segment, weight)
    return sums / sizes.clamp_min(1)[:, None, :, None]
