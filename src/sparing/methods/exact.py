"""Exact softmax attention: the baseline that everything is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports
from sparing.draws import fold
from sparing.maths import dense


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Exact softmax attention.

    out_i = sum_j softmax_j(scale q_i.k_j + mask_ij) v_j

    `impl="auto"` runs `scaled_dot_product_attention`, the best exact attention that torch has on the machine.

    >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
    >>> torch.allclose(sparing.attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """

    name = "exact"
    supports = Supports(causal=True, attn_mask="any", dropout=True, lse=True, packed=True, training_free=True)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        weights, lse = dense.softmax(dense.logits(q, k, call))  # (B, H, n_q, n_k)
        call.note(lse=lse)
        if call.dropout_p > 0:
            kept = (1 - call.dropout_p) or 1.0  # dropout_p=1 drops every weight: zeros, not 0 / 0
            weights = weights * (_drawn(weights, call) >= call.dropout_p) / kept
        return weights @ v

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.noted or call.dropout_p > 0:  # SDPA returns no log-sum-exp and draws from the global generator
            return self.reference(q, k, v, call)
        if _needs_plain_gradient(q, k, v, call.scale):
            return self.reference(q, k, v, call)
        if call.mask.keep is None and call.mask.pattern is None:
            q, scale = _positive(q, call.scale) if call.mask.causal else (q, call.scale)
            return scaled_dot_product_attention(q, k, v, is_causal=call.mask.causal, scale=scale)
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        assert visible is not None
        mask = visible
        if call.mask.bias is not None:
            mask = call.mask.bias.to(q.dtype).masked_fill(~visible, -torch.inf)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
        return out.masked_fill(~visible.any(-1, keepdim=True), 0.0)

    def full_budget(self, shape: Shape) -> Method:
        return self

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units = shape.batch * shape.heads
        work = units * shape.pairs * (2 * shape.head_dim + 1 + 2 * shape.value_dim)
        # A fused kernel keeps only a block of weights per thread.
        return Cost(work + shape.projection_flops, 4.0 * units * shape.queries, shape.pairs / max(shape.queries, 1))


def _needs_plain_gradient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return whether logits may be so large that the backward pass of torch's fused kernel fails.

    It forms weights as exp(logit - lse) from a rounded log-sum-exp: in float32 they are off by 6 % at logits of 1e6,
    and overflow at 1e9. The plain softmax holds all weights in memory, so it is left to calls that need it.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v)):
        return False
    longest = [float(torch.linalg.vector_norm(x.detach(), dim=-1).amax()) for x in (q, k)]
    return longest[0] * longest[1] * abs(scale) * torch.finfo(q.dtype).eps > 2**-4


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return (q, scale) of the same logits with a scale above zero.

    torch hides later keys before it scales, so that -inf becomes +inf at a negative scale and NaN at a scale of zero,
    or at one that the type of q rounds to zero.
    """
    if abs(scale) < torch.finfo(q.dtype).tiny:
        return q * 0.0, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _drawn(weights: Tensor, call: Call) -> Tensor:
    """Draw a number for each weight (B or 1, H, n_q, n_k), keyed by the head and the ranks of query and key."""
    batch, heads, n_q, n_k = weights.shape
    q_ranks, k_ranks = call.mask.query_ranks(n_q, weights.device)[0], call.mask.key_ranks(n_k, weights.device)[0]
    member = torch.arange(heads, device=weights.device) % call.groups  # heads of a group share a stream, not a mask
    pairs = (q_ranks[:, :, None] << 28) + k_ranks[:, None, :]  # (B or 1, n_q, n_k)
    slots = batch if call.slot_keyed_dropout else pairs.shape[0]
    found = []
    for slot in range(slots):
        draws = replace(call.draws, seed=fold(call.draws.seed, slot)) if call.slot_keyed_dropout else call.draws
        index = (member[:, None, None] << 56) + pairs[min(slot, pairs.shape[0] - 1)]
        found.append(draws.uniform_at("exact.dropout", index))
    return torch.stack(found)
