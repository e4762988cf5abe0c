"""The past of growing sequences, as multipole decodes from it: clusters that are appended and never made again.

A query's own block of keys is exact. Blocks before it have clusters of their own until their chunk is complete; then
the chunk's clusters take their place, and are described once more when the next chunk is complete, too. Keys are
counted by their rank among the valid ones, item by item.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing import native
from sparing.draws import Draws
from sparing.maths import poles
from sparing.maths.clusters import Moments, Sums, cluster, native_cluster, sums
from sparing.maths.poles import BLOCKS, REMEMBER, Level, Plan, Poles
from sparing.native.multipole import multipole_step
from sparing.quarantine import are_tame, limit_of

if TYPE_CHECKING:
    from sparing.methods.multipole import Multipole

_SUMMARY = ("offset", "weight", "spread", "scatter")
_SLACK = 16  # clusters that kernels may read, and not use, beyond the last

Found = tuple[Tensor, ...]  # output, log-sum-exp, predicted error, keys and summaries read, summaries among them


class MultipolePast:
    """What multipole knows of the sequences of a batch.

    method: its settings. q, k, v: tensors (B, H, ., d), (B, H_kv, ., d) and (B, H_kv, ., e) that show sizes and device;
    everything is of the type of q.
    """

    def __init__(self, method: Multipole, q: Tensor, k: Tensor, v: Tensor, draws: Draws, scale: float) -> None:
        self.method, self.draws, self.scale = method, draws, scale
        self.block = method.chunk // BLOCKS
        self.clusters = method.clusters_of(method.chunk)
        self.block_clusters = -(-self.clusters // BLOCKS)
        batch, heads, _, d = q.shape
        self.groups = heads // k.shape[1]
        self.counts = [0] * batch  # keys
        self.visible = torch.zeros(batch, dtype=torch.long)  # clusters
        self.told = [0.0] * batch  # weight of the queries that the sums below hold
        self.lost = [0] * batch  # first queries of the block that is not complete, of which nothing is known
        self.place: Tensor | None = None  # (B, .) position of each rank; None while they are the same
        self.first, self.second = (
            q.new_zeros(batch, *size, dtype=torch.float64) for size in ((heads, d), (heads, d, d))
        )
        self.pending = q.new_zeros(batch, heads, self.block, d)  # queries of the block that is not complete
        self.newest: list[Tensor] = []  # of which the last, if every item has them, still have to be put there
        self.mean, self.variance = q.new_zeros(batch, heads, d), q.new_zeros(batch, heads)
        # Levels of the prompt with what describes them, where somebody has them; used once.
        self.ready: list[tuple[Level, tuple[Tensor, ...]]] = []
        some, small = q.new_zeros(batch, heads, 0), q.new_zeros(batch, heads, 0, dtype=torch.int32)
        # By cluster, (B, H, C, ...): its summary, and where its members are.
        self.poles: dict[str, Tensor] = {
            "keys": q.new_zeros(batch, heads, 0, d), "values": q.new_zeros(batch, heads, 0, v.shape[3]),
            **dict.fromkeys(_SUMMARY, some), "begin": small, "size": small,
        }  # fmt: skip
        # By rank, (B, H, .): the cluster that stands for a key, or -1, its weight there; ranks sorted by cluster.
        self.ranks: dict[str, Tensor] = {"labels": small, "shares": some, "members": small}

    # What the past looks like to queries.

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int, *, clean: bool
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Attention of the newest queries, which are then learnt from. Rows of padding give zeros."""
        n, every = self.counts[0], slice(0, len(self.counts))
        plain = q.shape[2] == 1 and fresh is None and self.place is None and self.counts == [n] * len(self.counts)
        if not clean and not (plain and native.ready(q)) and not are_tame(q, k, v, length):
            return None
        if plain:
            try:  # the kernel looks by the way whether all is tame
                found = self.attend(q, k, v, None, every, length, math.inf if clean else limit_of(q.dtype))
            except RuntimeError:
                if are_tame(q, k, v, length):
                    raise
                return None
            if (n + 1) % self.block:
                self.newest.append(q.clone())
                self.counts = [n + 1] * len(self.counts)
            else:
                for item in range(len(self.counts)):
                    self._learn(item, q[item], k, v)
        else:
            new = self._put(fresh, q, length)
            if q.shape[2] == 1:
                own = torch.tensor([[n if rows else -1] for n, rows in zip(self.counts, new, strict=True)])
                found = self.attend(q, k, v, own, every)
                for item, rows in enumerate(new):
                    self._learn(item, q[item, :, rows], k, v)
            else:
                parts = [self._several(item, rows, q, k, v) for item, rows in enumerate(new)]
                found = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        out, lse, error, touched, _ = found
        return out, {"lse": lse, "error": error, "touched": touched}

    def _several(self, item: int, rows: list[int], q: Tensor, k: Tensor, v: Tensor) -> Found:
        """Several queries of one item, block by block; rows: those that are no padding."""
        one, none = slice(item, item + 1), q[:1, :, :, 0]
        out = (v.new_zeros(*none.shape, v.shape[3]), torch.full_like(none, -torch.inf), torch.zeros_like(none))
        found: Found = (*out, torch.zeros_like(none, dtype=torch.long), torch.zeros_like(none, dtype=torch.long))
        while rows:
            n = self.counts[item]
            now, rows = rows[: self.block - n % self.block], rows[self.block - n % self.block :]
            queries = q[one, :, now]
            part = self.attend(queries, k[one], v[one], torch.arange(n, n + len(now)).unsqueeze(0), one)
            for whole, some in zip(found, part, strict=True):
                whole[:, :, now] = some
            self._learn(item, queries[0], k, v)
        return found

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, own: Tensor | None, items: slice, fresh_from: int = 0,
        limit: float = math.inf,
    ) -> Found:  # fmt: skip
        """For q (B, H, n_q, d), k, v (B, H_kv, n, .) of some items.

        own: (B, n_q) rank of each query's own key, -1 for padding; those of an item lie in the block that is not
        complete; None: the last key. On the CPU. fresh_from, limit: as of `multipole_step`.
        """
        if not native.ready(q):
            return self.attend_densely(q, k, v, own, items)
        m, place, poles, ranks = self.method, self.place, self.poles, self.ranks
        mean, variance, visible = self.mean, self.variance, self.visible
        if len(q) < len(self.counts):
            poles, ranks = ({name: x[items] for name, x in store.items()} for store in (poles, ranks))
            place, mean, variance = None if place is None else place[items], mean[items], variance[items]
            visible = visible[items]
        return multipole_step(
            q, k, v, place, own, visible, mean, variance, poles, ranks,
            self.block, m.window, m.sinks, m.keys, m.order == 2, m.select == "mass", m.cap, m.tolerance, self.scale,
            fresh_from, limit,
        )  # fmt: skip

    def attend_densely(self, q: Tensor, k: Tensor, v: Tensor, own: Tensor | None, items: slice) -> Found:
        """`attend` by the method's specification."""
        batch, heads, n_q, _ = q.shape
        n = k.shape[2]
        rank = torch.full((batch, n_q), n - 1) if own is None else own
        rank = rank.to(q.device)
        if self.place is not None:
            order = pad(self.place[items], (0, n))[:, None, :n, None]
            k, v = k.take_along_dim(order, dim=2), v.take_along_dim(order, dim=2)
        k, v = (x.repeat_interleave(self.groups, dim=1) for x in (k, v))
        ranks = {name: x[items] for name, x in self.ranks.items()}
        pole = {name: x[items] for name, x in self.poles.items()}
        total, held = pole["weight"].shape[2], min(ranks["labels"].shape[2], n)
        labels = torch.full((batch, heads, n), -1, device=q.device)
        labels[:, :, :held] = ranks["labels"][:, :, :held].long()
        shares = q.new_zeros(batch, heads, n)
        shares[:, :, :held] = ranks["shares"][:, :, :held].log()
        known = self._sums(items).moments
        open_ = torch.arange(total, device=q.device) < self.visible[items].to(q.device).view(-1, 1, 1)
        described = Poles(
            pole["keys"], pole["values"], pole["offset"], pole["weight"], shares,
            torch.where(open_, pole["size"], 0).to(q.dtype), pole["spread"], pole["scatter"],
        )  # fmt: skip
        levels = (Level(n, total, labels, known),) if total else ()
        plan = Plan(levels, rank + 1, rank, self.block, grown=True)
        out, lse, error, read, spared = self.method.rows(q, k, v, plan, [described], self.scale, True, slice(0, n_q))
        touched, padding = read + spared, (rank < 0)[:, None]
        return out, lse, *(x.masked_fill(padding, 0) for x in (error, touched, spared))

    # What it learns.

    def learn(self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int) -> None:
        """Take in new positions; what becomes complete is put into clusters."""
        for item, rows in enumerate(self._put(fresh, q, length)):
            self._learn(item, q[item, :, rows], k, v)
        self.ready = []

    def _put(self, fresh: Tensor | None, q: Tensor, length: int) -> list[list[int]]:
        """The rows of each item that are no padding, and where their keys are."""
        every = list(range(q.shape[2]))
        new = [every] * len(self.counts) if fresh is None else [row.nonzero().flatten().tolist() for row in fresh]
        if self.place is None:
            if all(n == length and rows == every for n, rows in zip(self.counts, new, strict=True)):
                return new
            self.place = torch.arange(length, device=q.device).expand(len(self.counts), -1)
        need = max(self.counts) + q.shape[2]
        if need > self.place.shape[1]:
            self.place = pad(self.place, (0, need + self.method.chunk - self.place.shape[1]))
        for item, (n, rows) in enumerate(zip(self.counts, new, strict=True)):
            self.place[item, n : n + len(rows)] = torch.tensor(rows, dtype=torch.long, device=q.device) + length
        return new

    def _learn(self, item: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The queries (H, m, d) of the item's next m keys."""
        self._settle()
        n, block = self.counts[item], self.block
        kept = n % block
        self.counts[item] = n + q.shape[1]
        if kept + q.shape[1] < block:
            self.pending[item, :, kept : kept + q.shape[1]] = q
            return
        q = torch.cat([self.pending[item, :, :kept], q], dim=1)
        whole = q.shape[1] // block
        done, rest = q[None, :, : whole * block], q[:, whole * block :]
        self.pending[item, :, : rest.shape[1]] = rest
        if self.ready:
            known = self.ready[0][0].known.at(torch.arange(whole, device=q.device))
            known = Moments(*(x[item : item + 1] for x in known))
        else:
            counts = torch.arange(whole * block, device=q.device) >= self.lost[item]
            known = sums(done, counts[None], block, REMEMBER, self._sums(slice(item, item + 1))).moments
        for i in range(whole):
            self.told[item] = self.told[item] * REMEMBER + block - (0 if i else self.lost[item])
        self.lost[item] = 0
        total = self.told[item]
        self.first[item], self.second[item] = known.mean[0, :, -1] * total, known.second[0, :, -1] * total
        self.mean[item], self.variance[item] = known.mean[0, :, -1], known.variance[0, :, -1]

        before, after = n // block, n // block + whole  # complete blocks
        chunks, complete = before // BLOCKS, after // BLOCKS
        if complete > chunks:
            ends = torch.arange(chunks, complete, device=q.device) * BLOCKS + BLOCKS - 1 - before
            self._add(item, k, v, chunks, complete, known.at(ends), whole=True)
            if chunks:
                self._again(item, k, v, chunks - 1, known.at(ends[:1]))
        start = max(before, complete * BLOCKS)
        if after > start:
            recent = torch.arange(start - before, after - before, device=q.device)
            self._add(item, k, v, start, after, known.at(recent), whole=False)
        self.visible[item] = self._row(after)

    def _settle(self) -> None:
        """Put the newest queries to the others of their block, all at once: one by one takes longer."""
        if self.newest:
            last = self.counts[0] % self.block
            self.pending[:, :, last - len(self.newest) : last] = torch.cat(self.newest, dim=2)
            self.newest = []

    def _row(self, block: int) -> int:
        """The first cluster of a block: clusters of complete chunks come first."""
        return block // BLOCKS * self.clusters + block % BLOCKS * self.block_clusters

    def _add(self, item: int, k: Tensor, v: Tensor, start: int, end: int, known: Moments, *, whole: bool) -> None:
        """Clusters of the whole chunks, or else of the blocks, from `start` to `end`."""
        size, wanted = (self.method.chunk, self.clusters) if whole else (self.block, self.block_clusters)
        at, low, high = self._row(start * (BLOCKS if whole else 1)), start * size, end * size
        if self.ready:
            level, described = self._of_prompt(item, start, end, whole)
        else:
            k, v = self._rows(item, k, v, low, high)
            cut = partial(native_cluster if native.ready(k) else cluster, steps=self.method.steps)
            usable = (torch.arange(low, high, device=k.device) >= self.method.sinks).unsqueeze(0)
            many, purpose = torch.tensor([[wanted]], device=k.device), poles.CHUNK if whole else poles.BLOCK
            level = poles.cluster_chunks(k, usable, known, size, many, self.draws, purpose, cut, start)
            if whole:  # those before the last are described by the queries up to the end of the next
                after = torch.arange(1, end - start + 1, device=k.device).clamp_max(end - start - 1)
                level = level._replace(known=known.at(after))
            described = list(poles.described(k, v, level, self.scale))

        # Ranks sorted by cluster, those outside all clusters last.
        *summaries, shares = described
        total = level.chunks * level.clusters
        slot = torch.where(level.labels < 0, total, level.labels)
        sizes = torch.zeros(*slot.shape[:2], total + 1, dtype=torch.int32, device=k.device)
        sizes.scatter_add_(2, slot, torch.ones_like(slot, dtype=torch.int32))
        sizes = sizes[:, :, :total]
        begin = sizes.cumsum(2, dtype=torch.int32) - sizes + low
        number = torch.where(
            level.labels < 0, -1, level.labels % level.clusters + level.labels // level.clusters * wanted + at
        )

        count = (end - start) * wanted
        self._make_room(at + count + _SLACK, high)
        for store, x in zip(self.poles.values(), (*summaries, begin, sizes), strict=True):
            slots = store[item, :, at : at + count].unflatten(1, (end - start, wanted))
            slots.zero_()
            slots[:, :, : level.clusters] = x[0].unflatten(1, (end - start, level.clusters))
        for name, y in (("labels", number), ("shares", shares), ("members", slot.argsort(dim=2, stable=True) + low)):
            self.ranks[name][item, :, low:high] = y[0]

    def _again(self, item: int, k: Tensor, v: Tensor, chunk: int, known: Moments) -> None:
        """Describe the clusters of a chunk by other queries."""
        at, low, high = self._row(chunk * BLOCKS), chunk * self.method.chunk, (chunk + 1) * self.method.chunk
        labels = self.ranks["labels"][item, :, low:high].long()
        level = Level(self.method.chunk, self.clusters, torch.where(labels < 0, -1, labels - at)[None], known)
        k, v = self._rows(item, k, v, low, high)
        *summaries, shares = poles.described(k, v, level, self.scale)
        for store, x in zip(self.poles.values(), summaries, strict=False):  # where members are stays
            store[item, :, at : at + self.clusters] = x[0]
        self.ranks["shares"][item, :, low:high] = shares[0]

    def _rows(self, item: int, k: Tensor, v: Tensor, low: int, high: int) -> list[Tensor]:
        """Keys and values of these ranks, (1, H, ., .)."""
        place = slice(low, high) if self.place is None else self.place[item, low:high]
        return [x[item, :, place].to(self.mean.dtype).repeat_interleave(self.groups, 0)[None] for x in (k, v)]

    def _sums(self, items: slice) -> Sums:
        """What is known about the queries of some items."""
        told = torch.tensor(self.told[items], dtype=torch.float64, device=self.first.device).view(-1, 1, 1, 1)
        return Sums(told, self.first[items].unsqueeze(2), self.second[items].unsqueeze(2))

    def _of_prompt(self, item: int, start: int, end: int, whole: bool) -> tuple[Level, list[Tensor]]:
        """What was found for these chunks or blocks when the prompt's attention was computed."""
        level, described = self.ready[1 if whole else 0]
        ranks, rows = (slice(start * each, end * each) for each in (level.size, level.clusters))
        labels = level.labels[item : item + 1, :, ranks]
        labels = torch.where(labels < 0, -1, labels - start * level.clusters)
        known = level.known.at(torch.arange(start, end, device=labels.device))
        *summaries, shares = (x[item : item + 1] for x in described)
        found = [*(x[:, :, rows] for x in summaries), shares[:, :, ranks]]
        if whole and end - start > 1:  # all but the last were described again
            _, again = self.ready[2]
            used = [(end - start - 1) * each for each in (*[level.clusters] * len(summaries), level.size)]
            found = [
                torch.cat([y[item : item + 1, :, :m], x[:, :, m:]], 2)
                for x, y, m in zip(found, again, used, strict=True)
            ]
        return Level(level.size, level.clusters, labels, Moments(*(x[item : item + 1] for x in known))), found

    def _make_room(self, clusters: int, keys: int) -> None:
        for store, need in ((self.poles, clusters), (self.ranks, keys)):
            for name, x in store.items():
                if need > (have := x.shape[2]):
                    shape = (*x.shape[:2], max(need, have * 5 // 4), *x.shape[3:])
                    store[name] = x.new_full(shape, -1 if name == "labels" else 0)
                    store[name][:, :, :have] = x

    # What happens to the cache.

    def crop(self, length: int, k: Tensor, v: Tensor) -> None:
        """Forget positions from `length` on. What was learnt from their queries stays."""
        self._settle()
        for item, n in enumerate(self.counts):
            left = min(n, length) if self.place is None else int((self.place[item, :n] < length).sum())
            self.counts[item] = left
            blocks, chunks = left // self.block, left // self.method.chunk
            if blocks == n // self.block:
                self.lost[item] = min(self.lost[item], left % self.block)
                continue
            self.lost[item] = left % self.block  # the queries at hand are those of other keys
            self.visible[item] = self._row(blocks)
            self.ranks["labels"][item, :, blocks * self.block :] = -1
            if n // self.method.chunk > chunks and blocks > chunks * BLOCKS:  # one summary stood for these blocks
                known = self._sums(slice(item, item + 1)).moments
                again = known.at(torch.zeros(blocks - chunks * BLOCKS, dtype=torch.long, device=k.device))
                self._add(item, k, v, chunks * BLOCKS, blocks, again, whole=False)

    def select(self, items: Tensor) -> None:
        """Go on with these items, in this order; an item may appear again."""
        self._settle()
        chosen = items.tolist()
        self.visible = self.visible[chosen]
        for name in ("counts", "told", "lost"):
            setattr(self, name, [getattr(self, name)[i] for i in chosen])
        for name in ("first", "second", "pending", "mean", "variance"):
            setattr(self, name, getattr(self, name).index_select(0, items))
        self.place = None if self.place is None else self.place.index_select(0, items)
        for store in (self.poles, self.ranks):
            for name, x in store.items():
                store[name] = x.index_select(0, items)
