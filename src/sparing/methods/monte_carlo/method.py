"""Monte-Carlo attention: exact attention weights, a sampled value projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparing import native
from sparing.call import Call
from sparing.contract import Cost, Method, Projection, Shape, Supports, Unsupported, knob, method
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.maths import dense
from sparing.methods.monte_carlo.levels import (
    block_pairs,
    level_of,
    levels,
    project_blocks,
    running_maximum,
    used_levels,
    versions,
    weigh,
    weigh_versions,
)
from sparing.methods.monte_carlo.native import received, sampled_projection
from sparing.methods.monte_carlo.row_blocks import RowBlock, cut_rows, row_facts, row_work, stack_facts, weigh_rows
from sparing.methods.monte_carlo.sampling import (
    draw_features,
    feature_law,
    mean_token,
    project_rows,
    purpose,
    ragged_product,
    sample_counts,
    sampled_product,
    whole_counts,
)
from sparing.native.derivatives import once_differentiable


@dataclass(frozen=True, kw_only=True)
class MonteCarlo(Method):
    """Softmax attention over sampled value projections (Kim and Ko, "Monte-Carlo Attention", 2022).

    out_i = sum_j A_ij (H_j + b),  H_j = (1/r_j) sum_t x_j[s_t] W[s_t] / p(s_t),  p(k) = |W[k]|^2 / |W|_F^2
    r_j = min(d, ceil((N M_j / alpha)^2)),  M_j = max_i A_ij

    The weights A are exact. The value of token j is estimated from r_j of the d features of its hidden state, so the
    value must come as a `Projection`; tokens with r_j = d are projected exactly. H is unbiased, and the root mean
    square error of a row is at most alpha beta |W|_F, where beta is the mean norm of the hidden states. N and beta
    count the valid tokens; code that counts padding reaches the same r with a larger alpha. It saves work of the
    projection only, nothing of the n^2. Compare with estimator="mean" first: it often errs less for the same work.

    Causal calls (is_causal=True) give each row its own counts, which look at nothing after it: r_ij from the N_i keys
    that row i sees and M_ij = max_{i' <= i} A_i'j, rounded up to 1, 2, 4, ..., d. Row i uses the first r_ij samples of
    token j ("stratified": strata of r_ij samples), so that its error is at most alpha beta_i |W|_F, beta_i over the
    keys that it sees. In the last row these are the paper's counts. Early rows average over few tokens, so that the
    same alpha errs far more than in a call that is not causal. A H is then one product for each count in use, and a
    token can be sampled for early rows and projected for late ones: beyond a few dozen tokens that is more work than
    exact attention. The baselines choose their tokens row by row; "mean" takes the mean of the keys that the row sees,
    for which all tokens are projected: it then saves nothing.

    A causal attn_mask without is_causal=True is refused (aligned to the first or to the last key): later queries would
    change earlier rows through r_j. Any other mask that hides keys from some queries is applied to A, but r_j still
    depends on all queries: such a mask (that of a prefix language model, for example) is no guarantee against looking
    ahead; together with is_causal=True it is. Where n_q == n_k, a query whose own key no query can see counts as
    padding and stays out of M_j, unless query_mask says otherwise or the call is causal. The gradient treats counts and
    samples as constants; second derivatives need impl="reference".

    `inspect()` gives counts (r; causal: the largest r_ij of each token), tokens (valid keys), rate (the mean of r / d
    over valid tokens), padded_rate (over all slots, the paper's), certificate (a bound of each row's root mean square
    error) and, for sampling, bound (that of the theorem; causal: of each row). For causal calls also products (A H
    products that are run, the mean over rows) and terms (rows of W that are added up for all versions of a token).

    alpha: error allowed; 0 is exact.
    samples: "independent" (a list of samples per token) or "shared" (one list per head, of which token j uses the
        first r_j; errors of tokens then add up instead of averaging out).
    estimator: "sample"; "stratified" (one sample from each of r_j equal parts of p: less variance); or a baseline
        that draws nothing and projects floor(sum_j r_j / d) tokens, those with the largest M_j, exactly: "drop" takes
        H_j = 0 for the others, "mean" the projected mean of the valid hidden states.

    >>> q, k = torch.randn(2, 1, 4, 32, 16).unbind(0)
    >>> layer = torch.nn.Linear(64, 64)
    >>> value = sparing.Projection(torch.randn(1, 32, 64), layer.weight, layer.bias)
    >>> sparing.attention(q, k, value, method="monte_carlo(alpha=0.4)", seed=0).shape
    torch.Size([1, 4, 32, 16])
    """

    name = "monte_carlo"
    budget = "alpha"
    supports = Supports(
        causal=True, attn_mask="any", mixes_queries=True, projection=True, lse=True, stochastic=True, training_free=True
    )

    alpha: float = knob(0.2, minimum=0)
    samples: str = knob("independent", choices=("independent", "shared"))
    estimator: str = knob("sample", choices=("sample", "stratified", "drop", "mean"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples == "shared" and self.estimator in ("drop", "mean"):
            raise ValueError(f"monte_carlo: samples='shared' with estimator={self.estimator!r}, which draws nothing")

    def claims(self) -> Supports:
        return replace(type(self).supports, stochastic=self.alpha > 0 and self._samples)

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
            return self._reference_by_row(q, k, v, call)
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        weights, valid, counts, center = self._weigh(q, k, v, call)
        values = v.project(heads)  # for rows with r_j = d (B, H_kv, n_k, e)
        if bool((counts < d).any()):
            w = v.weight.unflatten(0, (heads, -1)).mT  # W (H_kv, d, e)
            if self._samples:
                law = feature_law(w)  # eq. 6
                picks = draw_features(law, counts, **self._lists(valid, call))
                rough = sampled_product(v.x.unsqueeze(1), w, law, picks, counts)  # eq. 5
            else:
                rough = center @ w
            if v.bias is not None:
                rough = rough + v.bias.view(heads, 1, -1)
            values = torch.where((counts == d).unsqueeze(-1), values, rough)
        return weights @ values.repeat_interleave(call.groups, dim=1)

    def fast(self, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> Tensor:
        """Projects the tokens with r_j = d only, and adds one row of W for each sample of the others."""
        assert isinstance(v, Projection)
        if call.mask.causal:
            return self._by_row(q, k, v, call)
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        weights, valid, counts, center = self._weigh(q, k, v, call)
        if bool((counts == d).all()):
            values = v.project(heads)
        else:
            values = self._fill(self._project(v, valid, counts, call), v, counts, center)
        return weights @ values.repeat_interleave(call.groups, dim=1)

    def native(self, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> Tensor | None:
        """Finds M_j, samples and projects by kernels, and leaves A H to exact attention; no matrix A is made."""
        assert isinstance(v, Projection)
        if call.mask.pattern is not None or call.mask.causal or v.x.shape[-1] == 0:
            return None  # a mask or counts by query are as large as A; without features there is nothing to sample
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        valid, counts, lse = self._count(q, k, v, call)
        call.note(counts=counts, tokens=valid.sum(-1))
        center = v.x.new_zeros(1, 1, 1, d)
        if bool((counts == d).all()):
            values = v.project(heads)
        else:
            if self.estimator == "mean":
                center = mean_token(v.x, valid)
            values = self._fill(_ByKernel.apply(*v, self, valid, counts, call), v, counts, center)
        quiet = replace(call, statistics=None)
        if call.noted:
            # As wide as the queries: torch's attention holds all of A where the widths differ.
            off = _deviation(v, center, counts).unsqueeze(-1)
            certificate = _attend(q, k, torch.nn.functional.pad(off, (0, q.shape[-1] - 1)), quiet)[..., 0]
            self._note(lse, certificate, v, valid, counts, call)
        return _attend(q, k, values, quiet)

    def _reference_by_row(self, q: Tensor, k: Tensor, v: Projection, call: Call) -> Tensor:
        """Causal calls: r_ij in place of r_j."""
        (batch, _, n_q, _), n_k, d = q.shape, k.shape[2], v.x.shape[-1]
        heads = q.shape[1] // call.groups
        weights, lse = dense.softmax(dense.logits(q, k, call))  # A (B, H, n_q, n_k), exact
        visible = call.mask.visible(n_q, n_k, q.device)
        assert visible is not None
        seen = visible.expand(batch, q.shape[1], n_q, n_k).unflatten(1, (heads, -1)).any(2)
        received = weights.detach().unflatten(1, (heads, -1)).amax(2)
        if call.mask.influence is not None:
            received = received.masked_fill(~call.mask.influence[:, None, :, None], 0.0)
        received = running_maximum(received)  # M (B, H_kv, n_q, n_k)
        counts = self._budget(received, seen.sum(-1), d)  # r
        values, w = v.project(heads), v.weight.unflatten(0, (heads, -1)).mT
        bias = 0.0 if v.bias is None else v.bias.view(heads, 1, -1)

        def grouped(t: Tensor) -> Tensor:
            return t.repeat_interleave(call.groups, dim=1)

        if self._samples:
            counts = torch.tensor(levels(d), device=q.device)[level_of(counts, d).long()]
            out, law = torch.zeros((), dtype=q.dtype, device=q.device), feature_law(w)
            lists = self._lists(_kept(call, batch, heads, n_k), call)
            for r in counts.unique().tolist():
                if r < d:
                    same = torch.full((batch, heads, n_k), r, device=q.device)
                    picks = draw_features(law, same, **lists)
                    values_r = sampled_product(v.x.unsqueeze(1), w, law, picks, same) + bias
                else:
                    values_r = values
                out = out + weigh(weights * grouped(counts == r), grouped(values_r))
        else:
            exact = grouped(counts == d)
            center = v.x.new_zeros(1, 1, 1, d)
            if self.estimator == "mean":
                center = seen.to(q.dtype) / seen.sum(-1, keepdim=True).clamp_min(1) @ v.x.unsqueeze(1)
            rough = (center @ w + bias).expand(batch, heads, -1, -1)  # (B, H_kv, n_q or 1, e)
            out = weigh(weights * exact, grouped(values)) + (weights * ~exact).sum(-1, keepdim=True) * grouped(rough)
        if call.statistics is not None:
            by_head = weights.unflatten(1, (heads, -1)), lse.unflatten(1, (heads, -1))
            facts = []
            for i in range(batch * heads):
                b, h = divmod(i, heads)
                blocks = cut_rows(by_head[0][b, h], by_head[1][b, h], seen[b, h], counts[b, h], d)
                facts.append(self._facts(blocks, v, b, h, heads, call))
            self._note_rows(facts, batch, _kept(call, batch, heads, n_k), call)
        return out

    def _by_row(self, q: Tensor, k: Tensor, v: Projection, call: Call) -> Tensor:
        """The same one key-value head at a time; what has to be sampled is known when all its rows are weighed."""
        (batch, _, n_q, _), n_k, d = q.shape, k.shape[2], v.x.shape[-1]
        heads = q.shape[1] // call.groups
        if self.alpha == 0 and not call.noted:
            return _attend_finite(q, k, v.project(heads), call)
        visible = call.mask.visible(n_q, n_k, q.device)
        assert visible is not None
        bias = call.mask.bias

        def of_head(t: Tensor, b: int, h: int) -> Tensor:  # (g or 1, n_q, n_k)
            t = t[b if len(t) > 1 else 0].expand(-1, n_q, n_k)
            return t if len(t) == 1 else t[h * call.groups : (h + 1) * call.groups]

        def budget(received: Tensor, tokens: Tensor) -> Tensor:
            return self._budget(received, tokens, d)

        kept = _kept(call, batch, heads, n_k)
        lists = self._lists(kept, call)
        draws, ranks = lists.pop("draws"), lists.pop("ranks")
        xs, ws = v.x.unbind(0), v.weight.unflatten(0, (heads, -1)).mT.unbind(0)
        bs = None if v.bias is None else v.bias.view(heads, -1).unbind(0)
        qs = q.unflatten(1, (heads, -1)).flatten(0, 1).unbind(0)
        ks = k[:, :: call.groups].flatten(0, 1).unbind(0)
        outs, facts = [], []
        for i, (mine, keys) in enumerate(zip(qs, ks, strict=True)):
            b, h = divmod(i, heads)
            blocks = weigh_rows(
                mine, keys, of_head(visible, b, h), None if bias is None else of_head(bias, b, h),
                None if call.mask.influence is None else call.mask.influence[b], call.scale, budget, d,
            )  # fmt: skip
            used = used_levels([block.codes for block in blocks], n_k, d)
            if self._samples:
                own = Draws(draws.seed, draws.streams[h : h + 1])
                table = versions(xs[b], ws[h], used, ranks[b, h], own, **lists)
                parts = [weigh_versions(a.weights, table[:, : a.codes.shape[-1]], a.codes) for a in blocks]
            else:
                parts = self._whole_rows(blocks, xs[b], ws[h], used[-1])
            if bs is not None:
                parts = [part + a.weights.sum(-1, keepdim=True) * bs[h] for part, a in zip(parts, blocks, strict=True)]
            outs.append(torch.cat(parts, dim=1))
            if call.statistics is not None:
                facts.append(self._facts(blocks, v, b, h, heads, call))
        if call.statistics is not None:
            self._note_rows(facts, batch, kept, call)
        return torch.stack(outs).unflatten(0, (batch, heads)).flatten(1, 2)

    def _whole_rows(self, blocks: list[RowBlock], x: Tensor, w: Tensor, exact: Tensor) -> list[Tensor]:
        """Without the bias. "mean" projects all tokens: the mean of those that a row sees is the projected mean."""
        if self.estimator == "drop":
            values = project_blocks(x, w, exact)
            return [weigh(a.weights * (a.codes > 0), values[: a.codes.shape[-1]]) for a in blocks]
        values = x @ w
        parts = []
        for a in blocks:
            rest = (a.weights * (a.codes == 0)).sum(-1, keepdim=True)
            parts.append(weigh(a.weights * (a.codes > 0) + rest * a.share, values[: a.codes.shape[-1]]))
        return parts

    def _facts(
        self, blocks: list[RowBlock], v: Projection, b: int, h: int, heads: int, call: Call
    ) -> dict[str, Tensor]:
        used = used_levels([block.codes for block in blocks], v.x.shape[1], v.x.shape[-1])
        work = row_work(blocks, used, v.x.shape[-1], estimator=self.estimator)
        if not call.noted:
            return work
        size = v.weight.unflatten(0, (heads, -1))[h].norm()
        return work | row_facts(blocks, used, v.x[b], size, estimator=self.estimator)

    def _note_rows(self, facts: list[dict[str, Tensor]], batch: int, kept: Tensor, call: Call) -> None:
        found = stack_facts(facts, batch)
        if "bound" in found:
            bound = found.pop("bound")
            if self._samples:
                found["bound"] = self.alpha * bound
            for name in ("lse", "certificate"):
                found[name] = found[name].flatten(1, 2)
        call.note(**found, tokens=kept.sum(-1))

    def _count(self, q: Tensor, k: Tensor, v: Projection, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Which keys count and r (B, H_kv, n_k), by a kernel; the log-sum-exp (B, H, n_q)."""
        batch, heads, n_k, d = q.shape[0], q.shape[1] // call.groups, k.shape[2], v.x.shape[-1]
        largest, lse = received(q.detach(), k.detach(), call.mask.keep, call.mask.influence, call.scale)
        weight = largest.unflatten(1, (heads, -1)).amax(2)
        valid = _kept(call, batch, heads, n_k)
        return valid, self._budget(weight, valid.sum(-1), d), lse

    def _project(self, v: Projection, valid: Tensor, counts: Tensor, call: Call) -> Tensor:
        """H + b (B, H_kv, n_k, e) by plain PyTorch; tokens without samples give b."""
        heads = counts.shape[1]
        w = v.weight.unflatten(0, (heads, -1)).mT
        if self._samples:
            values = ragged_product(v.x, w, feature_law(w), counts, **self._lists(valid, call))
        else:
            values = v.x.new_zeros(1).expand(*counts.shape, w.shape[-1])
        values = project_rows(v.x, w, counts == v.x.shape[-1], values)
        return values if v.bias is None else values + v.bias.view(heads, 1, -1)

    def _fill(self, values: Tensor, v: Projection, counts: Tensor, center: Tensor) -> Tensor:
        """Puts the projected mean where estimator="mean" replaces a token."""
        if self.estimator != "mean":
            return values
        filled = values + center @ v.weight.unflatten(0, (counts.shape[1], -1)).mT
        return torch.where((counts == v.x.shape[-1]).unsqueeze(-1), values, filled)

    def _budget(self, received: Tensor, tokens: Tensor, features: int) -> Tensor:
        counts = sample_counts(received, tokens, self.alpha, features)  # eq. 9
        return counts if self._samples else whole_counts(received, counts, features)

    def _weigh(self, q: Tensor, k: Tensor, v: Projection, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A (B, H, n_q, n_k); which keys count and r (B, H_kv, n_k); what replaces an inexact token (.., .., 1, d)."""
        heads, d = q.shape[1] // call.groups, v.x.shape[-1]
        weights, lse = dense.softmax(dense.logits(q, k, call))  # exact
        valid, received = _received(weights.detach(), heads, call)  # M (B, H_kv, n_k)
        counts = self._budget(received, valid.sum(-1), d)
        call.note(counts=counts, tokens=valid.sum(-1))
        center = v.x.new_zeros(1, 1, 1, d)
        if self.estimator == "mean" and bool((counts < d).any()):
            center = mean_token(v.x, valid)
        if call.noted:
            certificate = weights @ _deviation(v, center, counts).repeat_interleave(call.groups, dim=1).unsqueeze(-1)
            self._note(lse, certificate.squeeze(-1), v, valid, counts, call)
        return weights, valid, counts, center

    def values(self, v: Projection, received: Tensor, valid: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """H + b (B, H, n_k, e) and r for attention that others compute: M and which tokens count are (B, H, n_k)."""
        heads, d = received.shape[1], v.x.shape[-1]
        counts = self._budget(received, valid.sum(-1), d)
        if bool((counts == d).all()):
            return v.project(heads), counts
        call = Call(scale=1.0, mask=Mask(), draws=draws)
        center = mean_token(v.x, valid) if self.estimator == "mean" else v.x.new_zeros(1, 1, 1, d)
        if native.ready(v.x) and d > 0:
            values = _ByKernel.apply(*v, self, valid, counts, call)
        else:
            values = self._project(v, valid, counts, call)
        return self._fill(values, v, counts, center), counts

    @property
    def _samples(self) -> bool:
        return self.estimator in ("sample", "stratified")

    def _lists(self, valid: Tensor, call: Call) -> dict[str, Any]:
        return {
            "ranks": (valid.long().cumsum(-1) - 1).clamp_min(0),
            "draws": Draws(call.draws.seed, call.draws.streams[:: call.groups]),
            "shared": self.samples == "shared",
            "stratified": self.estimator == "stratified",
        }

    def _note(self, lse: Tensor, certificate: Tensor, v: Projection, valid: Tensor, counts: Tensor, call: Call) -> None:
        d, tokens = max(v.x.shape[-1], 1), valid.sum(-1).clamp_min(1)
        rate = (counts * valid).sum(-1).double() / (tokens * d)
        call.note(lse=lse, rate=rate, padded_rate=counts.double().mean(-1) / d, certificate=certificate)
        if self._samples:
            beta = (v.x.unsqueeze(1).norm(dim=-1) * valid).sum(-1) / tokens
            call.note(bound=self.alpha * beta * _size(v, counts))

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, alpha=0.0)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        """Without statistics every token is taken to need all its features: the counts depend on the data.

        A sample counts as a multiply-add for each of the e columns. The random numbers, which are no FLOPs, and the
        search for the features are not counted; they can take more time than all the rest.
        """
        if shape.causal:
            return self._cost_by_row(shape, statistics)
        units, tokens = shape.batch * shape.heads, shape.batch * (shape.kv_heads or shape.heads) * shape.keys
        d, rate, draws = shape.in_features or 0, 1.0, 0.0
        if statistics is not None:
            counts = statistics["counts"]
            rate = float(statistics["padded_rate"].mean())
            draws = tokens * float((counts * (counts < d)).double().mean())
        flops = units * shape.pairs * (2 * shape.head_dim + 1 + 2 * shape.value_dim) + rate * shape.projection_flops
        if self.estimator == "mean" and rate < 1:
            flops += 2.0 * tokens * d * (1 + shape.value_dim / max(shape.keys, 1))
        # Projected tokens are gathered one head at a time; a draw takes ten to twenty numbers of eight bytes.
        room = units * shape.pairs + tokens * shape.value_dim + shape.batch * shape.keys * d + 32 * draws
        return Cost(flops, 4.0 * room, float(shape.keys))

    def _cost_by_row(self, shape: Shape, statistics: Mapping[str, Tensor] | None) -> Cost:
        heads, d, e = shape.kv_heads or shape.heads, shape.in_features or 0, shape.value_dim
        units, tokens = shape.batch * shape.heads, shape.batch * heads * shape.keys
        if self.alpha == 0:
            exact = method("exact").cost(shape)
            return exact._replace(bytes=exact.bytes + 4.0 * tokens * e)
        products, terms = 1.0, float(d)
        if statistics is not None:
            if "products" not in statistics:
                raise ValueError("statistics: no 'products' for a causal shape; inspect() a call with is_causal=True")
            products, terms = (float(statistics[name].double().mean()) for name in ("products", "terms"))
        pairs = block_pairs(shape.queries, shape.keys)
        flops = units * pairs * (2.0 * shape.head_dim + 1 + 2 * e * products) + 2.0 * e * tokens * terms
        # One key-value head at a time: its weights and level numbers, the versions of its values, its draws.
        room = pairs * (shape.heads / heads + 0.25) + shape.keys * e * len(levels(d)) + 32 * shape.keys * terms
        visible = shape.batch * shape.queries * shape.keys / 4
        return Cost(flops, 4.0 * (room + visible), shape.pairs / max(shape.queries, 1))


class _ByKernel(torch.autograd.Function):
    """`MonteCarlo._project` by a kernel; the gradient, with the same samples, by plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, method: MonteCarlo, valid: Tensor, counts: Tensor,
        call: Call,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, valid, counts)
        ctx.method, ctx.call = method, call
        lists = method._lists(valid, call)
        draws, shared = lists["draws"], lists["shared"]
        return sampled_projection(
            x, weight, bias, counts, lists["ranks"], draws.streams, draws.signed_seed, purpose(shared), shared,
            lists["stratified"],
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, valid, counts = ctx.saved_tensors
        asked = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves: list[Any] = [
                t if t is None else t.detach().requires_grad_(a) for t, a in zip(tensors, asked, strict=True)
            ]
            values = ctx.method._project(Projection(*leaves), valid, counts, ctx.call)
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(values, wanted, grad))
        return (*(next(found) if a else None for a in asked), None, None, None, None)


def _size(v: Projection, counts: Tensor) -> Tensor:
    """|W_h|_F (H_kv,)."""
    return v.weight.unflatten(0, (counts.shape[1], -1)).flatten(1).norm(dim=-1)


def _deviation(v: Projection, center: Tensor, counts: Tensor) -> Tensor:
    """A bound of the root mean square error of each token's value (B, H_kv, n_k).

    |x_j| |W|_F / sqrt(r_j) for a sampled token (Lemma 1), |x_j - c| |W|_F for one that is replaced, 0 for an exact one.
    """
    x = v.x.unsqueeze(1)
    off = (x - center).norm(dim=-1) * counts.clamp_min(1).to(x.dtype).rsqrt() * (counts < x.shape[-1])
    return off * _size(v, counts).unsqueeze(-1)


def _kept(call: Call, batch: int, heads: int, n_k: int) -> Tensor:
    """(B, H_kv, n_k): which keys are no padding."""
    if call.mask.keep is None:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=call.draws.streams.device).expand(batch, heads, n_k)
    return call.mask.keep[:, None].expand(batch, heads, n_k)


