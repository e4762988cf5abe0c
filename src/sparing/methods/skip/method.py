"""Skip: softmax attention that computes every score, and leaves out the values of keys of small weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing import native
from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob, method
from sparing.maths import dense
from sparing.maths.by_kernel import ByKernel
from sparing.maths.packing import place_of_rank, valid_first
from sparing.methods.exact import is_tracked
from sparing.methods.skip.native import skip, skip_step
from sparing.native.tensors import widened

GROUP = 32  #: queries that read the same values
TILE = 128  #: keys whose left-out weight is represented together
_MOST_GROWTH = 2.0**20  # a stand-in's weight grows to at most this times itself
_SCORES = 2**24  # scores that are held at once


@dataclass(frozen=True, kw_only=True)
class Skip(Method):
    """Exact attention without the values of keys whose weight is below a threshold.

    out_i = sum_{j in R_i} w_ij v_j + sum_{tiles t} W_it mean_{j in S_t, w_ij}(v_j),  w_ij = softmax_j(s q_i.k_j)

    All scores are computed, so that weights and log-sum-exp are exact. A query wants the keys whose weight is at least
    the threshold times the largest weight up to the key's tile of 128 keys. Neighbouring queries, 32 in a group,
    want much the same keys and read them together: R_i holds the keys that one of the group wants; in causal calls one
    of the queries up to i. What a tile leaves out, of weight W_it, is not lost: every `stride`-th of its keys, S_t,
    stands for it, each by its own weight. Without kernels nothing is saved.

    For pretrained weights, without training; there is no index. While decoding, each query reads for itself. Related:
    kernels that skip tiles of negligible weight (SpargeAttention, Zhang et al. 2025), which then lose that weight.
    `inspect()` notes, each [B, H, n_q], `left_out`: the share of the weight that was left out; `bound`: the largest
    possible distance to exact attention, |out_i - exact_i| <= left_out_i max_jj' |v_j - v_j'|; `touched`: the number of
    values that a query used. The gradient takes the choice of keys as given.

    threshold: weight from which on a value is read, relative to the largest that the query has seen; 0 reads all.
    stride: every `stride`-th key of a tile stands for the keys that are left out; at most 128.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="skip(threshold=0.02)", is_causal=True).shape
    torch.Size([1, 2, 300, 16])
    """

    name = "skip"
    budget = "threshold"
    supports = Supports(
        causal=True, packed=True, mixes_queries=True, lse=True, position_based=True, decode=True, decode_16bit=True,
        native_16bit=True, native_gqa=True, adopt=True, training_free=True,
    )  # fmt: skip

    threshold: float = knob(0.01, minimum=0.0, maximum=1.0)
    stride: int = knob(4, minimum=1, maximum=TILE)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        at_once = max(_SCORES // max(q.shape[0] * q.shape[2] * k.shape[2], 1), 1)
        parts = [
            self._heads(q[:, h : h + at_once], k[:, h : h + at_once], v[:, h : h + at_once], call)
            for h in range(0, q.shape[1], at_once)
        ]
        out, lse, left, touched = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        self._note(lse, left, touched, v, call)
        return out

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
        scores, keep = dense.logits(q, k, call), call.mask.keep  # (B, H, n_q, n_k)
        if keep is not None:
            scores = scores.take_along_dim(place_of_rank(keep)[:, None, None], dim=-1)
        tiles = _in_tiles(scores)  # (B, H, n_q, T, TILE)
        with torch.no_grad():
            wanted = self._wanted(tiles)
            slot = _slots(call.mask.influence, q.shape[2], q.device)  # (B or 1, n_q)
            item = torch.arange(q.shape[0], device=q.device)[:, None]
            table = wanted.new_zeros(q.shape[0], q.shape[2] + 2 * GROUP - q.shape[2] % GROUP, *wanted.shape[1::2], TILE)
            table[item, slot] = wanted.transpose(1, 2)
            groups = table.unflatten(1, (-1, GROUP)).byte()
            groups = groups.cummax(2).values if call.mask.causal else groups.amax(2, keepdim=True).expand_as(groups)
            read = groups.flatten(1, 2)[item, slot].transpose(1, 2).bool()
        return self._mix(tiles, read, *valid_first(keep, v))

    def _wanted(self, tiles: Tensor) -> Tensor:
        """Return which keys a query wants for itself, from its scores (B, H, n_q, T, TILE)."""
        highest = tiles.amax(-1, keepdim=True).cummax(-2).values  # of the tile and those before it
        return ((tiles - dense.finite_or_zero(highest)).exp() >= self.threshold) & (tiles > -torch.inf)

    def _mix(self, tiles: Tensor, read: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return output, log-sum-exp, share of the weight left out, and number of values used, of (B, H, n_q) rows."""
        weights, lse = dense.softmax(tiles.flatten(-2))
        weights = weights.unflatten(-1, (-1, TILE))
        left = weights.masked_fill(read, 0.0)
        stands = torch.arange(TILE, device=v.device) % self.stride == self.stride - 1
        whole, standing = left.sum(-1, keepdim=True), (left * stands).sum(-1, keepdim=True)  # (B, H, n_q, T, 1)
        enough = (standing * _MOST_GROWTH >= whole) & ~dense.vanishes(standing)
        growth = (whole / standing.masked_fill(~enough, 1.0)).masked_fill(~enough, 0.0)
        grown = left * stands * growth
        used = (weights - left + grown).flatten(-2)[..., : v.shape[2]]
        lost = whole.masked_fill(enough, 0.0).sum((-2, -1)).unsqueeze(-1)
        return used @ v / (1 - lost), lse, whole.sum((-2, -1)), (read | (grown > 0)).sum((-2, -1))

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.covers(k.shape[2]) and not call.noted:
            return method("exact").native(q, k, v, call)
        if is_tracked(q, k, v):
            if call.mask.offsets is not None:
                return None  # the specification, which gives the gradient, knows no packs
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return ByKernel.apply(q, k, v, self, call)

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `reference` by the kernel, without a gradient. k and v may have fewer heads than q."""
        mask = call.mask
        offsets = None if mask.offsets is None else torch.tensor(mask.offsets)
        threshold = max(self.threshold, torch.finfo(torch.float32).tiny)
        out, lse, left, touched = skip(
            q, k, v, mask.keep, mask.influence, offsets, threshold, self.stride, call.scale, mask.causal
        )
        self._note(lse, left, touched.long(), v, call)
        return out

    def _note(self, lse: Tensor, left: Tensor, touched: Tensor, v: Tensor, call: Call) -> None:
        call.note(lse=lse, left_out=left, touched=touched)
        if call.noted:
            call.note(bound=left * _diameters(v, call, left.shape[1], left.shape[2]))

    def covers(self, n_k: int) -> bool:
        return self.threshold == 0

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.threshold and native.ready(q, half=True) and q.dtype == k.dtype == v.dtype:
            out, lse, left, touched = skip_step(q, k, v, keep, self.threshold, self.stride, scale)
            return out, {"lse": lse, "left_out": left, "touched": touched.long()}
        n_q, n = q.shape[2], k.shape[2]
        q = widened(q)
        k, v = (x.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        position = torch.arange(n, device=q.device)
        seen = (position <= position[n - n_q :, None])[None, None]
        scores = q @ k.mT * scale
        if keep is not None:
            seen = seen & keep[:, None, None] & keep[:, None, n - n_q :, None]
            order = place_of_rank(keep)[:, None, None]
            scores, seen = scores.take_along_dim(order, dim=-1), seen.take_along_dim(order, dim=-1)
        tiles = _in_tiles(scores.masked_fill(~seen, -torch.inf))
        out, lse, left, touched = self._mix(tiles, self._wanted(tiles), *valid_first(keep, v))
        return out, {"lse": lse, "left_out": left, "touched": touched}

    def step_flops(self, shown: float, touched: float, head_dim: int, value_dim: int) -> float:
        return shown * (2.0 * head_dim + 1.0) + touched * 2.0 * value_dim

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, threshold=0.0)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units, keys = shape.batch * shape.heads, shape.pairs / max(shape.queries, 1)
        if statistics and "touched" in statistics:
            keys = float(statistics["touched"].double().mean())
        values = units * shape.queries * keys * 2 * shape.value_dim
        scores = units * shape.pairs * (2 * shape.head_dim + 1)
        return Cost(scores + values + shape.projection_flops, 4.0 * units * shape.queries, keys)


def _in_tiles(scores: Tensor) -> Tensor:
    """Return scores (B, H, n_q, n_k) as (B, H, n_q, T, TILE), with -inf behind the last key."""
    return pad(scores, (0, -scores.shape[-1] % TILE), value=-torch.inf).unflatten(-1, (-1, TILE))


def _slots(influence: Tensor | None, n_q: int, device: torch.device) -> Tensor:
    """Return a number (B or 1, n_q) for each query; those with the same number // GROUP are a group.

    Queries that must not change others, those of padding, come after all others, in groups of their own.
    """
    if influence is None:
        return torch.arange(n_q, device=device)[None]
    count = influence.sum(-1, keepdim=True)
    apart = (count + GROUP - 1) // GROUP * GROUP + (~influence).cumsum(-1) - 1
    return torch.where(influence, influence.cumsum(-1) - 1, apart)


def _diameters(v: Tensor, call: Call, heads: int, n_q: int) -> Tensor:
    """Return a bound (B, H, n_q) on the distance of any two values that a query sees: twice that from the first."""
    mask, found = call.mask, []
    bounds = (0, v.shape[2]) if mask.offsets is None else mask.offsets
    for start, stop in pairwise(bounds):
        values, keep = widened(v[:, :, start:stop]), None if mask.keep is None else mask.keep[:, start:stop]
        (first,) = valid_first(keep, values)
        far = torch.linalg.vector_norm(values - first[:, :, :1], dim=-1)  # (B, H_kv, n_k)
        far = far if keep is None else far.masked_fill(~keep[:, None], 0.0)
        rows = n_q if mask.offsets is None else stop - start
        if mask.causal:
            far = far.cummax(-1).values[..., torch.arange(rows, device=v.device).clamp_max(stop - start - 1)]
        else:
            far = far.amax(-1, keepdim=True).expand(-1, -1, rows)
        found.append(2 * far)
    return torch.cat(found, dim=-1).repeat_interleave(heads // v.shape[1], dim=1)
