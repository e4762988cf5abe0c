"""Attention with another kernel in place of the exponential: polynomial, ELU, Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, Unsupported, knob, method
from sparing.maths import dense
from sparing.maths.linear import feature_weights, linear_flops, linear_sums, plain_sums
from sparing.methods.kernel.features import elu_features, square_features
from sparing.native.causal_features import feature_causal
from sparing.native.features import Map, feature_mix, feature_sums

_ROWS = 256  # queries per block of a dense product


@dataclass(frozen=True, kw_only=True)
class Kernel(Method):
    """Attention with a kernel of choice (Gupta and Berant, "Value-aware"; Chen et al., "Skyformer", for gaussian).

    out_i = sum_j kappa(q_i, k_j) v_j / sum_j kappa(q_i, k_j)                                 (Value-aware, eq. 1)

    The method is its own target, not an approximation; only `exp` fits weights that were trained with softmax
    attention. `elu` takes linear time in the length, causal or not. So does `poly` of degree 2 if it is not causal and
    there are at least twice as many keys as its d (d + 1) / 2 features. Everything else, and any mask beyond key
    padding, takes quadratic time.

    kind: the kernel kappa. "exp" is exp(s q.k), softmax attention. "poly" is (s q.k)^degree. "elu" is
        (1 + ELU(q)).(1 + ELU(k)), which ignores the scale s. "gaussian" is exp(-s |q - k|^2 / 2), where s = 1/sqrt(d)
        by default.
    degree: exponent of "poly"; it must be even, so that no weight is negative.
    normalize: "row" divides by the sum of the weights and "length" by the number of visible keys. "none" does not
        divide (the paper's choice for gaussian), so that the output grows with the length. "exp" and "poly" need "row",
        since they would overflow.

    A row whose weights are all zero (poly with q orthogonal to all keys, or an underflow) averages the visible values.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="kernel(kind=elu)", is_causal=True).shape
    torch.Size([1, 2, 128, 16])
    """

    name = "kernel"
    target = "kernel"
    supports = Supports(causal=True, attn_mask="boolean")

    kind: str = knob("exp", choices=("exp", "poly", "elu", "gaussian"))
    degree: int = knob(2, minimum=2)
    normalize: str = knob("row", choices=("row", "none", "length"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree % 2:
            raise ValueError(f"kernel: degree={self.degree} must be even, or weights would be negative")
        if self.degree != 2 and self.kind != "poly":
            raise ValueError(f"kernel: degree={self.degree} has no meaning for kind={self.kind!r}; use kind='poly'")
        if self.normalize != "row" and self.kind in ("exp", "poly"):
            raise ValueError(
                f"kernel: normalize={self.normalize!r} with kind={self.kind!r} overflows; use normalize='row', or "
                "kind='gaussian', whose weights are at most one"
            )

    def claims(self) -> Supports:
        return replace(type(self).supports, training_free=self.kind == "exp", native_16bit=self.kind == "elu")

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if self.kind == "gaussian" and call.scale < 0:
            raise Unsupported(
                f"kernel(kind='gaussian') does not support scale={call.scale}: weights would grow with the distance; "
                "use a scale of at least 0"
            )

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        return self._attend(q, k, v, call.scale, visible, _distances)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None,
        distances: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        weights = self._weights(q, k, scale, visible, distances)  # (B, H, n_q, n_k)
        if self.normalize == "none":
            return weights @ v
        if self.normalize == "length":
            count = torch.full_like(weights[..., :1], k.shape[-2]) if visible is None else _count(visible, weights)
            return dense.divide_rows(weights @ v, count)
        total = weights.sum(-1, keepdim=True)
        empty = dense.vanishes(total)
        if bool(empty.any()):
            weights = torch.where(empty, 1.0 if visible is None else visible.to(weights.dtype), weights)
            total = weights.sum(-1, keepdim=True)
        return dense.divide_rows(weights @ v, total)

    def _weights(
        self, q: Tensor, k: Tensor, scale: float, visible: Tensor | None, distances: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return kappa(q_i, k_j), zero for hidden keys; up to a factor per row if rows are normalised anyway."""
        by_row = self.normalize == "row"
        if self.kind == "elu":
            return feature_weights(elu_features(q, k, shift=by_row), visible)
        if self.kind == "poly":
            # The size of a row cancels, and large rows keep products with the smallest keys from underflowing.
            scores = _unit(q, (-1,)) * (math.copysign(2.0**60, scale) if scale else 0.0) @ k.mT
            scores = scores if visible is None else scores.masked_fill(~visible, 0.0)
            return _unit(scores, (-1,)).pow(self.degree)
        if self.kind == "exp":
            logs = q @ k.mT * scale
        elif by_row:
            points, shifted = _centred(q, k)
            logs = ((points @ shifted.mT - shifted.square().sum(-1).unsqueeze(-2) / 2) * scale).to(q.dtype)
        else:
            logs = distances(q, k) * (-scale / 2)
        logs = logs if visible is None else logs.masked_fill(~visible, -torch.inf)
        if by_row:
            logs = logs - dense.finite_or_zero(logs.detach().amax(-1, keepdim=True))
        return logs.exp()

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.kind == "elu" and call.mask.pattern is None:
            return self._linear(q, k, v, call)
        if self.kind == "poly" and self._squares_pay(q.shape[-2], k.shape[-2], q.shape[-1], call):
            return self._squares(q, k, v, call)
        if self.kind in ("exp", "gaussian") and self.normalize == "row":
            return self._softmax(q, k, v, replace(call, statistics=None))
        return self._blocks(q, k, v, call)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `exp` and `gaussian` by row as softmax attention, for which torch has a fused kernel."""
        if self.kind == "exp":
            return method("exact").fast(q, k, v, call)
        # -|k|^2 / 2 is one more coordinate. The fused kernel wants all widths equal.
        d, e, dtype = q.shape[-1], v.shape[-1], q.dtype
        (q, k), v = _centred(q, k), v.double()
        width = max(d + 1, e)
        q = pad(torch.cat([q, torch.ones_like(q[..., :1])], dim=-1), (0, width - d - 1))
        k = pad(torch.cat([k, k.square().sum(-1, keepdim=True) / -2], dim=-1), (0, width - d - 1))
        return method("exact").fast(q, k, pad(v, (0, width - e)), call)[..., :e].to(dtype)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute the dense product in blocks of queries, without the keys that come after all of a block."""
        n_q, n_k = q.shape[-2], k.shape[-2]
        visible = call.mask.visible(n_q, n_k, q.device)
        visible = None if visible is None else visible.expand(-1, -1, n_q, n_k)
        out = []
        stop = 0
        for queries in q.split(_ROWS, dim=-2):
            start, stop = stop, stop + queries.shape[-2]
            end = min(stop, n_k) if call.mask.causal else n_k
            keys, values = (x if end == n_k else x[..., :end, :] for x in (k, v))
            seen = None if visible is None else visible[..., start:stop, :end]
            out.append(self._attend(queries, keys, values, call.scale, seen, _distances_by_product))
        return torch.cat(out, dim=-2)

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `elu` through its feature map, in linear time."""
        by_row = self.normalize == "row"
        sums, total = linear_sums(elu_features(q, k, shift=by_row), v, call, shift=by_row)
        if self.normalize == "none":
            return sums
        values, count = plain_sums(v, call, q.shape[-2])
        if self.normalize == "length":
            return dense.divide_rows(sums, count)
        empty = dense.vanishes(total)
        return torch.where(empty, dense.divide_rows(values, count), sums / total.masked_fill(empty, 1.0))

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.kind != "elu" or call.mask.pattern is not None:
            return None  # the other kinds, and masks by query, are dense products of torch
        by_row = self.normalize == "row"
        kind = Map.ELU if by_row else Map.PLAIN_ELU
        if call.mask.causal:
            out, total = feature_causal(q, k, v, None, call.mask.keep, kind, divide=by_row)
        else:
            sums, mass, _ = feature_sums(k, None, v, call.mask.keep, kind)
            out, total = feature_mix(q, None, sums, mass if by_row else None, kind)
        if self.normalize == "none":
            return out
        if self.normalize == "length":
            _, count = plain_sums(v[..., :0].to(out.dtype), call, q.shape[-2])  # the values do not matter
            return dense.divide_rows(out, count)
        empty = dense.vanishes(total)
        if bool(empty.any()):
            means = dense.divide_rows(*plain_sums(v.to(out.dtype), call, q.shape[-2]))
            out = torch.where(empty.unsqueeze(-1), means, out)
        return out

    def _squares_pay(self, n_q: int, n_k: int, d: int, call: Call) -> bool:
        """Return whether `poly` is faster by its feature map: as measured, if features are at most half the keys."""
        plain = self.degree == 2 and not call.mask.causal and call.mask.pattern is None and call.scale != 0
        return plain and _square_width(d) * (n_q + n_k) <= n_q * n_k

    def _squares(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `poly` of degree 2 through its feature map: (q.k)^2 = phi(q).phi(k)."""
        unit_q, unit_k = _unit(q, (-1,)), _unit(k, (-1, -2))
        columns = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
        blocks = zip(unit_k.split(_ROWS, -2), columns.split(_ROWS, -2), strict=True)
        state = torch.stack([square_features(x).mT @ y for x, y in blocks]).sum(0)  # padded keys are zero: no weight
        both = torch.cat([square_features(x) @ state for x in unit_q.split(_ROWS, -2)], dim=-2)
        sums, total = both[..., :-1], both[..., -1:]
        # A total far below its bound |q|^2 sum_j |k_j|^2 has lost its digits to cancellation: such rows go dense.
        bound = unit_q.square().sum(-1, keepdim=True) * unit_k.square().sum((-1, -2), keepdim=True)
        weak = (total <= 1e-3 * bound).detach()
        out = sums / total.masked_fill(weak, 1.0)
        rows = weak.any(0).any(0).squeeze(-1).nonzero().squeeze(-1)
        if rows.numel():
            again = self._blocks(q[..., rows, :], k, v, call)
            out = out.index_copy(-2, rows, torch.where(weak[..., rows, :], again, out[..., rows, :]))
        return out

    def exact_target(self) -> Method | None:
        return method("exact") if self.kind == "exp" else None

    def full_budget(self, shape: Shape) -> Method:
        return self

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units, tokens = shape.batch * shape.heads, shape.queries + shape.keys
        d, e = shape.head_dim, shape.value_dim
        wide = d if self.kind == "elu" else _square_width(d)
        square = self.kind == "poly" and self.degree == 2 and not shape.causal
        if self.kind == "elu" or (square and wide * tokens <= shape.queries * shape.keys):
            kept = tokens if self.kind == "elu" else min(_ROWS, tokens)
            work = units * (linear_flops(shape, wide) + 2 * tokens * wide)
            return Cost(work + shape.projection_flops, 4.0 * units * (wide * (kept + e) + tokens), wide)
        touched = shape.pairs / max(shape.queries, 1)
        if self.kind in ("exp", "gaussian") and self.normalize == "row":
            d, e = (d, e) if self.kind == "exp" else (max(d + 1, e),) * 2  # the widths that `_softmax` pads to
            work = units * shape.pairs * (2 * d + 1 + 2 * e)
            return Cost(work + shape.projection_flops, 4.0 * units * tokens, touched)
        corner = min(shape.queries, shape.keys) if shape.causal else 0
        pairs = shape.pairs + corner * (min(_ROWS, corner) - 1) / 2  # blocks compute their hidden keys too
        work = units * pairs * (2 * d + 1 + 2 * e)
        kept = min(_ROWS, shape.queries) * shape.keys
        return Cost(work + shape.projection_flops, 4.0 * units * kept, touched)


