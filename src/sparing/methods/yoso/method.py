"""YOSO: attention weights that are hash collisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob
from sparing.draws import checksum
from sparing.maths import dense
from sparing.maths.convolution import (
    add_convolution,
    beside_convolution,
    check_width,
    convolution_of,
    learned_convolution,
)
from sparing.maths.hashing import HASHES_AT_ONCE, draw_names, is_gaussian
from sparing.maths.linalg import unit_rows
from sparing.methods.yoso import native as kernels
from sparing.methods.yoso.collisions import PURPOSE, Sampler, collision_sums
from sparing.methods.yoso.lift import lifted
from sparing.native.derivatives import once_differentiable
from sparing.native.tensors import wide_type

_MOST_BITS = 16
_STEEPEST = math.cos(1e-3)


@dataclass(frozen=True, kw_only=True)
class Yoso(Method):
    """Attention by hash collisions (Zeng et al., "You Only Sample (Almost) Once", 2021).

    out = l2(B V),  B_ij = fraction of the hashes in which q_i and k_j have the same code,  E[B_ij] = f(q^_i . k^_j)
    f(x) = (1 - arccos(x) / pi)^bits,  q^ = q / |q|,  k^ = k / |k|

    Each bit of a code says on which side of a random hyperplane a vector lies. For each hash, a key adds its value to
    one bucket of a table and a query reads one bucket, so the cost is linear in the length. f is not softmax: a model
    that was trained with softmax must be fine-tuned. Only the directions of queries and keys matter, so `scale` has no
    effect; the number of bits acts as the temperature. With `unit="lift"` (remark 2) lengths matter, too: an entry that
    makes the length 1 and a zero are added to each vector, so that q^ . k^ = q . k / t. The backward pass is the
    paper's: exact for the values, given the sampled codes; codes have no derivative, so that of f is estimated from the
    collisions. A vector of norm below 1e-12 has no direction: its codes are 0, f takes x = 0, and it gets no gradient.

    hashes: number of hashes that B is averaged over.
    bits: number of bits of a code, 1 to 16. In a module or model that states its longest input (`max_length`,
        `max_position_embeddings`), None takes log2 of that, to the nearest integer, for every input, as the paper does.
        In a bare call, and in a model that states none, None takes log2 of the number of valid keys, rounded up. A
        causal call on a prefix then uses other codes than one on the whole sequence; set `bits` where prefixes must
        agree.
    unit: "l2" divides queries and keys by their length, "lift" adds entries to them (Neyshabur and Srebro 2015).
    temperature: the t of the lift, a bound on the squared length of queries and keys; longer ones are shortened to it.
        None takes the largest squared length of each sequence and head, padding aside. It then depends on every token,
        so that a row depends on other queries; causal calls are refused, and need a number here.
    expectation: use f itself instead of B (the paper's YOSO-E); the cost is quadratic.
    normalize: "l2" divides each row by its norm, "sum" by the sum of its weights, "none" not at all.
    hash: "hadamard" draws hyperplanes from randomly signed Hadamard matrices, "gaussian" from the normal law, which is
        exact for every input; vectors with only two entries can collide up to a fifth too rarely under "hadamard".
        Below width 16 both are "gaussian".
    gradient: "lower_bound" puts bits f / 2 in place of f', as in the paper, which stays finite. "exact" uses
        f' = bits f / (pi (1 - arccos(x) / pi) sqrt(1 - x^2)), with |x| clipped at cos(0.001); it visits every pair that
        collides, at worst all of them.
    convolution: width of a learned depth-wise convolution of the values, which is added to the normalised output; None
        for none. It must be odd, and needs n_q = n_k. It sees later tokens, so it cannot be causal. Its weights live in
        a module: see `sparing.nn.MultiheadAttention`.

    `inspect()` notes the codes of all hashes, `query_codes` [B, H, n_q, hashes] and `key_codes` [B, H, n_k, hashes]
    (not with `expectation`), how many `bits` [B] each item's codes have, and the `temperature` [B, H] of the lift.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="yoso(hashes=32)", is_causal=True, seed=0).shape
    torch.Size([1, 2, 128, 16])
    """

    name = "yoso"
    target = "angular"
    budget = "hashes"
    supports = Supports(causal=True, stochastic=True, native_16bit=True)

    hashes: int = knob(32, minimum=1)
    bits: int | None = knob(None, kind=int, minimum=1, maximum=_MOST_BITS)
    unit: str = knob("l2", choices=("l2", "lift"))
    temperature: float | None = knob(None, kind=float, above=0.0)
    expectation: bool = False
    normalize: str = knob("l2", choices=("l2", "sum", "none"))
    hash: Literal["hadamard", "gaussian"] = knob("hadamard", choices=("hadamard", "gaussian"))
    gradient: str = knob("lower_bound", choices=("lower_bound", "exact"))
    convolution: int | None = knob(None, kind=int, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_width(self.name, self.convolution)
        if self.temperature is not None and self.unit != "lift":
            raise ValueError(f"yoso: temperature={self.temperature} belongs to unit='lift'; set bits with unit='l2'")

    def claims(self) -> Supports:
        sampled, mixes = not self.expectation, self._finds_temperature
        can = replace(
            type(self).supports, stochastic=sampled, native_16bit=sampled, causal=not mixes, mixes_queries=mixes
        )
        return beside_convolution(can, self.convolution)

    @property
    def _finds_temperature(self) -> bool:
        """Whether the temperature is that of the longest query or key."""
        return self.unit == "lift" and self.temperature is None

    def for_length(self, max_length: int | None) -> Method:
        """Fix the bits by the longest input of the model: as the paper sets tau once, 9 for 512 tokens."""
        if self.bits is not None or max_length is None:
            return self
        return replace(self, bits=min(max(round(math.log2(max_length)), 1), _MOST_BITS))  # RoBERTa states 514 for 512

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if self.convolution is not None:
            convolution_of(call, self.name, self.convolution, q.shape[1])

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k = self._unit(q, k, call)
        bits = self._bits(k, call)
        x = q @ k.mT  # (B, H, n_q, n_k)
        if self.expectation:
            weights = agreement(x.detach()) ** bits.view(-1, 1, 1, 1)  # f (eq. 4)
        else:
            weights = torch.zeros_like(x, requires_grad=False)
            for query_codes, key_codes in self._sampler(q, k, call).codes(q, k):  # (B, H, n, few)
                for i, j in zip(query_codes.unbind(-1), key_codes.unbind(-1), strict=True):
                    weights += i.unsqueeze(-1) == j.unsqueeze(-2)
            weights /= self.hashes  # B (eq. 5)
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        weights = weights if visible is None else weights * visible
        slope = steepness(x.detach()) if self.gradient == "exact" else 0.5
        weights = _Weights.apply(x, weights, weights * slope * bits.view(-1, 1, 1, 1))
        return self._normalized(weights @ self._values(v), v, call, by=unit_rows)

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.expectation:
            return self.reference(q, k, v, call)
        q, k = self._unit(q, k, call)
        slope = steepness if self.gradient == "exact" else None
        sums = collision_sums(q, k, self._values(v), self._sampler(q, k, call), call, slope)
        return self._normalized(sums, v, call, by=unit_rows)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.expectation:  # dense: no kernel is faster than torch's matrix products
            return None
        q, k = self._lifted(q, k, call)
        width, draws = q.shape[-1], call.draws
        purposes = draw_names(self.hash, PURPOSE, hashes=self.hashes, width=width).values()
        sampling = (
            draws.streams,
            self._bits(k, call),
            draws.signed_seed,
            [checksum(name) for name in purposes],
            self.hashes,
            is_gaussian(self.hash, width),
        )
        if call.noted:
            call.note(query_codes=kernels.codes(q, *sampling), key_codes=kernels.codes(k, *sampling))
        exact = self.gradient == "exact"
        unit = _shortest(wide_type(q)) if self.normalize == "l2" else None
        sums = kernels.collision_sums(q, k, self._values(v), call.mask.keep, *sampling, call.mask.causal, exact, unit)
        return self._normalized(sums, v, call, by=lambda rows, _: rows)  # the kernel has divided already

    def _lifted(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return vectors whose directions count."""
        return lifted(q, k, self.temperature, call) if self.unit == "lift" else (q, k)

    def _unit(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k = self._lifted(q, k, call)
        return unit_rows(q, 1e-12), unit_rows(k, 1e-12)

    def _bits(self, k: Tensor, call: Call) -> Tensor:
        """Return how many bits the codes of each item have, (B or 1,)."""
        _, count = call.mask.key_ranks(k.shape[-2], k.device)
        powers = 2 ** torch.arange(_MOST_BITS, device=k.device)
        bits = (count.unsqueeze(-1) > powers).sum(-1).clamp_min(1)  # log2, rounded up, at most 16
        bits = bits if self.bits is None else torch.full_like(bits, self.bits)
        call.note(bits=bits.expand(k.shape[0]))
        return bits

    def _sampler(self, q: Tensor, k: Tensor, call: Call) -> Sampler:
        sampler = Sampler(family=self.hash, draws=call.draws, hashes=self.hashes, bits=self._bits(k, call))
        if call.noted:
            query_codes, key_codes = (torch.cat(x, dim=-1) for x in zip(*sampler.codes(q, k), strict=True))
            call.note(query_codes=query_codes, key_codes=key_codes)
        return sampler

    def _values(self, v: Tensor) -> Tensor:
        """Return the values, with a column of ones where the sum of the weights is needed."""
        return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1) if self.normalize == "sum" else v

    def _normalized(self, sums: Tensor, v: Tensor, call: Call, by: Callable[[Tensor, float], Tensor]) -> Tensor:
        if self.normalize == "l2":  # eq. 6
            out = by(sums, _shortest(sums.dtype))
        else:
            out = dense.divide_rows(sums[..., :-1], sums[..., -1:]) if self.normalize == "sum" else sums
        return add_convolution(out, v, call, self.name, self.convolution)

    def exact_target(self) -> Method | None:
        return None if self.expectation else replace(self, expectation=True)

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, expectation=True)

    def learned(self, heads: int, head_dim: int, value_dim: int, max_length: int | None) -> nn.Module | None:
        return learned_convolution(heads, self.convolution)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units, width = shape.batch * shape.heads, shape.value_dim + (self.normalize == "sum")
        width_in = shape.head_dim + 2 * (self.unit == "lift")
        bits = self.bits or min(max((shape.keys - 1).bit_length(), 1), _MOST_BITS)
        tokens = shape.queries + shape.keys
        filters = 2 * shape.keys * shape.value_dim * (self.convolution or 0)
        if self.expectation:
            work = float(shape.queries * shape.keys * (2 * width_in + 4 + 2 * width))  # hidden pairs too
            memory, touched = 8.0 * shape.queries * shape.keys, shape.pairs / max(shape.queries, 1)
        else:
            work = self.hashes * tokens * (2.0 * width_in * bits + width)
            memory = tokens * (4.0 * width + 16 * min(self.hashes, HASHES_AT_ONCE))
            touched = float(self.hashes)
        return Cost(units * (work + filters) + shape.projection_flops, units * memory, touched)


def _shortest(dtype: torch.dtype) -> float:
    """Return the smallest norm that a row is divided by: the inverse of a smaller one can overflow."""
    return torch.finfo(dtype).tiny


def agreement(x: Tensor) -> Tensor:
    """Return the probability that one bit agrees for unit vectors with product x; rounding can take |x| past 1."""
    return 1 - x.clamp(-1, 1).arccos() / math.pi


def steepness(x: Tensor) -> Tensor:
    """Return f' / (bits f) = 1 / (pi agreement sqrt(1 - x^2)) (eq. 11), finite because |x| is clipped at cos(0.001)."""
    x = x.clamp(-_STEEPEST, _STEEPEST)
    return 1 / (math.pi * agreement(x) * (1 - x.square()).sqrt())


class _Weights(torch.autograd.Function):
    """Weights whose derivative with respect to x is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.saved_tensors[0], None, None
