"""Attention whose weights are hash collisions, with its own backward pass: B V and its gradients at linear cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparing.call import Call
from sparing.draws import Draws
from sparing.maths.hashing import hyperplanes, sign_codes
from sparing.methods.yoso.tables import Slope, Tokens, bucket_sums, table_sums
from sparing.native.derivatives import once_differentiable

PURPOSE = "yoso"  #: purpose of the random numbers
_UNIT = 16  # codes have at most this many bits; the number of the sequence stands above them


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The hashes of one call. Nothing is stored: forward and backward draw the same hyperplanes from the seed."""

    family: Literal["hadamard", "gaussian"]
    draws: Draws
    hashes: int
    bits: Tensor  # (B or 1,) int64

    def codes(self, q: Tensor, k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield codes of the queries and of the keys, (B, H, n, few) each, a few hashes at a time."""
        for normals in hyperplanes(
            self.family, self.draws, PURPOSE, bits=int(self.bits.max()), hashes=self.hashes, width=q.shape[-1]
        ):
            yield sign_codes(q, normals, self.bits), sign_codes(k, normals, self.bits)


def collision_sums(q: Tensor, k: Tensor, v: Tensor, sampler: Sampler, call: Call, slope: Slope | None) -> Tensor:
    """Return B V, where B_ij is the fraction of the hashes in which query i and key j collide, 0 if i may not see j.

    The gradient of B_ij with respect to q_i . k_j is taken to be bits B_ij slope(q_i . k_j); None is the constant 1/2,
    which needs no visit to every pair.
    """
    return _CollisionSums.apply(q, k, v, sampler, call, slope)


class _CollisionSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sampler: Sampler, call: Call, slope: Slope | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.sampler, ctx.call, ctx.slope = sampler, call, slope
        valid = _valid(k, call)
        queries, keys = _tokens(q, None), _tokens(k, valid, point=v)
        out = v.new_zeros(q.shape[:-1].numel(), v.shape[-1])
        for query_buckets, key_buckets in _buckets(q, k, valid, sampler):
            if call.mask.causal:
                out += bucket_sums(queries, keys, (query_buckets, key_buckets), "past")
            else:
                out += table_sums(query_buckets, key_buckets, keys.point)  # eqs. 7, 8
        return (out / sampler.hashes).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        sampler, call, slope = ctx.sampler, ctx.call, ctx.slope
        to_q, to_k, to_v = ctx.needs_input_grad[:3]
        valid = _valid(k, call)
        queries, keys = _tokens(q, None, left=grad, point=q), _tokens(k, valid, left=v, point=k)
        plain_queries, plain_keys = _tokens(q, None, point=grad), _tokens(k, valid)
        sum_q, sum_k, sum_v = (torch.zeros_like(x) for x in (queries.point, keys.point, keys.left))
        for at_q, at_k in _buckets(q, k, valid, sampler):
            if to_v and call.mask.causal:  # B^T G with the codes of the forward pass (eq. 10)
                sum_v += bucket_sums(plain_keys, plain_queries, (at_k, at_q), "future")
            elif to_v:
                sum_v += table_sums(at_k, at_q, plain_queries.point)
            if to_q:  # eq. 22
                sum_q += bucket_sums(queries, keys, (at_q, at_k), "past" if call.mask.causal else "all", slope)
            if to_k:
                sum_k += bucket_sums(keys, queries, (at_k, at_q), "future" if call.mask.causal else "all", slope)
        factor = sampler.bits.to(q.dtype).view(-1, 1, 1, 1) / sampler.hashes * (0.5 if slope is None else 1.0)
        grad_k, grad_v = (x.new_zeros(x.shape) for x in (k, v))
        grad_k.flatten(0, 2).index_copy_(0, valid, sum_k)
        grad_v.flatten(0, 2).index_copy_(0, valid, sum_v / sampler.hashes)
        return sum_q.view(q.shape) * factor, grad_k * factor, grad_v, None, None, None


def _buckets(q: Tensor, k: Tensor, valid: Tensor, sampler: Sampler) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each hash the buckets of all queries and of all valid keys: the sequence's number, then the code."""
    if not len(valid):
        return
    batch, heads = q.shape[:2]
    units = torch.arange(batch * heads, device=q.device).view(batch, heads, 1) << _UNIT
    for query_codes, key_codes in sampler.codes(q, k):
        for query_code, key_code in zip(query_codes.unbind(-1), key_codes.unbind(-1), strict=True):
            yield (units + query_code).flatten(), (units + key_code).flatten()[valid]


def _tokens(like: Tensor, valid: Tensor | None, left: Tensor | None = None, point: Tensor | None = None) -> Tokens:
    """Return all queries or valid keys of a call, one row each; `left` and `point` are ones if they are not given."""
    place = torch.arange(like.shape[-2], device=like.device).repeat(like.shape[:-2].numel()).unsqueeze(-1)
    columns = (place, *(like.new_ones(*like.shape[:-1], 1) if x is None else x for x in (left, point)))
    rows = [x.reshape(-1, x.shape[-1]) for x in columns]
    place, left, point = rows if valid is None else [x.index_select(0, valid) for x in rows]
    return Tokens(place.squeeze(-1), left, point)


def _valid(k: Tensor, call: Call) -> Tensor:
    """Return the keys that are not padded, as rows of the flattened keys."""
    if call.mask.keep is None:
        return torch.arange(k.shape[:-1].numel(), device=k.device)
    return call.mask.keep[:, None].expand(k.shape[:-1]).flatten().nonzero().squeeze(-1)
