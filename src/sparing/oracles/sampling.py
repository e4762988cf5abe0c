"""Attention from sampled keys: what sampling costs, and what knowing the values buys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob
from sparing.maths import dense
from sparing.oracles.rows import blocks, pairs_held

_FLOOR = 0.1  # fraction of the mean size: smaller values are sampled as if they had this size


@dataclass(frozen=True, kw_only=True)
class Sampled(Method):
    """Attention from keys drawn with replacement (Hansen and Hurwitz 1943; Gupta and Berant 2021 compare selections).

    unbiased:         out = (1/m) sum_t alpha_{i_t} v_{i_t} / p_{i_t}
    self_normalized:  out = sum_t w_t v_{i_t} / sum_t w_t,  w_t = alpha_{i_t} / p_{i_t}

    with i_1 .. i_m drawn from p. The squared error of the unbiased form is (sum_i alpha_i^2 |v_i|^2 / p_i - |o|^2) / m
    in the mean, smallest for p ~ alpha |v|; that of the self-normalised form tends to
    sum_i alpha_i^2 |v_i - o|^2 / (p_i m), smallest for p ~ alpha |v - o|. A yardstick, not a product: it draws from
    the exact weights. Each query and key-value head has its own draws. Computed in float64. `inspect()` notes the
    drawn `indices` [B, H, n_q, samples] and `spread` [B, H, n_q], m times the mean squared error just given.

    samples: number of draws per query, m.
    proposal: "attention" (p = alpha), "value_norm" (p ~ alpha |v|) or "deviation" (p ~ alpha |v - o|).
    form: "unbiased" or "self_normalized". The self-normalised form must be able to draw every key, so sizes below a
        tenth of their mean are raised to it. "deviation" needs this form: the unbiased one would miss keys with v = o.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="sampled(samples=16, proposal=value_norm)", seed=0).shape
    torch.Size([1, 2, 128, 16])
    """

    name = "sampled"
    budget = "samples"
    oracle = True
    supports = Supports(causal=True, attn_mask="any", gradient=False, stochastic=True, training_free=True)

    samples: int = knob(64, minimum=1)
    proposal: str = knob("attention", choices=("attention", "value_norm", "deviation"))
    form: str = knob("unbiased", choices=("unbiased", "self_normalized"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proposal == "deviation" and self.form == "unbiased":
            raise ValueError(
                "sampled: proposal='deviation' with form='unbiased' would never draw a key whose value is the output; "
                "set form='self_normalized' or proposal='value_norm'"
            )

    def chances(self, alpha: Tensor, v: Tensor) -> Tensor:
        """Return p (B, H, rows, n_k), which sums to one in each row that sees a key."""
        if self.proposal == "attention":
            return alpha
        if self.proposal == "value_norm":
            size = v.norm(dim=-1).unsqueeze(-2)
        else:
            size = torch.cdist(alpha @ v, v, compute_mode="donot_use_mm_for_euclid_dist")
        mean = (alpha * size).sum(-1, keepdim=True)
        if self.form == "self_normalized":
            size = torch.maximum(size, _FLOOR * mean)
        p = torch.where(mean > 0, alpha * size, alpha)  # the mean is zero if all values are zero, or all equal
        return dense.divide_rows(p, p.sum(-1, keepdim=True))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        wide = v.double()
        ranks, _ = call.mask.query_ranks(q.shape[-2], q.device)  # (B or 1, n_q)
        if call.mask.influence is not None:  # a query that is padding keeps its place
            ranks = torch.where(call.mask.influence, ranks, torch.arange(q.shape[-2], device=q.device))
        parts = []
        for rows, _, scores in blocks(q.double(), k.double(), call):
            alpha, _ = dense.softmax(scores)  # (B, H, rows, n_k)
            p = self.chances(alpha, wide)
            # The counter of draw t of a query is its rank times m plus t.
            counter = ranks[:, rows, None] * self.samples + torch.arange(self.samples, device=q.device)
            uniform = call.draws.uniform_at("sampled.keys", counter.unsqueeze(0)).transpose(0, 1)
            ladder = p.cumsum(-1)  # hidden keys add nothing, so the future changes no bit
            goal = (uniform * ladder[..., -1:]).contiguous()  # (B, H, rows, m)
            indices = torch.searchsorted(ladder, goal, right=True).clamp_max(k.shape[-2] - 1)
            ratio = dense.divide_rows(alpha, p).gather(-1, indices)
            if self.form == "self_normalized":
                ratio = dense.divide_rows(ratio, ratio.sum(-1, keepdim=True))
            else:
                ratio = ratio / self.samples
            out = torch.zeros_like(alpha).scatter_add(-1, indices, ratio) @ wide
            parts.append((out, indices, self.spread(alpha, p, wide) if call.noted else out))
        out, indices, spread = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        call.note(indices=indices, spread=spread)
        return out.to(v.dtype)

    def spread(self, alpha: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """Return m times the mean squared error, (B, H, rows): exact if unbiased, the limit of many samples if not."""
        mean = alpha @ v
        if self.form == "unbiased":
            second = (dense.divide_rows(alpha * alpha, p) @ v.square().sum(-1, keepdim=True)).squeeze(-1)
            return (second - mean.square().sum(-1)).clamp_min(0.0)
        far = torch.cdist(mean, v, compute_mode="donot_use_mm_for_euclid_dist").square()
        return (dense.divide_rows(alpha * alpha, p) * far).sum(-1)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        m, units = self.samples, shape.batch * shape.heads
        # All weights, hidden ones too, their running sum, and the samples as weights that are mostly zero. A proposal
        # by deviation needs the output and the distances of all values from it.
        each = (
            2 * shape.head_dim + 3 + 2 * shape.value_dim + (5 * shape.value_dim if self.proposal == "deviation" else 0)
        )
        work = float(shape.queries * (shape.keys * each + 2 * m))
        return Cost(units * work + shape.projection_flops, 32.0 * pairs_held(shape), m)
