"""Monte-Carlo attention: exact attention weights, a sampled value projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparing import native
from sparing.call import Call
from sparing.contract import Cost, Method, Projection, Shape, Supports, Unsupported, knob
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.maths import dense
from sparing.methods.monte_carlo import causal
from sparing.methods.monte_carlo.estimator import Estimator, kept_keys, received_weights, token_errors, weight_norms
from sparing.methods.monte_carlo.native import received
from sparing.methods.monte_carlo.projection import fill, project, project_by_kernel
from sparing.methods.monte_carlo.sampling import Lists, draw_features, sampled_product
from sparing.methods.monte_carlo.weights import attend
from sparing.native.tensors import widened


class _Weighed(NamedTuple):
    """Exact weights, and how the values of a call are estimated for them."""

    weights: Tensor  # A (B, H, n_q, n_k)
    counts: Tensor  # r (B, H_kv, n_k)
    lists: Lists
    law: Tensor | None  # p (H_kv, d) or (B, H_kv, d); None where nothing is drawn
    center: Tensor  # what replaces an inexact token if nothing is drawn


@dataclass(frozen=True, kw_only=True)
class MonteCarlo(Method):
    """Softmax attention over sampled value projections (Kim and Ko, "Monte-Carlo Attention", 2022).

    out_i = sum_j A_ij (H_j + b),  H_j = (1/r_j) sum_t x_j[s_t] W[s_t] / p(s_t),  p(k) = |W[k]|^2 / |W|_F^2
    r_j = min(d, ceil((N M_j / alpha)^2)),  M_j = max_i A_ij

    The weights A are exact. The value of token j is estimated from r_j of the d features of its hidden state, so the
    value must come as a `Projection`; tokens with r_j = d are projected exactly. H is unbiased, and the root mean
    square error of a row is at most alpha beta |W|_F, where beta is the mean norm of the hidden states. N and beta
    count only valid tokens; code that counts padding reaches the same r with a larger alpha. Only the projection is
    cheaper: the n^2 weights are all computed. Try estimator="mean" first: its error is often smaller for the same work.

    Causal calls (is_causal=True) give each row its own counts, which ignore later tokens: r_ij from the N_i keys
    that row i sees and M_ij = max_{i' <= i} A_i'j, rounded up to 1, 2, 4, ..., d. Row i uses the first r_ij samples of
    token j ("stratified": strata of r_ij samples), so that its error is at most alpha beta_i |W|_F, beta_i over the
    keys that it sees. In the last row these are the paper's counts. Early rows average over few tokens, so that the
    same alpha gives a far larger error than in a call that is not causal. A H takes one product for each count in use,
    and a token can be sampled for early rows and projected for late ones: beyond a few dozen tokens that is more work
    than exact attention. The baselines choose their tokens row by row; "mean" takes the mean of the keys that the row
    sees, which needs the projection of all tokens and saves nothing.

    A causal attn_mask (aligned to the first or to the last key) without is_causal=True raises an error, since later
    queries would change earlier rows through r_j. Any other mask that hides keys from some queries is applied to A, but
    r_j still depends on all queries. So such a mask, that of a prefix language model for example, prevents looking
    ahead only together with is_causal=True. Where n_q == n_k, a query whose own key no query can see counts as padding
    and is left out of M_j, unless query_mask says otherwise or the call is causal. The gradient treats counts and
    samples as constants; second derivatives need impl="reference". Causal calls and kernels take the default importance
    and probabilities alone. Outside of training, kernels keep p and a copy of W in the order in which they read it (in
    float32 for 16 bits), as long as the weight lives, and make them again when an entry of it has changed.

    `inspect()` notes counts (r; causal: the largest r_ij of each token), tokens (number of valid keys), rate (mean of
    r / d over valid tokens), padded_rate (the same over all slots, as in the paper), certificate (a bound of each row's
    root mean square error, which holds for every setting) and, where it is proven, bound (that of the theorem; causal:
    of each row): for samples with the default importance and probabilities. Causal calls also note products (number of
    A H products, the mean over rows) and terms (rows of W that are added up for all versions of a token).

    alpha: allowed error, in units of beta |W|_F; 0 is exact.
    samples: "independent" (a list of samples per token) or "shared" (one list per head, of which token j uses the
        first r_j; errors of tokens then add up instead of averaging out).
    estimator: "sample", "stratified" (one sample from each of r_j equal parts of p: less variance), or a baseline that
        draws nothing and projects the floor(sum_j r_j / d) tokens with the largest M_j exactly. For the other tokens
        "drop" takes H_j = 0, and "mean" the projected mean of the valid hidden states.
    importance: what of A[:, j] sets r_j. "max" is the paper's M_j = max_i A_ij, and the only one with an error bound.
        "mean" and "median" are the more aggressive choices that the paper leaves to future work: M_j = mean_i A_ij or
        median_i A_ij (the lower one) over the valid queries, of all heads that share the key-value head. They take at
        most as many samples as "max", and at least one for each token that some query gives weight, so that H stays
        unbiased; no alpha bounds their error, since a row may weigh a token far above its mean or median. In MiniLM
        "max" has the smaller error at the same number of samples.
    probabilities: "weight" is eq. 6, p(k) = |W[k]|^2 / |W|_F^2. "input" is eq. 4, p(k) ~ |X[:, k]| |W[k]| with the
        valid tokens X of each batch item: of all p it has the least E|H - X W|_F^2 where all tokens have equally many
        samples. It reads all of X in each call, and bounds no single token, so the theorem does not cover it.

    >>> q, k = torch.randn(2, 1, 4, 32, 16).unbind(0)
    >>> layer = torch.nn.Linear(64, 64)
    >>> value = sparing.Projection(torch.randn(1, 32, 64), layer.weight, layer.bias)
    >>> sparing.attention(q, k, value, method="monte_carlo(alpha=0.4)", seed=0).shape
    torch.Size([1, 4, 32, 16])
    """

    name = "monte_carlo"
    budget = "alpha"
    supports = Supports(
        causal=True, attn_mask="any", mixes_queries=True, projection=True, lse=True, stochastic=True,
        native_16bit=True, training_free=True,
    )  # fmt: skip

    alpha: float = knob(0.2, minimum=0)
    samples: str = knob("independent", choices=("independent", "shared"))
    estimator: str = knob("sample", choices=("sample", "stratified", "drop", "mean"))
    importance: str = knob("max", choices=("max", "mean", "median"))
    probabilities: str = knob("weight", choices=("weight", "input"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._estimator.samples:
            return
        for name, default in (("samples", "independent"), ("probabilities", "weight")):
            if (given := getattr(self, name)) != default:
                raise ValueError(
                    f"monte_carlo: {name}={given!r} with estimator={self.estimator!r}, which draws nothing"
                )

    @property
    def _estimator(self) -> Estimator:
        return Estimator(
            alpha=self.alpha, kind=self.estimator, shared=self.samples == "shared", importance=self.importance,
            by_input=self.probabilities == "input",
        )  # fmt: skip

    def claims(self) -> Supports:
        own = self._estimator
        return replace(
            type(self).supports, causal=own.default_counts_and_law, stochastic=self.alpha > 0 and own.samples
        )

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if call.mask.causal or call.mask.pattern is None or call.mask.pattern.shape[-2] == 1:
            return
        # A mask that hides all keys after a query's own, or after its place at the end of the keys, is causal.
        n_q, n_k = q.shape[-2], k.shape[-2]
        visible = call.mask.visible(n_q, n_k, q.device)
        assert visible is not None
        visible = visible.expand(*visible.shape[:3], n_k)
        for first in {1, max(n_k - n_q, 0) + 1}:
            hides = ~visible.triu(first).flatten(-2).any(-1)
            if bool((hides & visible[..., first:].flatten(-2).any(-1)).any()):
                raise Unsupported(
                    "monte_carlo does not support a causal attn_mask (its sample counts would look at later queries); "
                    "pass is_causal=True, or use 'exact' if the queries stand at the end of the keys"
                )

    def reference(self, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> Tensor:
        assert isinstance(v, Projection)
        if call.mask.causal:
            return causal.reference(self._estimator, q, k, v, call)
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        weights, counts, lists, law, center = self._weigh(q, k, v, call)
        values = v.project(heads)  # for rows with r_j = d (B, H_kv, n_k, e)
        if bool((counts < d).any()):
            w = v.weight.unflatten(0, (heads, -1)).mT  # W (H_kv, d, e)
            if law is not None:
                picks = draw_features(law, counts, lists)
                rough = sampled_product(v.x.unsqueeze(1), w, law, picks, counts)  # eq. 5
            else:
                rough = center @ w
            if v.bias is not None:
                rough = rough + v.bias.view(heads, 1, -1)
            values = torch.where((counts == d).unsqueeze(-1), values, rough)
        return weights @ values.repeat_interleave(call.groups, dim=1)

    def fast(self, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> Tensor:
        """Project only the tokens with r_j = d, and add one row of W for each sample of the others."""
        assert isinstance(v, Projection)
        if call.mask.causal:
            return causal.fast(self._estimator, q, k, v, call)
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        weights, counts, lists, law, center = self._weigh(q, k, v, call)
        if bool((counts == d).all()):
            values = v.project(heads)
        else:
            values = self._filled(project(v, counts, lists, law), v, counts, center)
        return weights @ values.repeat_interleave(call.groups, dim=1)

    def native(self, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> Tensor | None:
        """Find M_j, sample and project by kernels, and leave A H to exact attention: no matrix A is made."""
        assert isinstance(v, Projection)
        if call.mask.pattern is not None or call.mask.causal or v.x.shape[-1] == 0:
            return None  # a mask or counts that differ by query are as large as A; no features, nothing to sample
        if not self._estimator.default_counts_and_law:
            return None  # the kernels know the largest weight and eq. 6 alone
        if v.x.dtype != v.weight.dtype:
            v = v.map(widened)  # 16 bits, of which an extreme entry was taken out
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        valid, counts, lse = self._count(q, k, v, call)
        call.note(counts=counts, tokens=valid.sum(-1))
        if v.x.dtype == call.dtype and bool((counts == d).all()):
            values, center = v.project(heads), v.x.new_zeros(1, 1, 1, d)
        else:
            if self.estimator == "mean":
                v = v.map(widened)  # the mean is summed in float32
            center = self._estimator.center(v.x, valid)
            lists = self._estimator.lists(valid, call)
            values = project_by_kernel(v, counts, lists, sampled=self._estimator.samples)
            values = self._filled(values, v, counts, center)
        quiet = replace(call, statistics=None)
        if call.noted:
            v, center = v.map(widened), widened(center)
            # Padded to the width of the queries: torch's attention stores all of A where the widths differ.
            off = token_errors(v, center, counts).unsqueeze(-1)
            certificate = attend(q, k, torch.nn.functional.pad(off, (0, q.shape[-1] - 1)), quiet)[..., 0]
            self._note(lse, certificate, v, valid, counts, call)
        return attend(q, k, values, quiet)

    def _count(self, q: Tensor, k: Tensor, v: Projection, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return which keys count and r (B, H_kv, n_k), by a kernel, and the log-sum-exp (B, H, n_q)."""
        batch, heads, n_k, d = q.shape[0], q.shape[1] // call.groups, k.shape[2], v.x.shape[-1]
        largest, lse = received(q.detach(), k.detach(), call.mask.keep, call.mask.influence, call.scale)
        weight = largest.unflatten(1, (heads, -1)).amax(2)
        valid = kept_keys(call, batch, heads, n_k)
        return valid, self._estimator.count(weight, valid.sum(-1), d), lse

    def _weigh(self, q: Tensor, k: Tensor, v: Projection, call: Call) -> _Weighed:
        own, heads, d = self._estimator, q.shape[1] // call.groups, v.x.shape[-1]
        weights, lse = dense.softmax(dense.logits(q, k, call))  # exact
        valid, received, read = received_weights(weights.detach(), heads, call, self.importance)  # M (B, H_kv, n_k)
        counts = own.count(received, valid.sum(-1), d, read)
        call.note(counts=counts, tokens=valid.sum(-1))
        center, law = v.x.new_zeros(1, 1, 1, d), None
        if bool((counts < d).any()):
            center = own.center(v.x, valid)
            law = own.law(v, valid) if own.samples else None
        if call.noted:
            errors = token_errors(v, center, counts, law if own.by_input else None)
            certificate = weights @ errors.repeat_interleave(call.groups, dim=1).unsqueeze(-1)
            self._note(lse, certificate.squeeze(-1), v, valid, counts, call)
        return _Weighed(weights, counts, own.lists(valid, call), law, center)

    def values(self, v: Projection, received: Tensor, valid: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return H + b (B, H, n_k, e) and r, for attention that others compute.

        received: M (B, H, n_k). valid: which tokens count (B, H, n_k).
        """
        heads, d = received.shape[1], v.x.shape[-1]
        counts = self._estimator.count(received, valid.sum(-1), d)
        if bool((counts == d).all()):
            return v.project(heads), counts
        own = self._estimator
        lists = own.lists(valid, Call(scale=1.0, mask=Mask(), draws=draws))
        if native.ready(v.x) and d > 0 and own.default_counts_and_law:
            values = project_by_kernel(v, counts, lists, sampled=own.samples)
        else:
            values = project(v, counts, lists, own.law(v, valid) if own.samples else None)
        return self._filled(values, v, counts, own.center(v.x, valid)), counts

    def _filled(self, values: Tensor, v: Projection, counts: Tensor, center: Tensor) -> Tensor:
        """Add the projected `center` where it replaces a token."""
        return fill(values, v, counts, center) if self.estimator == "mean" else values

    def _note(self, lse: Tensor, certificate: Tensor, v: Projection, valid: Tensor, counts: Tensor, call: Call) -> None:
        d, tokens = max(v.x.shape[-1], 1), valid.sum(-1).clamp_min(1)
        rate = (counts * valid).sum(-1).double() / (tokens * d)
        call.note(lse=lse, rate=rate, padded_rate=counts.double().mean(-1) / d, certificate=certificate)
        if self._estimator.samples and self._estimator.default_counts_and_law:
            beta = (v.x.unsqueeze(1).norm(dim=-1) * valid).sum(-1) / tokens
            call.note(bound=self.alpha * beta * weight_norms(v, counts.shape[1]))

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, alpha=0.0)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        """Return the work; without statistics every token is assumed to need all its features.

        A sample counts as a multiply-add for each of the e columns. Drawing random numbers and searching for the
        features are not counted, although they can take more time than all the rest.
        """
        if shape.causal:
            return causal.cost(self._estimator, shape, statistics)
        units, tokens = shape.batch * shape.heads, shape.batch * (shape.kv_heads or shape.heads) * shape.keys
        d, rate, draws = shape.in_features or 0, 1.0, 0.0
        if statistics is not None:
            counts = statistics["counts"]
            rate = float(statistics["padded_rate"].mean())
            draws = tokens * float((counts * (counts < d)).double().mean())
        flops = units * shape.pairs * (2 * shape.head_dim + 1 + 2 * shape.value_dim) + rate * shape.projection_flops
        if self.probabilities == "input" and rate < 1:
            flops += 2.0 * tokens * d  # the norms of the columns of X
        if self.estimator == "mean" and rate < 1:
            flops += 2.0 * tokens * d * (1 + shape.value_dim / max(shape.keys, 1))
        # Projected tokens are gathered one head at a time; a draw takes ten to twenty numbers of eight bytes.
        room = units * shape.pairs + tokens * shape.value_dim + shape.batch * shape.keys * d + 32 * draws
        return Cost(flops, 4.0 * room, float(shape.keys))
