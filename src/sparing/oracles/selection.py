"""Oracle selections: the keys of largest weight (OVO), and the values nearest to the output (OVA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob
from sparing.maths import dense
from sparing.oracles.convex import value_aware
from sparing.oracles.native import top_keys
from sparing.oracles.nearest import largest
from sparing.oracles.rows import blocks, pairs_held


@dataclass(frozen=True, kw_only=True)
class TopKeys(Method):
    """Attention to the keys of largest weight (OVO of Gupta and Berant, "Value-aware Approximate Attention", 2021).

    out_i = sum_{j in S_i} exp(s q_i.k_j) v_j / sum_{j in S_i} exp(s q_i.k_j),  S_i the `keys` largest weights

    Among equal weights the lower index wins. A yardstick, not a product: it computes every weight first. More keys
    can make a query's error larger, since keys of opposite values may cancel. `inspect()` notes the `mass`: the share
    of the softmax weight that the selected keys hold.

    keys: number of keys that a query attends to.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="top_keys(keys=8)", is_causal=True).shape
    torch.Size([1, 2, 128, 16])
    """

    name = "top_keys"
    budget = "keys"
    oracle = True
    supports = Supports(
        causal=True,
        attn_mask="any",
        gradient=False,
        lse=True,
        decode=True,
        native_16bit=True,
        adopt=True,
        training_free=True,
    )

    keys: int = knob(64, minimum=1)

    def covers(self, n_k: int) -> bool:
        return self.keys >= n_k

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        n_q, n = q.shape[2], k.shape[2]
        seen = torch.ones(1, 1, n_q, n, dtype=torch.bool, device=q.device).tril(n - n_q)
        if keep is not None:
            seen = seen & keep[:, None, None, :] & keep[:, None, n - n_q :, None]
        groups = q.shape[1] // k.shape[1]
        k, v = (x.to(q.dtype).repeat_interleave(groups, dim=1) for x in (k, v))
        scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
        weights, lse = dense.softmax(scores.masked_fill(~largest(scores, self.keys), -torch.inf))
        touched = seen.sum(-1).clamp_max(self.keys).expand_as(lse)
        return weights @ v, {"lse": lse, "touched": touched}

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        out, lse, mass = [], [], []
        for _, _, scores in blocks(q, k, call):  # (B, H, rows, n_k)
            chosen = scores.masked_fill(~largest(scores, self.keys), -torch.inf)
            weights, total = dense.softmax(chosen)
            out.append(weights @ v)
            lse.append(total)
            if call.noted:
                mass.append((total - dense.softmax(scores)[1]).exp().nan_to_num())
        call.note(lse=torch.cat(lse, dim=-1), **({"mass": torch.cat(mass, dim=-1)} if mass else {}))
        return torch.cat(out, dim=-2)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if call.mask.pattern is not None:  # a mask by query is as large as the scores, which the kernel exists to avoid
            return None
        out, lse, all_lse = top_keys(q, k, v, call.mask.keep, self.keys, call.mask.causal, call.scale, call.noted)
        if call.noted:
            call.note(lse=lse, mass=(lse - all_lse).exp().nan_to_num())
        return out

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, keys=max(shape.keys, 1))

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        r, units = min(self.keys, shape.keys), shape.batch * shape.heads
        # All scores, hidden ones too, a comparison each to find the largest, and weights that are mostly zero.
        work = float(shape.queries * shape.keys * (2 * shape.head_dim + 2 + 2 * shape.value_dim))
        return Cost(units * work + shape.projection_flops, 12.0 * pairs_held(shape), r)


@dataclass(frozen=True, kw_only=True)
class ValueAware(Method):
    """The best few values (OVA of Gupta and Berant, "Value-aware Approximate Attention", 2021).

    out_i = argmin |o_i - x|^2 over convex combinations x of at most `keys` visible values, o_i = exact attention

    The weights of x are free, unrelated to the attention weights. With one key the result is the optimum, the value
    nearest to o_i. With at least e + 1 keys (e is the width of a value) it is o_i itself, by Caratheodory's theorem. In
    between it comes from a greedy pursuit and is not the optimum; its squared error is at most
    sum_j alpha_ij |v_j - o_i|^2 / keys and, if `corrective`, never above that of `top_keys`. A yardstick, not a
    product: it needs o_i. Computed in float64. `inspect()` notes `indices` and `weights` [B, H, n_q, keys] and `error`,
    the distance |o_i - out_i|.

    keys: largest number of values that an output is made of.
    corrective: after each new key, find the best weights for all keys so far. False runs the plain pursuit, for which
        the bound holds, but which is not exact at e + 1 keys and can be worse than `top_keys`.

    >>> q, k, v = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64).unbind(0)
    >>> exact = sparing.attention(q, k, v)
    >>> torch.allclose(sparing.attention(q, k, v, method="value_aware(keys=9)"), exact, atol=1e-9)
    True
    """

    name = "value_aware"
    budget = "keys"
    oracle = True
    supports = Supports(causal=True, attn_mask="any", gradient=False, training_free=True)

    keys: int = knob(16, minimum=1)
    corrective: bool = True

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        wide = v.double()
        parts = []
        for _, visible, scores in blocks(q.double(), k.double(), call):
            alpha, _ = dense.softmax(scores)
            # Every visible key may be used, also one whose weight underflows to zero.
            indices, weights = value_aware(
                alpha, wide.unsqueeze(2), self.keys, allowed=visible, corrective=self.corrective
            )
            spread = torch.zeros_like(alpha).scatter_add(-1, indices, weights)  # (B, H, rows, n_k)
            out = spread @ wide
            parts.append((out, indices, weights, (out - alpha @ wide).norm(dim=-1)))
        out, indices, weights, error = (torch.cat(p, dim=2) for p in zip(*parts, strict=True))
        call.note(indices=indices, weights=weights, error=error)
        return out.to(v.dtype)

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if not self.corrective or self.keys <= v.shape[-1] or call.noted:
            return self.reference(q, k, v, call)
        # With so many values the result is o_i itself, and the statistics, which name the values, are not wanted.
        wide = v.double()
        parts = [dense.softmax(scores)[0] @ wide for _, _, scores in blocks(q.double(), k.double(), call)]
        return torch.cat(parts, dim=2).to(v.dtype)

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, keys=shape.value_dim + 1, corrective=True)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        d, e, units = shape.head_dim, shape.value_dim, shape.batch * shape.heads
        r = min(self.keys, e + 1, shape.keys)
        # Logits, output, distances and the weighted sum of the values, then all keys once per atom.
        scan = shape.queries * shape.keys * (2 * d + 9 * e + 1 + r * (2 * e + 8))
        # Solves for the weights after each atom, for the greedy choice and for the largest weights.
        turns = 0 if not self.corrective else 1 if r in (1, e + 1, shape.keys) else 2
        solve = turns * shape.queries * r * r * (r * r / 12 + 2 * r * e / 3 + 8 * e)  # on 1, 2, ..., r atoms
        return Cost(units * (scan + solve) + shape.projection_flops, 32.0 * pairs_held(shape), r)
