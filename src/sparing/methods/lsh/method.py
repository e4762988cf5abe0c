"""Hash-bucket attention: each query attends to the keys that share, or nearly share, its bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob
from sparing.maths import blocks, dense
from sparing.maths.hashing import rotation_buckets
from sparing.maths.linalg import unit_rows
from sparing.methods.lsh import arcs, native
from sparing.methods.lsh.rotation_law import log_collision, log_collision_law

_SCORES = 2**22  # most logits in memory at once


@dataclass(frozen=True, kw_only=True)
class Lsh(Method):
    """Softmax over the keys that random rotations sort next to the query (Kitaev et al. 2020; Value-aware A.1).

    out_i = sum_j w_ij exp(s q_i.k_j) v_j / sum_j w_ij exp(s q_i.k_j),  bucket(x) = argmax([-R x; R x]) per round

    w_ij = 0 for keys that no round shows. Keys are sorted by (bucket, position) and a query sees at most 2 * chunk of
    them per round. Sequences with at most `chunk` valid keys get exact attention. A query to which no round shows a
    key sees its own (if n_q = n_k). The gradient treats hash codes and hit probabilities as constants. The default
    number of buckets grows with the keys, so that hashing costs n^2 / chunk; fix `buckets` to keep it linear.
    `inspect()` notes `hits` [B, H, n_q]: the number of keys that the rounds show to a query, repeats counted.

    Causal: a query sees only keys of its own bucket up to its position, chunk by chunk from the bucket's start, the
    current and the previous one; masking the usual arc instead would let later tokens decide which earlier keys are
    seen. There is no error bound on weights that were trained with softmax attention.

    rounds: number of independent hash rounds.
    chunk: number of keys per chunk; a query sees two chunks per round.
    buckets: number of buckets per round, even, at most 65536; None for 2 * valid keys / chunk, rounded.
    combine: "union" counts every key that some round shows once. "sum" (the papers' choice) counts it as often as it
        was shown. "ips" takes keys of the query's own bucket only and divides the weight of each by its probability
        1 - (1 - p)^rounds of colliding in some round, where p is the probability for one round, given the angle between
        query and key. The sums are then unbiased, unless a bucket holds more than two chunks.
    align: "bucket" centres the arc of sorted keys on the query's bucket. "rank" (the papers' choice) sorts queries too,
        and chunk i of the queries sees chunks i and i - 1 of the keys, whatever their buckets; it needs n_q = n_k and
        cannot be causal.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="lsh(rounds=4, chunk=32)", seed=0).shape
    torch.Size([1, 2, 300, 16])
    """

    name = "lsh"
    budget = "rounds"
    supports = Supports(
        causal=True, lse=True, stochastic=True, position_based=True, native_16bit=True, training_free=True
    )

    rounds: int = knob(4, minimum=1)
    chunk: int = knob(64, minimum=1)
    buckets: int | None = knob(None, kind=int, minimum=2, maximum=2**16)
    combine: str = knob("union", choices=("union", "sum", "ips"))
    align: str = knob("bucket", choices=("bucket", "rank"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets is not None and self.buckets % 2:
            raise ValueError(f"lsh: buckets={self.buckets} must be even: each rotated direction and its opposite")
        if self.align == "rank" and self.combine == "ips":
            raise ValueError("lsh: combine='ips' needs align='bucket': ranks do not follow the collision law")

    def claims(self) -> Supports:
        # The rank of a query depends on later queries, and has no meaning if there are more or fewer keys.
        by_bucket = self.align == "bucket"
        return replace(
            type(self).supports, causal=by_bucket, cross_attention=by_bucket, mixes_queries=not by_bucket,
            native_16bit=self.combine != "ips",
        )  # fmt: skip

    def bucket_counts(self, count: Tensor) -> Tensor:
        """Return the number of buckets for each number of valid keys; keys that fit into a chunk share one."""
        many = 2 * (count / self.chunk).round().long().clamp_min(1)
        many = many if self.buckets is None else torch.full_like(count, self.buckets)
        return many.masked_fill(count <= self.chunk, 1)

    def rotations(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return R (H, rows, rounds, d) in float64, and the number of buckets (B or 1,)."""
        _, count = call.mask.key_ranks(k.shape[-2], k.device)
        buckets = self.bucket_counts(count)
        rows = max(int(buckets.max()) // 2, 1)
        # Rows are the first axis, so that an item that needs more of them does not change those of other items.
        return call.draws.normal("lsh.rotations", rows, self.rounds, q.shape[-1]), buckets

    def look_up(self, q: Tensor, k: Tensor, call: Call) -> tuple[list[arcs.Round], Tensor]:
        """Return the arcs of each round and the number of buckets (B or 1,), for `reference` and `fast`."""
        _, count = call.mask.key_ranks(k.shape[-2], k.device)
        tokens = arcs.Tokens(call.mask.keep, call.mask.influence, count, self.chunk)
        rotations, buckets = self.rotations(q, k, call)
        q = q if call.scale >= 0 else -q
        found = []
        for r in range(self.rounds):
            in_q, in_k = (rotation_buckets(x, rotations[:, :, r], buckets) for x in (q, k))  # (B, H, n)
            if self.align == "rank":
                found.append(arcs.by_rank(in_q, in_k, tokens))
            elif call.mask.causal:
                found.append(arcs.by_bucket_causal(in_q, in_k, tokens))
            else:
                found.append(arcs.by_bucket(in_q, in_k, tokens, strict=self.combine == "ips"))
        call.note(hits=torch.stack([r.end - r.begin for r in found]).sum(0))
        return found, buckets

    def scores(self, q: Tensor, k: Tensor, buckets: Tensor, call: Call) -> Tensor:
        """Return s q.k of (B, H, ..., a, d) and (B, H, ..., b, d), less log(1 - (1 - p)^rounds) for "ips"."""
        dots = q @ k.mT
        if self.combine != "ips":
            return dots * call.scale
        unit_q, unit_k = (unit_rows(x.detach(), torch.finfo(x.dtype).tiny) for x in (q, k))
        none_q, none_k = ((x == 0).all(-1) for x in (unit_q, unit_k))
        cosine = unit_q @ unit_k.mT * math.copysign(1.0, call.scale)
        # Zero vectors share a bucket in every round.
        cosine = cosine.masked_fill(none_q.unsqueeze(-1) & none_k.unsqueeze(-2), 1.0)
        laws = torch.stack([log_collision_law(c) for c in buckets.tolist()]).to(q.device)
        miss = torch.log1p(-log_collision(cosine, laws).exp().clamp_max(1.0))  # log(1 - p), -inf at p = 1
        return dots * call.scale - torch.log(-torch.expm1(self.rounds * miss))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        rounds, buckets = self.look_up(q, k, call)
        _, count = call.mask.key_ranks(k.shape[-2], k.device)
        hits = torch.zeros(*q.shape[:3], k.shape[-2], dtype=torch.int32, device=q.device)  # m, (B, H, n_q, n_k)
        for one in rounds:
            hits += one.sees(None, None, count)
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        hits = hits if visible is None else hits * visible
        shown = self.scores(q, k, buckets, call).masked_fill(hits == 0, -torch.inf)
        if self.combine == "sum":  # Value-aware A.1: m kappa(q, k), as the mean over the rounds
            shown = shown + (hits.to(q.dtype) / self.rounds).log()
        if q.shape[-2] == k.shape[-2]:
            alone = (shown == -torch.inf).all(-1, keepdim=True)
            itself = torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)
            shown = torch.where(alone & itself, dense.logits(q, k, call), shown)
        weights, lse = dense.softmax(shown)
        call.note(lse=lse)
        return weights @ v

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        rounds, buckets = self.look_up(q, k, call)
        if k.shape[-2] <= self.chunk:
            weights, lse = dense.softmax(dense.logits(q, k, call))
            call.note(lse=lse)
            return weights @ v
        found = self._round(q, k, v, call, rounds[:1], buckets)
        for r in range(1, self.rounds):
            found = blocks.merge(found, self._round(q, k, v, call, rounds[: r + 1], buckets))
        out, lse = found.finish()
        if self.combine == "sum":
            lse = lse - math.log(self.rounds)
        if q.shape[-2] == k.shape[-2]:
            alone = (found.top == -torch.inf).squeeze(-1)
            alone = alone if call.mask.keep is None else alone & call.mask.keep[:, None]
            out = torch.where(alone.unsqueeze(-1), v, out)
            lse = torch.where(alone, (q * k).sum(-1).detach() * call.scale, lse)
        call.note(lse=lse)
        return out

    def _round(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, rounds: list[arcs.Round], buckets: Tensor
    ) -> blocks.Part:
        """Return the part of the keys that the last of `rounds` shows, without those of earlier ones unless summing."""
        now, earlier = rounds[-1], [] if self.combine == "sum" else rounds[:-1]
        rows, width = max(self.chunk // 2, 1), 2 * self.chunk
        query, filled, slot = arcs.pack(now.group, call.mask.influence, rows)  # (B, H, blocks, rows) twice, (B, H, n_q)
        _, count = call.mask.key_ranks(k.shape[-2], k.device)
        at_once = max(_SCORES // (q.shape[0] * q.shape[1] * rows * width), 1)
        parts = []
        for token, real in zip(query.split(at_once, 2), filled.split(at_once, 2), strict=True):
            key, seen = now.stretch(token, width, count)  # (B, H, some, width), (B, H, some, rows, width)
            seen = seen & real.unsqueeze(-1)
            for before in earlier:
                seen = seen & ~before.sees(token, key, count)
            some_q, some_k = arcs.take_rows(q, token), arcs.take_rows(k, key)
            scores = self.scores(some_q, some_k, buckets, call)
            parts.append(blocks.part(scores.masked_fill(~seen, -torch.inf), arcs.take_rows(v, key)))
        columns = (torch.cat(column, 2).flatten(2, 3) for column in zip(*parts, strict=True))
        return blocks.Part(*(arcs.take_rows(column, slot) for column in columns))

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.combine == "ips":  # collision probabilities are looked up in tables, one for each number of buckets
            return None
        rotations, buckets = self.rotations(q, k, call)
        in_q, in_k = (native.rotation_buckets(x, rotations, buckets) for x in (q if call.scale >= 0 else -q, k))
        rule: native.Rule = "rank" if self.align == "rank" else "causal" if call.mask.causal else "bucket"
        once = self.combine == "union"
        out, lse, hits = native.lsh(
            q, k, v, in_q, in_k, call.mask.keep, call.mask.influence, self.chunk, rule, once, call.scale
        )
        call.note(lse=lse if once else lse - math.log(self.rounds), hits=hits)
        return out

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, chunk=max(shape.keys, 1))

    def _rows(self, shape: Shape, buckets: int) -> float:
        """Estimate how many rows one head's queries fill in one round, in blocks of chunk / 2, each from one arc.

        On average half a block is empty for each arc; with align="rank" none is.
        """
        n_q, half = shape.queries, self.chunk / 2
        if self.align == "rank":
            return float(n_q)
        if shape.causal:  # an arc for each chunk of each bucket
            arcs = n_q / self.chunk + buckets / 2
            return max(n_q + arcs * half / 2, min(buckets, n_q) * half)
        most = shape.keys / half  # arcs start at multiples of chunk / 2
        arcs = most if shape.keys > 2 * self.chunk * buckets else min(most, float(buckets))
        return n_q + arcs * half / 2

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units, n_q, n_k = shape.batch * shape.heads, shape.queries, shape.keys
        buckets = int(self.bucket_counts(torch.tensor(n_k)))
        hashing = self.rounds * (n_q + n_k) * shape.head_dim * (buckets // 2) * 2
        width = 2 * self.chunk
        pairs = self.rounds * self._rows(shape, buckets) * width if n_k > self.chunk else float(n_q * n_k)
        compared = 0 if self.combine == "sum" else pairs * (self.rounds - 1) / 2 * 4
        tables = 8 * self.rounds * (2 * n_k + 4 * n_q) + 8 * (n_q + n_k) * (buckets // 2)
        sums = 4 * n_q * (shape.value_dim + 2) * 2
        return Cost(
            units * (hashing + pairs * (2 * shape.head_dim + 1 + 2 * shape.value_dim) + compared)
            + shape.projection_flops,
            units * float(tables + sums) + 3 * 4.0 * min(units * pairs / self.rounds, _SCORES),
            min(self.rounds * width, n_k),
        )
