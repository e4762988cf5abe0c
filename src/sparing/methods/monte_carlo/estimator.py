"""How the values of tokens are estimated: sample counts, lists of samples, and bounds of the error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Projection
from sparing.draws import Draws
from sparing.methods.monte_carlo.sampling import Lists, mean_token, sample_counts, whole_counts


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The settings of `MonteCarlo`, and what follows from them for every path.

    alpha: allowed error. kind: its field `estimator`. shared: whether tokens share one list of samples per head.
    """

    alpha: float
    kind: str
    shared: bool

    @property
    def samples(self) -> bool:
        """Whether features are sampled; the baselines project whole tokens."""
        return self.kind in ("sample", "stratified")

    def count(self, received: Tensor, tokens: Tensor, features: int) -> Tensor:
        """Return r (..., n) from M (..., n) and N (...)."""
        counts = sample_counts(received, tokens, self.alpha, features)  # eq. 9
        return counts if self.samples else whole_counts(received, counts, features)

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


def largest_weights(weights: Tensor, heads: int, call: Call) -> tuple[Tensor, Tensor]:
    """Return by key-value head which keys some query sees, and M_j, the largest weight that a valid query gives j."""
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
    return valid, weights.amax((2, 3))


def weight_norms(v: Projection, heads: int) -> Tensor:
    """Return |W_h|_F (H_kv,)."""
    return v.weight.unflatten(0, (heads, -1)).flatten(1).norm(dim=-1)


def token_errors(v: Projection, center: Tensor, counts: Tensor) -> Tensor:
    """Bound the root mean square error of each token's value (B, H_kv, n_k).

    |x_j| |W|_F / sqrt(r_j) for a sampled token (Lemma 1), |x_j - c| |W|_F for one that is replaced, 0 for an exact one.
    """
    x = v.x.unsqueeze(1)
    off = (x - center).norm(dim=-1) * counts.clamp_min(1).to(x.dtype).rsqrt() * (counts < x.shape[-1])
    return off * weight_norms(v, counts.shape[1]).unsqueeze(-1)
