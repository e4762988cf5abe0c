"""Exact softmax attention: the baseline that everything is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports
from sparing.draws import fold
from sparing.maths import dense
from sparing.maths.by_kernel import ByKernel
from sparing.native.attend import attend
from sparing.native.library import instruction_set_in_use, ready

#: By instruction set: the fewest queries for which our kernel is at least as fast as torch's, in plain calls, and in
#: those with key padding, shared key heads or 16 bits, for which torch needs a mask or a copy. It computes up to 32
#: queries in one pass, so that few of them waste it. Sizes of heads, numbers of keys and causality change the ratio,
#: but not who wins. Measured in docs/kernels.md; instruction sets that are not listed lose.
_LEAST_QUERIES: dict[str | None, tuple[float, float]] = {"avx512": (16, 4), "avx2": (16, 8)}


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Exact softmax attention.

    out_i = sum_j softmax_j(scale q_i.k_j + mask_ij) v_j

    `impl="auto"` runs whichever is faster of torch's `scaled_dot_product_attention` and our own kernel. The kernel also
    serves what torch has no kernel for: key padding without a mask of n_q x n_k, key heads that query heads share,
    16 bits without a copy, and the log-sum-exp.

    >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
    >>> torch.allclose(sparing.attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """

    name = "exact"
    supports = Supports(
        causal=True, attn_mask="any", dropout=True, lse=True, packed=True, native_16bit=True, native_gqa=True,
        training_free=True,
    )  # fmt: skip

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

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        mask = call.mask
        if mask.pattern is not None or call.dropout_p > 0:
            return None
        if call.impl == "native":
            if is_tracked(q, k, v):  # the specification, which gives the gradient, has as many key heads as query heads
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            return ByKernel.apply(q, k, v, self, call)
        wanted = call.noted or mask.offsets is not None  # torch has neither
        if call.tracked or is_tracked(q, k, v):
            return None
        if not wanted and not kernel_wins(q, padded=mask.keep is not None, shared=call.groups > 1):
            return None
        return self.by_kernel(q, k, v, call)

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `reference` by the kernel, without a gradient. k and v may have fewer heads than q."""
        mask = call.mask
        offsets = None if mask.offsets is None else torch.tensor(mask.offsets)
        out, lse = attend(q, k, v, mask.keep, None, call.scale, causal=mask.causal, offsets=offsets)
        call.note(lse=lse)
        return out

    def full_budget(self, shape: Shape) -> Method:
        return self

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units = shape.batch * shape.heads
        work = units * shape.pairs * (2 * shape.head_dim + 1 + 2 * shape.value_dim)
        # A fused kernel keeps only a block of weights per thread.
        return Cost(work + shape.projection_flops, 4.0 * units * shape.queries, shape.pairs / max(shape.queries, 1))


def kernel_wins(q: Tensor, *, padded: bool, shared: bool) -> bool:
    """Return whether our kernel can serve a call without gradient, and is at least as fast as torch's.

    padded: with key padding. shared: query heads share key heads.
    """
    plain, other = _LEAST_QUERIES.get(instruction_set_in_use(), (math.inf, math.inf))
    least = other if padded or shared or q.dtype.itemsize == 2 else plain
    return q.shape[2] >= least and ready(q, half=True)


def is_tracked(*tensors: Tensor) -> bool:
    """Return whether a gradient of one of the tensors may be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _needs_plain_gradient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return whether logits may be so large that the backward pass of torch's fused kernel fails.

    It forms weights as exp(logit - lse) from a rounded log-sum-exp: in float32 they are off by 6 % at logits of 1e6,
    and overflow at 1e9. The plain softmax holds all weights in memory, so it is left to calls that need it.
    """
    if not is_tracked(q, k, v):
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