def _attend(q: Tensor, k: Tensor, values: Tensor, call: Call) -> Tensor:
    """A times the values of the key-value heads, as exact attention runs it."""
    exact, values = method("exact"), values.repeat_interleave(call.groups, dim=1)
    out = exact.native(q, k, values, call)
    return exact.fast(q, k, values, call) if out is None else out


def _attend_finite(q: Tensor, k: Tensor, values: Tensor, call: Call) -> Tensor:
    """`_attend`, where a value that overflowed spoils only the rows that use it: 0 * inf would be NaN."""
    bad = ~values.detach().isfinite()
    if not bool(bad.any()):
        return _attend(q, k, values, call)
    hit = _attend(q.detach(), k.detach(), bad.to(values.dtype), call) != 0
    return _attend(q, k, values.masked_fill(bad, 0.0), call).masked_fill(hit, torch.nan)


def _received(weights: Tensor, heads: int, call: Call) -> tuple[Tensor, Tensor]:
    """Per key-value head: which keys some query may see, and M_j, the largest weight that a valid query gives to j."""
    batch, _, n_q, n_k = weights.shape
    weights = weights.unflatten(1, (heads, -1))  # (B, H_kv, groups, n_q, n_k)
    visible = call.mask.visible(n_q, n_k, weights.device)
    valid = torch.ones(batch, heads, n_k, dtype=torch.bool, device=weights.device)
    if visible is not None:
        valid = visible.any(-2).expand(batch, heads * call.groups, n_k).unflatten(1, (heads, -1)).any(2)
    counted = None if call.mask.influence is None else call.mask.influence[:, None].expand(batch, heads, n_q)
    if counted is None and call.mask.pattern is not None and n_q == n_k:
        counted = valid  # padding that was written out as a full mask
    if counted is not None:
        weights = weights.masked_fill(~counted[:, :, None, :, None], 0.0)
    return valid, weights.amax((2, 3))
