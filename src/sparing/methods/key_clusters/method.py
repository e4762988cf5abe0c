"""Attention to few keys, and to clusters of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob, method
from sparing.maths import dense
from sparing.maths.by_kernel import ByKernel
from sparing.maths.packing import valid_first
from sparing.methods.key_clusters import native, poles
from sparing.methods.key_clusters.clusters import cluster, native_cluster
from sparing.methods.key_clusters.poles import BLOCKS, Plan, Poles

_SCORES = 2**22  # logits that are held at once
_LIGHT = 1 / 16  # summaries below this part of the tolerance and of an equal share of the mass are left out


@dataclass(frozen=True, kw_only=True)
class KeyClusters(Method):
    """Softmax attention that reads few keys and summaries of the others; made for pretrained weights.

    out_i = softmax_j(l_ij) v_j,  l_ij = s q_i.k_j if j is near, a sink or in an expanded cluster,
                                  l_ij = s (q_i.K_c + q0.(k_j - K_c)) + min(a_ic, cap) / 2 if j is in another cluster c

    Keys are clustered by k-means in the metric of the queries; q0 is the mean query (queries longer than 16 times the
    median count as if they were that long), K_c a cluster's mean key. The members of a cluster share what depends on
    q_i, so that a query reads one summary for all of them (within a cluster exp(s q0.k_j) is taken to be at least e^-8
    of the largest). a_ic is the predicted variance of the logits of c, and
    e_ic = (mass of c) * sqrt(expm1(min(a_ic, cap))) * (spread of the values of c) the predicted error of the *output*.
    Each query expands the clusters of the largest e_ic^2 per key until `keys` keys are spent. A budget of all keys is
    exact attention. With a tolerance, `keys` is a maximum: clusters with e_ic^2 per key <= (tolerance * mass of all
    keys * usual spread of values in a cluster)^2 stay summaries, so that queries and heads read what they need, and
    summaries whose share of the mass is below a sixteenth of both the tolerance and an equal share are left out.

    Causal: keys are clustered once a chunk is complete, knowing the queries up to its end (each counts half as much a
    chunk later), and a quarter of a chunk at a time before; a query sees its own quarter exactly. When the next chunk
    is complete, the clusters are described again, by the queries up to there. As the sequence grows, a key is clustered
    at most twice.

    After clustered attention (Vyas et al. 2020), Multipole Attention (Hooper et al. 2025) and the fast multipole
    method. `inspect()` notes, each [B, H, n_q], `error`: the predicted distance to exact attention, `touched`: the keys
    and summaries that a query read, and `exact`: whether it read no summary. The gradient holds clusters, expansions,
    q0 and a_ic fixed.

    clusters: number of clusters of all keys or, if causal, of each chunk; a float is their ratio to the keys.
    keys: number of keys that a query may read in the clusters that it expands.
    window: number of neighbours of the query's own key that are exact: half on each side, all before it if causal.
        Unused in cross attention (n_q != n_k).
    sinks: number of first keys that every query reads; if not causal, also of last keys.
    order: 2 corrects the mass of a cluster for the variance of its logits, 1 does not.
    cap: larger predicted variances a_ic are clipped to this; with a tolerance, 8 is better.
    tolerance: 0 spends all of `keys` on every query; a few thousandths read fewer keys for the same error.
    select: expand clusters by the predicted "error" of the output, or by their "mass" alone.
    chunk: if causal, number of keys that are clustered together; a multiple of 4.
    steps: number of k-means iterations.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="key_clusters(clusters=16, keys=32)", seed=0).shape
    torch.Size([1, 2, 300, 16])
    """

    name = "key_clusters"
    budget = "keys"
    supports = Supports(
        causal=True, lse=True, mixes_queries=True, stochastic=True, position_based=True, training_free=True
    )

    clusters: int | float = knob(64, kinds=(int, float))
    keys: int = knob(64, minimum=0)
    window: int = knob(32, minimum=0)
    sinks: int = knob(1, minimum=0)
    order: int = knob(2, choices=(1, 2))
    cap: float = knob(2.0, above=0.0)
    tolerance: float = knob(0.0, minimum=0.0)
    select: str = knob("error", choices=("error", "mass"))
    chunk: int = knob(512, minimum=4)
    steps: int = knob(4, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.clusters, float) and not 0.0 < self.clusters < 1.0:
            raise ValueError(f"key_clusters: clusters={self.clusters!r} as a ratio must be above 0 and below 1")
        if isinstance(self.clusters, int) and self.clusters < 1:
            raise ValueError(f"key_clusters: clusters={self.clusters!r} must be at least 1")
        if self.window % 2:
            raise ValueError(
                f"key_clusters: window={self.window} must be even: half of it lies on each side of the query"
            )
        if self.chunk % BLOCKS:
            raise ValueError(f"key_clusters: chunk={self.chunk} must be a multiple of {BLOCKS}")

    def clusters_of(self, keys: int) -> int:
        """Return the number of clusters for this many keys: at least 1, and never more than keys."""
        wanted = self.clusters if isinstance(self.clusters, int) else round(self.clusters * keys)
        return min(max(wanted, 1), max(keys, 1))

    def sides(self, n_q: int, n_k: int, causal: bool) -> tuple[int, int]:
        """Return how many keys before and after a query's own are exact; -1 if not even its own is."""
        if causal:
            return self.window, 0
        return (self.window // 2, self.window // 2) if n_q == n_k else (-1, -1)

    def plan(self, q: Tensor, k: Tensor, call: Call, cluster: Callable[..., Tensor] = cluster) -> Plan:
        """Return the clusters of keys that are sorted, valid ones first."""
        return poles.plan(q, k, call, self.sinks, self.chunk, self.clusters_of, partial(cluster, steps=self.steps))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        k, v = valid_first(call.mask.keep, k, v)
        plan = self.plan(q, k, call)
        described = [poles.summarise(k, v, level, call.scale) for level in plan.levels]
        n_q, rows = q.shape[2], max(_SCORES // max(q.shape[0] * q.shape[1] * k.shape[2], 1), 1)
        parts = [
            self.rows(q, k, v, plan, described, call.scale, call.mask.causal, slice(i, min(i + rows, n_q)))
            for i in range(0, n_q, rows)
        ]
        out, lse, error, read, summaries = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        call.note(lse=lse, error=error, touched=read + summaries, exact=summaries == 0)
        return out

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.covers(k.shape[2]) and not call.noted:  # nothing would be left to a summary
            return method("exact").fast(q, k, v, call)
        return self.reference(q, k, v, call)

    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, summaries: list[Poles], scale: float, causal: bool,
        rows: slice,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return output, log-sum-exp, predicted error, and numbers of keys and summaries read, for some queries."""
        n_k = k.shape[2]
        before, after = self.sides(q.shape[2], n_k, causal)
        every, q, seen, own = q, q[:, :, rows], plan.seen[:, rows, None], plan.own[:, rows, None]
        key = torch.arange(n_k, device=k.device)
        exact = (key >= own - before) & (key <= own + after) | (key < self.sinks)
        if plan.block is None:
            exact = exact | (key >= seen - self.sinks)
        else:
            exact = exact | (key // plan.block >= own // plan.block)
        visible = (key < seen)[:, None]  # (B, 1, n_q, n_k)
        exact = exact[:, None] & visible
        logits = q @ k.mT * scale
        if not plan.levels:
            weights, lse = dense.softmax(logits.masked_fill(~exact, -torch.inf))
            read = exact.sum(-1).expand_as(lse)
            return weights @ v, lse, torch.zeros_like(lse), read, torch.zeros_like(read)

        # The clusters of all levels, C in total, as each query sees them.
        cluster = torch.full_like(logits, -1, dtype=torch.long)  # (B, H, n_q, n_k) standing for a key
        share = torch.zeros_like(logits)
        scores: list[Tensor] = []
        base = 0
        for i, (level, pole) in enumerate(zip(plan.levels, summaries, strict=True)):
            total = level.chunks * level.clusters
            stands = (plan.open(i, key // level.size, own)[:, None]) & (level.labels >= 0).unsqueeze(2)
            cluster = torch.where(stands, level.labels.unsqueeze(2) + base, cluster)
            share = torch.where(stands, pole.shares.unsqueeze(2), share)
            shown = plan.open(i, torch.arange(total, device=k.device) // level.clusters, own)[:, None]
            shown = shown & (pole.members > 0).unsqueeze(2)
            score = q @ pole.keys.mT * scale + pole.offset.unsqueeze(2)
            scores.append(score.masked_fill(~shown, -torch.inf))
            base += total
        members, weight, spread, scatter = (
            torch.cat([getattr(pole, name) for pole in summaries], dim=2).unsqueeze(2)
            for name in ("members", "weight", "spread", "scatter")
        )
        believed = (spread * poles.alarm(every, plan, rows).unsqueeze(-1)).clamp_max(self.cap)
        score = torch.cat(scores, dim=-1)  # (B, H, n_q, C)
        if self.order == 2:
            score = score + believed / 2

        with torch.no_grad():  # which clusters to expand
            inside = cluster.clamp_min(0)
            taken = (exact & (cluster >= 0)).to(q.dtype)
            left = members - torch.zeros_like(score).scatter_add(-1, inside, taken)
            mass = weight - torch.zeros_like(score).scatter_add(-1, inside, taken * share.exp())
            left = left.masked_fill(score == -torch.inf, 0.0)
            top = dense.finite_or_zero(score.amax(-1, keepdim=True))
            mass = torch.where(left > 0, (score - top).exp() * mass, 0.0)
            error = mass.square() * believed.expm1() * scatter
            worth = (error if self.select == "error" else mass.square()) / left.clamp_min(1)
            if self.tolerance:
                near = (logits.masked_fill(~exact, -torch.inf).logsumexp(-1, keepdim=True) - top).exp()
                every, shown = near + mass.sum(-1, keepdim=True), score > -torch.inf
                least = self._least(every, members.masked_fill(~shown, 0.0), scatter)
                chosen = expand(worth.masked_fill(worth <= least, 0.0), left, self.keys)
                fair = shown.sum(-1, keepdim=True).clamp_min(1).to(q.dtype).reciprocal()
                light = (mass < _LIGHT * fair.clamp_max(self.tolerance) * every).gather(-1, inside) & (cluster >= 0)
            else:
                everything = (left.sum(-1, keepdim=True) <= self.keys) & (left > 0)
                chosen, light = expand(worth, left, self.keys) | everything, torch.zeros_like(exact)
        exact = exact | (chosen.gather(-1, inside) & (cluster >= 0))
        spared = torch.where(cluster >= 0, score.gather(-1, inside) + share, -torch.inf)
        logits = torch.where(exact, logits, spared).masked_fill(~visible | (light & ~exact), -torch.inf)
        weights, lse = dense.softmax(logits)
        missed = error.masked_fill(chosen, 0.0).sum(-1).sqrt()
        rest = torch.where(missed > 0, missed * (top.squeeze(-1) - dense.finite_or_zero(lse)).exp(), 0.0)
        return weights @ v, lse, rest, exact.sum(-1), ((left > 0) & ~chosen).sum(-1)

    def _least(self, mass: Tensor, members: Tensor, scatter: Tensor) -> Tensor:
        """Return the worth per key above which clusters are expanded.

        mass: that of all keys. members, scatter: those of the clusters.
        """
        least = (self.tolerance * mass).square()
        if self.select == "mass":
            return least
        known = torch.where(members > 0, members * scatter, 0.0)  # unseen clusters may hold anything, even inf
        return least * known.sum(-1, keepdim=True) / members.sum(-1, keepdim=True).clamp_min(1)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.covers(k.shape[2]) and not call.noted:
            return method("exact").native(q, k, v, call)
        return ByKernel.apply(q, k, v, self, call)

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `reference` by kernels, without a gradient."""
        k, v = valid_first(call.mask.keep, k, v)
        plan = self.plan(q, k, call, native_cluster)
        before, after = self.sides(q.shape[2], k.shape[2], call.mask.causal)
        described = [poles.described(k, v, level, call.scale) for level in plan.levels]
        out, lse, error, read, summaries = native.key_clusters(
            q, k, v, plan.seen, plan.own, *_laid_end_to_end(plan, k, v, described), before, after, self.sinks,
            plan.block or 0, self.keys, self.order == 2, self.select == "mass", self.cap, self.tolerance, call.scale,
        )  # fmt: skip
        call.note(lse=lse, error=error, touched=read + summaries, exact=summaries == 0)
        return out

    def covers(self, n_k: int) -> bool:
        return self.keys >= n_k and not self.tolerance

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, keys=max(shape.keys, 1), tolerance=0.0)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        n, d, e = shape.keys, shape.head_dim, shape.value_dim
        units = shape.batch * shape.heads
        together = min(self.chunk, n) if shape.causal else n
        each = self.clusters_of(together)
        lessons = (1 + self.steps * min(16 * each / max(together, 1), 1.0)) * (1 + 1 / BLOCKS if shape.causal else 1)
        described = 2 * d * d + 4 * (d + e)
        clustering = n * (2 * d * each * lessons + 4 * d * d + described * (3 if shape.causal else 1))
        poles_seen = each * (n / max(together, 1) / 2 if shape.causal else 1)
        near = (self.window + self.sinks + self.chunk / BLOCKS / 2) if shape.causal else self.window + 2 * self.sinks
        exact = min(self.keys + near, n / 2 if shape.causal else n)
        touched = min(poles_seen + exact, float(n))
        if statistics is not None and "touched" in statistics:
            touched = float(statistics["touched"].double().mean())
        work = shape.queries * (touched * (2 * d + 2 * e + 1) + 6 * poles_seen)
        held = n * (d + e) / max(together, 1) * each + n * (d + 8) + shape.queries * e
        return Cost(units * (work + clustering) + shape.projection_flops, 4.0 * units * held, touched)


def _laid_end_to_end(
    plan: Plan, k: Tensor, v: Tensor, described: list[tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """Concatenate all levels: mean and variance of the queries, summaries, labels, weights, and sizes of the levels."""
    if not plan.levels:
        batch, heads, n_k, d = k.shape
        none, rows = k.new_zeros(batch, heads, 0), k.new_zeros(batch, heads, 0, d)
        keys = k.new_zeros(0, batch, heads, n_k)
        sums = k.new_zeros(batch, heads, 0, v.shape[3])
        return rows, none, (rows, sums, none, none, none, none), keys.long(), keys, torch.zeros(0, 3, dtype=torch.long)
    summaries = tuple(torch.cat(parts, dim=2) for parts in zip(*(each[:6] for each in described), strict=True))
    labels, shares = torch.stack([x.labels for x in plan.levels]), torch.stack([each[6] for each in described])
    known, levels = plan.levels[0].known, torch.tensor([(x.size, x.clusters, x.chunks) for x in plan.levels])
    return known.mean.to(k.dtype), known.variance.to(k.dtype), summaries, labels, shares, levels


def expand(worth: Tensor, size: Tensor, budget: int) -> Tensor:
    """Return which of the clusters (..., C) to expand: repeatedly the best that still fits; none that is worth zero."""
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    left = torch.full_like(worth[..., :1], float(budget))
    while True:
        fits = (size <= left) & (worth > 0) & (size > 0) & ~chosen
        if not bool(fits.any()):
            return chosen
        best = torch.where(fits, worth, -1.0).argmax(-1, keepdim=True)
        found = fits.gather(-1, best)
        chosen = chosen.scatter(-1, best, chosen.gather(-1, best) | found)
        left = left - torch.where(found, size.gather(-1, best), 0.0)