def _unit(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Divide x by its largest magnitude along the axes; zeros stay zeros."""
    largest = x.detach().abs().amax(axes, keepdim=True)
    return x / largest.masked_fill(largest == 0, 1.0)


def _square_width(d: int) -> int:
    return d * (d + 1) // 2


def _count(visible: Tensor, weights: Tensor) -> Tensor:
    return visible.expand_as(weights).sum(-1, keepdim=True).to(weights.dtype)


def _centred(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Move q and k to the first key as origin, in float64: s (q.k - |k|^2 / 2) are then the logits of a row.

    |q|^2 cancels when a row is divided by its sum. Differences q - k would round small keys away beside large queries;
    products far from the origin would round away what tells near keys apart.
    """
    first = k[..., :1, :].detach().double()
    return q.double() - first, k.double() - first


def _distances(q: Tensor, k: Tensor) -> Tensor:
    """Return |q_i - k_j|^2 from the differences."""
    return torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square()


def _distances_by_product(q: Tensor, k: Tensor) -> Tensor:
    """Return |q_i - k_j|^2 = |q_i|^2 + |k_j|^2 - 2 q_i.k_j, rounded up to zero.

    In float64: near pairs cancel, and what float32 leaves of a distance between long vectors is rounding.
    """
    x, y = q.double(), k.double()
    squares = x.square().sum(-1, keepdim=True) + y.square().sum(-1).unsqueeze(-2)
    found = torch.baddbmm(squares.flatten(0, 1), x.flatten(0, 1), y.mT.flatten(0, 1), alpha=-2)
    return found.clamp_min(0).view_as(squares).to(q.dtype)
