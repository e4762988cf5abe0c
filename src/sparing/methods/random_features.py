"""Positive random features: softmax attention at linear cost (Performer, orthogonal random features)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob
from sparing.maths import dense
from sparing.maths.linear import LogFeatures, feature_weights, linear_attention, linear_flops, plain_sums
from sparing.native.causal_features import feature_causal
from sparing.native.features import Map, feature_mix, feature_sums
from sparing.native.tensors import wide_type, widened


@dataclass(frozen=True, kw_only=True)
class RandomFeatures(Method):
    """Softmax attention by positive random features (Choromanski et al., "Performer", 2021; Value-aware A.1).

    out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)
    phi(x) = F^(-1/2) exp(R x' - |x'|^2 / 2),  x' = sqrt(s) x

    E[phi(q).phi(k)] = exp(s q.k) for Gaussian rows of R, and for orthogonal rows with chi-distributed norms. With
    Gaussian rows the relative variance of phi(q).phi(k) is (exp(|q' + k'|^2) - 1) / F: on peaked attention thousands
    of features can be too few, and the result worse than the mean of the values. `inspect()` returns `log_variance`,
    the mean of |q' + k'|^2 - log F over the keys that a query sees; do not trust rows where it is much above zero.
    No number of features makes the result exact. A row whose features all underflow gives zeros; log_variance is then
    in the hundreds.

    features: number of random features F, the rows of R.
    orthogonal: True draws blocks of orthogonal rows with chi-distributed norms, False independent Gaussian rows.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="random_features(features=64)", is_causal=True, seed=0).shape
    torch.Size([1, 2, 128, 16])
    """

    name = "random_features"
    budget = "features"
    supports = Supports(causal=True, stochastic=True, native_16bit=True, training_free=True)

    features: int = knob(256, minimum=1)
    orthogonal: bool = True

    def projection(self, d: int, call: Call) -> Tensor:
        """Return R (H, F, d) in float64."""
        if not self.orthogonal:
            return call.draws.normal("random_features.rows", self.features, d)
        blocks = math.ceil(self.features / d)
        gaussian = call.draws.normal("random_features.blocks", blocks, d, d)
        # The Q of a Gaussian matrix is Haar distributed once the signs of R's diagonal are fixed.
        rotation, upper = torch.linalg.qr(gaussian)
        rotation = rotation * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        rows = rotation.mT.flatten(1, 2)[:, : self.features]
        return rows * call.draws.normal_norms("random_features.norms", self.features, d).unsqueeze(-1)

    def log_features(self, q: Tensor, k: Tensor, call: Call) -> LogFeatures:
        """Return log phi of queries and keys, each less its largest entry, and that entry of the keys."""
        rows = self.projection(q.shape[-1], call).to(q.dtype)
        q, k = _scaled(q, k, call)
        along_q, along_k = q @ rows.mT, k @ rows.mT  # |q'|^2 is the same for all keys and cancels
        top_q, top_k = (x.detach().amax(-1, keepdim=True) for x in (along_q, along_k))
        half = k.square().sum(-1, keepdim=True) / 2  # kept apart: subtracting it from each entry would lose digits
        phi_k = (along_k - top_k - (half - half.detach())).exp()
        return LogFeatures((along_q - top_q).exp(), phi_k, (top_k - half.detach()).squeeze(-1))

    def _note_variance(self, q: Tensor, k: Tensor, call: Call) -> None:
        if call.noted:
            q, k = _scaled(widened(q), widened(k), call)
            sums = plain_sums(torch.cat([k, k.square().sum(-1, keepdim=True)], dim=-1), call, q.shape[-2])
            mean = dense.divide_rows(*sums)  # mean of k' and |k'|^2 over the keys that a query sees
            square = q.square().sum(-1) + 2 * (q * mean[..., :-1]).sum(-1) + mean[..., -1]
            call.note(log_variance=square - math.log(self.features))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self._note_variance(q, k, call)
        # Each row is divided by the largest factor among the keys that it sees, which cancels. A maximum over all keys
        # would depend on later ones.
        weights = feature_weights(self.log_features(q, k, call), call.mask.visible(q.shape[-2], k.shape[-2], q.device))
        return dense.divide_rows(weights @ v, weights.sum(-1, keepdim=True))

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self._note_variance(q, k, call)
        return linear_attention(self.log_features(q, k, call), v, call)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self._note_variance(q, k, call)
        rows = self.projection(q.shape[-1], call).to(wide_type(q)).expand(q.shape[0], -1, -1, -1)
        root = math.sqrt(abs(call.scale))
        signed = math.copysign(root, call.scale)
        if call.mask.causal:
            return feature_causal(q, k, v, rows, call.mask.keep, Map.EXPONENTIAL, (signed, root))[0]
        sums, mass, _ = feature_sums(k, rows, v, call.mask.keep, Map.EXPONENTIAL, root)
        return feature_mix(q, rows, sums, mass, Map.EXPONENTIAL, signed)[0]

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        f, units = self.features, shape.batch * shape.heads
        maps = (shape.queries + shape.keys) * f * (2 * shape.head_dim + 1)
        work = units * (maps + linear_flops(shape, f)) + shape.projection_flops
        # R is drawn and made orthogonal in float64, for all batch items at once, at a peak of 40 to 58 bytes per entry.
        drawn = math.ceil(f / shape.head_dim) * shape.head_dim if self.orthogonal else f
        drawing = 64.0 * shape.heads * drawn * shape.head_dim
        # Then come R for each item, features, sums over tokens in two copies, and a block of features in a kernel.
        sums = 4.0 * units * f * (shape.queries + shape.keys + 2 * shape.value_dim + shape.head_dim) + 768.0 * f
        return Cost(work, max(drawing, sums), f)


def _scaled(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return q' and k': the scale enters once, half of it on each side."""
    root = math.sqrt(abs(call.scale))
    return q * math.copysign(root, call.scale), k * root
