"""How the values of tokens are estimated: sample counts, lists of samples, and bounds of the error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Projection
from sparing.draws import Draws
from sparing.methods.monte_carlo.sampling import (
    Lists,
    feature_law,
    input_law,
    inverse_law,
    mean_token,
    sample_counts,
    whole_counts,
)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The settings of `MonteCarlo`, and what follows from them for every path.

    alpha: allowed error. kind: its field `estimator`. shared: whether tokens share one list of samples per head.
    importance: how a token is weighed for its count. by_input: whether p follows the hidden states too (eq. 4).
    """

    alpha: float
    kind: str
    shared: bool
    importance: str
    by_input: bool

    @property
    def samples(self) -> bool:
        """Whether features are sampled; the baselines project whole tokens."""
        return self.kind in ("sample", "stratified")

    @property
    def default_counts_and_law(self) -> bool:
        """Whether r and p are those that the error bound is proven for, and that causal calls and kernels have."""
        return self.importance == "max" and not self.by_input

    def count(self, received: Tensor, tokens: Tensor, features: int, read: Tensor | None = None) -> Tensor:
        """Return r (..., n) from M (..., n) and N (...).

        read: tokens that some query gives weight, which M may not show; they get a sample, since none is a bias.
        """
        counts = sample_counts(received, tokens, self.alpha, features)  # eq. 9
        if read is not None:
            counts = counts.maximum(read.long()).clamp_max(features)
        return counts if self.samples else whole_counts(received, counts, features)

    def law(self, v: Projection, valid: Tensor) -> Tensor:
        """Return p, (H_kv, d) by eq. 6 or (B, H_kv, d) by eq. 4. valid: (B, H_kv, n_k)."""
        w = v.weight.unflatten(0, (valid.shape[1], -1)).mT
        return input_law(v.x, valid, w) if self.by_input else feature_law(w)

    def lists(self, valid: Tensor, call: Call) -> Lists:
        """Return the lists of samples of a call whose valid keys are (B, H_kv, n_k)."""
        return Lists(
            ranks=(valid.long().cumsum(-1) - 1).clamp_min(0),
            draws=Draws(call.draws.seed, call.draws.streams[:: call.groups]),
            shared=self.shared,
            stratified=self.kind == "stratified",
        )

    def center(self, x: Tensor, valid: Tensor) -> Tensor:
        """Return what replaces a token that is neither sampled nor projected, (B or 1, H_kv or 1, 1, d)."""
        return mean_token(x, valid) if self.kind == "mean" else x.new_zeros(1, 1, 1, x.shape[-1])


def kept_keys(call: Call, batch: int, heads: int, n_k: int) -> Tensor:
    """Return which keys are not padding (B, H_kv, n_k)."""
    if call.mask.keep is None:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=call.draws.streams.device).expand(batch, heads, n_k)
    return call.mask.keep[:, None].expand(batch, heads, n_k)


def received_weights(weights: Tensor, heads: int, call: Call, importance: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return which keys some query sees, M_j, and which keys have weight: (B, H_kv, n_k) each.

    M_j is the largest, the mean or the (lower) median of the weights that the valid queries of all heads of a group
    give to key j. Queries that see no key at all are left out.
    """
    batch, _, n_q, n_k = weights.shape
    weights = weights.unflatten(1, (heads, -1))  # (B, H_kv, groups, n_q, n_k)
    visible = call.mask.visible(n_q, n_k, weights.device)
    valid = torch.ones(batch, heads, n_k, dtype=torch.bool, device=weights.device)
    if visible is not None:
        valid = visible.any(-2).expand(batch, heads * call.groups, n_k).unflatten(1, (heads, -1)).any(2)
    counted = None if call.mask.influence is None else call.mask.influence[:, None].expand(batch, heads, n_q)
    if counted is None and call.mask.pattern is not None and n_q == n_k:
        counted = valid  # padding that was passed as a full mask
    if counted is not None:
        weights = weights.masked_fill(~counted[:, :, None, :, None], 0.0)
    largest = weights.amax((2, 3))
    if importance == "max":
        return valid, largest, largest > 0
    rows = weights.masked_fill(~weights.any(-1, keepdim=True), torch.nan).flatten(2, 3)
    received = rows.nanmean(2) if importance == "mean" else rows.nanmedian(2).values
    return valid, received.nan_to_num(0.0), largest > 0


def weight_norms(v: Projection, heads: int) -> Tensor:
    """Return |W_h|_F (H_kv,)."""
    return v.weight.unflatten(0, (heads, -1)).flatten(1).norm(dim=-1)


def token_errors(v: Projection, center: Tensor, counts: Tensor, law: Tensor | None = None) -> Tensor:
    """Bound the root mean square error of each token's value (B, H_kv, n_k).

    |x_j| |W|_F / sqrt(r_j) for a sampled token (Lemma 1), |x_j - c| |W|_F for one that is replaced, 0 for an exact one.
    law: p (B, H_kv, d) that is not that of Lemma 1: sqrt(sum_k x_jk^2 |W[k]|^2 / p(k) / r_j) for a sampled token.
    """
    x = v.x.unsqueeze(1)
    if law is None:
        size = (x - center).norm(dim=-1) * weight_norms(v, counts.shape[1]).unsqueeze(-1)
    else:
        rows = v.weight.unflatten(0, (counts.shape[1], -1)).double().square().sum(1)  # |W[k]|^2 (H_kv, d)
        size = (x.square() @ (rows * inverse_law(law)).to(x.dtype).unsqueeze(-1)).squeeze(-1).sqrt()
    return size * counts.clamp_min(1).to(x.dtype).rsqrt() * (counts < x.shape[-1])
