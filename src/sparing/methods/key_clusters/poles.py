"""Clusters of keys, and their summaries, which stand for the members in queries that do not read these.

Around the mean query q0 a cluster's sum is known exactly, so the expansion starts there: for another query the logit of
member j, s q.k_j, is replaced by s (q.K + q0.(k_j - K)), with K the mean key under the weights w_j = exp(s q0.k_j). All
members then share what depends on q, and sum_j exp(...) v_j = exp(s q.K + offset) W V with W = sum_j w_j and V the mean
value under the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparing import native
from sparing.call import Call
from sparing.draws import Draws
from sparing.methods.key_clusters.clusters import Moments, Rows, factor, rows_at, sample, spread_out, sums
from sparing.methods.key_clusters.native import summaries

FAINTEST = -8.0  # the least log-weight of a member, so that none is lost in rounding
NOTHING = 1e-9  # smaller variances of logits are rounding errors and are taken to be zero
_TEACHERS = 1024  # largest number of queries that a metric is computed from, if not causal
_LESSON = 16  # rows per cluster that k-means learns from
BLOCKS = 4  # number of blocks in a chunk
REMEMBER = 2 ** (-1 / BLOCKS)  # factor of a query's weight in the moments per block: half of it is left after a chunk
CHUNK, BLOCK = "key_clusters chunk", "key_clusters block"  # purposes of random numbers

Cluster = Callable[[Tensor, Tensor, Tensor, Rows, Rows], Tensor]  # `clusters.cluster` with a number of steps


class Level(NamedTuple):
    """One way to cut the keys into chunks, each with its own clusters, and to describe these."""

    size: int  # keys of a chunk
    clusters: int  # clusters of a chunk
    labels: Tensor  # (B, H, n_k) cluster of each key, numbered through all chunks; -1 for none
    known: Moments  # (B, H, T, ...) moments of the queries by which each chunk is described

    @property
    def chunks(self) -> int:
        """The number of complete chunks."""
        return self.known.mean.shape[2]


@dataclass(frozen=True)
class Plan:
    """What is decided before a logit is computed. Keys are numbered by their rank among the valid ones."""

    levels: tuple[Level, ...]
    seen: Tensor  # (B, n_q): a query sees the keys of ranks below this
    own: Tensor  # (B, n_q): the rank of a query's own key
    block: int | None  # causal: size of a block; a query reads the keys of its own block

    def open(self, level: int, chunk: Tensor, own: Tensor) -> Tensor:
        """Return whether a query whose key has the rank `own` sees the clusters of this chunk of a level."""
        if self.block is None:
            return torch.ones_like(chunk + own, dtype=torch.bool)
        mine = own // (self.block * BLOCKS)
        if level == 0:  # the clusters of blocks stand in for those of the chunk that is not complete
            return (chunk < own // self.block) & (chunk >= mine * BLOCKS)
        return chunk == mine - 1 if level == 1 else chunk < mine - 1


class Poles(NamedTuple):
    """Summaries of the clusters of a level, C = T c in all."""

    keys: Tensor  # (B, H, C, d) K
    values: Tensor  # (B, H, C, e) V
    offset: Tensor  # (B, H, C)
    weight: Tensor  # (B, H, C) W
    shares: Tensor  # (B, H, n_k) log w_j
    members: Tensor  # (B, H, C) number of members
    spread: Tensor  # (B, H, C) variance of the members' logits for an average query; no gradient
    scatter: Tensor  # (B, H, C) variance of the members' values; no gradient


@torch.no_grad()
def plan(
    q: Tensor, k: Tensor, call: Call, sinks: int, chunk: int, clusters_of: Callable[[int], int], cluster: Cluster
) -> Plan:
    """Cluster the keys k (B, H, n_k, d), valid ones first, by the given k-means."""
    batch, _, n_q, _ = q.shape
    n_k = k.shape[2]
    everything = torch.ones(batch, n_k, dtype=torch.bool, device=k.device)
    present = everything if call.mask.keep is None else call.mask.keep
    count = present.sum(-1, keepdim=True)
    place = torch.arange(n_k, device=k.device)
    tells = everything.new_ones(batch, n_q) if call.mask.influence is None else call.mask.influence
    position = torch.arange(n_q, device=q.device).clamp_max(n_k - 1)
    seen = present.long().cumsum(-1)[:, position]
    own = seen - 1
    if not call.mask.causal:
        rows, tells = sample(q, tells, _TEACHERS)
        known = sums(rows, tells, rows.shape[2]).moments
        usable = (place >= sinks) & (place < count - sinks)
        wanted = torch.tensor([[clusters_of(int(each))] for each in count], device=k.device)
        level = cluster_chunks(k, usable, known, n_k, wanted, call.draws, "key_clusters", cluster)
        return Plan((level,), count.expand(-1, n_q), own, None)
    n, block = min(n_q, n_k), chunk // BLOCKS
    blocks = n // block
    if blocks == 0:
        return Plan((), seen, own, block)
    # Queries in the order of their keys' ranks: a chunk of keys knows the queries up to its end, or, once the next
    # chunk is complete too, up to that one's end. Later queries are more like these, above all where positions rotate.
    order = (~present[:, :n]).long().argsort(dim=-1, stable=True)[:, : blocks * block]
    tells = (tells[:, :n] & present[:, :n]).gather(1, order)
    known = sums(rows_at(q, order), tells, block, REMEMBER).moments
    usable = (place >= sinks) & (place < count)
    wanted = torch.tensor([[clusters_of(chunk)]], device=k.device)
    levels: tuple[Level, ...] = (
        cluster_chunks(k, usable, known, block, -(-wanted // BLOCKS), call.draws, BLOCK, cluster),
    )
    if chunks := n // chunk:
        ends = known.at(torch.arange(BLOCKS - 1, chunks * BLOCKS, BLOCKS, device=q.device))
        levels += (cluster_chunks(k, usable, ends, chunk, wanted, call.draws, CHUNK, cluster),)
    if chunks > 1:
        levels += (later(levels[1], ends.at(torch.arange(1, chunks, device=q.device))),)
    return Plan(levels, seen, own, block)


def cluster_chunks(
    k: Tensor, usable: Tensor, known: Moments, size: int, wanted: Tensor, draws: Draws, purpose: str, cluster: Cluster,
    first: int = 0,
) -> Level:  # fmt: skip
    """Cluster each chunk of `size` keys of k (B, H, n_k, d), of which only the `usable` (B, n_k) get a cluster.

    known: moments of the queries for each chunk. wanted: (B or 1, T or 1) number of clusters of a chunk. first: the
    number of the first chunk, on which its random numbers depend.
    """
    batch, heads, n_k, _ = k.shape
    chunks = known.mean.shape[2]
    used = chunks * size
    valid = usable[:, :used].unflatten(1, (chunks, size))  # (B, T, size)
    wanted = wanted.expand(batch, chunks)
    start = spread_out(valid, wanted, draws, purpose, first)
    lesson = spread_out(valid, _LESSON * wanted, draws, f"{purpose} lesson", first)
    clusters = start.place.shape[-1]
    found = cluster(k, factor(known.second), valid, start, lesson)
    found = torch.where(found < 0, -1, found + clusters * torch.arange(chunks, device=k.device).view(-1, 1))
    labels = torch.full((batch, heads, n_k), -1, device=k.device)
    labels[:, :, :used] = found.flatten(2)
    return Level(size, clusters, labels, known)


def later(level: Level, known: Moments) -> Level:
    """Return the first chunks of a level, as many as `known` has: the same clusters, described by these queries."""
    total = known.mean.shape[2] * level.clusters
    return level._replace(labels=level.labels.masked_fill(level.labels >= total, -1), known=known)


@torch.no_grad()
def alarm(q: Tensor, plan: Plan, rows: slice) -> Tensor:
    """Return |q - q0|^2 over its mean, (B, H, rows), to which the variance of a cluster's logits is proportional."""
    known, own = plan.levels[0].known, plan.own[:, rows]
    # The last block before the query's; a growing sequence keeps the moments of that one only.
    at = torch.zeros_like(own) if plan.block is None else (own // plan.block - 1).clamp(0, known.mean.shape[2] - 1)
    away = q[:, :, rows] - known.mean.to(q.dtype).take_along_dim(at[:, None, :, None], dim=2)
    variance = known.variance.to(q.dtype).take_along_dim(at[:, None], dim=2)
    return away.square().sum(-1) / variance.masked_fill(variance <= 0, torch.inf)


def summarise(k: Tensor, v: Tensor, level: Level, scale: float) -> Poles:
    """Return the summaries of one level. The gradient holds clusters and mean query fixed."""
    batch, heads, n_k, _ = k.shape
    total = level.chunks * level.clusters
    used = level.chunks * level.size
    member = level.labels >= 0
    slot = torch.where(member, level.labels, total)  # keys outside all clusters go into one that is cut off
    first = level.known.mean.to(k.dtype)  # (B, H, T, d)
    lean = k.new_zeros(batch, heads, n_k)
    lean[:, :, :used] = (scale * k[:, :, :used].unflatten(2, (-1, level.size)) @ first.unsqueeze(-1)).flatten(2)
    top = k.new_full((batch, heads, total + 1), -torch.inf).scatter_reduce(2, slot, lean.detach(), "amax")
    shares = (lean - top.gather(2, slot)).clamp_min(FAINTEST)
    w = shares.exp()

    def sums(x: Tensor) -> Tensor:
        """Return the weighted sums over each cluster: (B, H, n_k, m) -> (B, H, C, m)."""
        into = x.new_zeros(batch, heads, total + 1, x.shape[-1])
        return into.scatter_add(2, slot.unsqueeze(-1).expand_as(x), w.unsqueeze(-1) * x)[:, :, :total]

    weight = sums(torch.ones_like(lean).unsqueeze(-1))
    part = weight.masked_fill(weight == 0, 1.0)
    keys, values = sums(k) / part, sums(v) / part
    chunk_of = first.repeat_interleave(level.clusters, dim=2)  # (B, H, C, d)
    top = top[:, :, :total].masked_fill(weight.squeeze(-1) == 0, 0.0)
    offset = top - scale * (chunk_of * keys).sum(-1)
    with torch.no_grad():
        count = torch.zeros_like(weight.squeeze(-1))
        count.scatter_add_(2, slot.clamp_max(total - 1), member.to(k.dtype))
        away = k - _of_members(keys, slot)  # from the mean of the key's cluster
        covariance = level.known.covariance.to(k.dtype)
        turned = torch.zeros_like(away)
        turned[:, :, :used] = (away[:, :, :used].unflatten(2, (-1, level.size)) @ covariance).flatten(2, 3)
        spread = scale * scale * sums((turned * away).sum(-1, keepdim=True)) / part
        scatter = sums((v - _of_members(values, slot)).square().sum(-1, keepdim=True)) / part
    spread = spread.squeeze(-1).nan_to_num(nan=0.0)  # huge keys overflow; their logits are saturated anyway
    spread = spread.masked_fill(spread < NOTHING, 0.0)
    return Poles(keys, values, offset, weight.squeeze(-1), shares, count, spread, scatter.squeeze(-1))


def described(k: Tensor, v: Tensor, level: Level, scale: float) -> tuple[Tensor, ...]:
    """Return mean keys, weighted sums of values, offset, weight, spread, scatter of clusters, and weights of keys."""
    if native.ready(k):
        mean, covariance = level.known.mean.to(k.dtype), level.known.covariance.to(k.dtype)
        return summaries(k, v, level.labels, mean, covariance, level.clusters, scale, FAINTEST, NOTHING)
    found = summarise(k, v, level, scale)
    total = found.values * found.weight.unsqueeze(-1)
    shares = found.shares.exp().masked_fill(level.labels < 0, 0.0)
    return found.keys, total, found.offset, found.weight, found.spread, found.scatter, shares


def _of_members(x: Tensor, slot: Tensor) -> Tensor:
    """Return the row of each key's cluster, (B, H, C, m) -> (B, H, n_k, m); rows of keys without one are arbitrary."""
    return x.take_along_dim(slot.clamp_max(x.shape[2] - 1).unsqueeze(-1), dim=2)
