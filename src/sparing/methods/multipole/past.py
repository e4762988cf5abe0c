"""The state from which multipole decodes growing sequences.

A query's own block of keys is exact. Blocks before it have clusters of their own until their chunk is complete; then
the chunk's clusters replace them. These are described once more when the next chunk is complete. Keys are numbered by
their rank among the valid ones of their item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing import native
from sparing.draws import Draws
from sparing.methods.multipole.clusters import Moments, Sums, sums
from sparing.methods.multipole.native import StepNotes, multipole_step
from sparing.methods.multipole.past_clusters import PastClusters
from sparing.methods.multipole.poles import BLOCKS, REMEMBER, Level, Plan, Poles
from sparing.quarantine import are_moderate, limit_of

if TYPE_CHECKING:
    from sparing.methods.multipole.method import Multipole

Found = tuple[Tensor, Tensor]  # output and notes, as `multipole_step` returns them


class MultipolePast(PastClusters):
    """The past of the sequences of a batch.

    method: its settings. q, k, v: tensors (B, H, ., d), (B, H_kv, ., d) and (B, H_kv, ., e) whose sizes and device are
    used; the clusters have the dtype of q.
    """

    def __init__(self, method: Multipole, q: Tensor, k: Tensor, v: Tensor, draws: Draws, scale: float) -> None:
        super().__init__(method, q, v.shape[3], draws, scale)
        m, (batch, heads, _, d) = method, q.shape
        self.settings = (m.window, m.sinks, m.keys, m.order == 2, m.select == "mass", m.cap, m.tolerance, scale)
        self.groups = heads // k.shape[1]
        self.counts = [0] * batch  # keys of each item
        self.told = [0.0] * batch  # weight of the queries that the sums below hold
        self.lost = [0] * batch  # number of first queries of the incomplete block that are unknown
        self.place: Tensor | None = None  # (B, .) position of each rank; None while they are the same
        self.first, self.second = (
            q.new_zeros(batch, *size, dtype=torch.float64) for size in ((heads, d), (heads, d, d))
        )

    # Attention to the past.

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int, *, clean: bool
    ) -> tuple[Tensor, Mapping[str, Tensor]] | None:
        """Compute attention of the newest queries, then learn from them. Rows of padding give zeros."""
        if fresh is None and self.place is None and q.shape[2] == 1 and native.ready(q):
            limit = math.inf if clean else limit_of(q.dtype)  # the kernel also checks that all entries are moderate
            out, notes, within = multipole_step(q, k, v, None, None, self.store, self.settings, limit)
            if not within:
                return None
            if (length + 1) % self.block:
                self.counts = [length + 1] * len(self.counts)
            else:
                for item in range(len(self.counts)):
                    self._learn(item, q[item], k, v)
            return out, StepNotes(notes)
        if not clean and not are_moderate(q, k, v, length):
            return None
        new = self._put(fresh, q, length)
        if q.shape[2] == 1:
            own = torch.tensor([[n if rows else -1] for n, rows in zip(self.counts, new, strict=True)])
            out, notes = self.attend(q, k, v, own, slice(0, len(self.counts)))
            for item, rows in enumerate(new):
                self._learn(item, q[item, :, rows], k, v)
        else:
            parts = [self._several(item, rows, q, k, v) for item, rows in enumerate(new)]
            out, notes = (torch.cat(part, dim) for dim, part in enumerate(zip(*parts, strict=True)))
        return out, StepNotes(notes)

    def _several(self, item: int, rows: list[int], q: Tensor, k: Tensor, v: Tensor) -> Found:
        """Compute attention of several queries of one item, block by block. rows: those that are not padding."""
        one, heads, n_q = slice(item, item + 1), q.shape[1], q.shape[2]
        out, notes = v.new_zeros(1, heads, n_q, v.shape[3]), q.new_zeros(4, 1, heads, n_q)
        notes[0] = -torch.inf
        while rows:
            n = self.counts[item]
            now, rows = rows[: self.block - n % self.block], rows[self.block - n % self.block :]
            queries = q[one, :, now]
            own = torch.arange(n, n + len(now)).unsqueeze(0)
            out[:, :, now], notes[..., now] = self.attend(queries, k[one], v[one], own, one)
            self._learn(item, queries[0], k, v)
        return out, notes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, own: Tensor, items: slice) -> Found:
        """Compute attention of q (B, H, n_q, d) to k, v (B, H_kv, n, .), for some items.

        own: (B, n_q) rank of each query's own key, on the CPU; -1 for padding. Those of an item lie in its incomplete
        block.
        """
        if not native.ready(q):
            return self.attend_densely(q, k, v, own, items)
        place = None if self.place is None else self.place[items]
        return multipole_step(q, k, v, place, own, self.store.of(items), self.settings)[:2]

    def attend_densely(self, q: Tensor, k: Tensor, v: Tensor, own: Tensor, items: slice) -> Found:
        """Compute `attend` by the reference implementation."""
        batch, heads, n_q, _ = q.shape
        n, rank = k.shape[2], own.to(q.device)
        if self.place is not None:
            order = pad(self.place[items], (0, n))[:, None, :n, None]
            k, v = k.take_along_dim(order, dim=2), v.take_along_dim(order, dim=2)
        k, v = (x.repeat_interleave(self.groups, dim=1) for x in (k, v))
        past = self.store.of(items).parts()
        total, held = past["weight"].shape[2], min(past["labels"].shape[2], n)
        labels = torch.full((batch, heads, n), -1, device=q.device)
        labels[:, :, :held] = past["labels"][:, :, :held].long()
        shares = q.new_zeros(batch, heads, n)
        shares[:, :, :held] = past["shares"][:, :, :held].log()
        open_ = torch.arange(total, device=q.device) < past["visible"].unsqueeze(2)
        described = Poles(
            past["keys"], past["values"], past["offset"], past["weight"], shares,
            torch.where(open_, past["size"], 0).to(q.dtype), past["spread"], past["scatter"],
        )  # fmt: skip
        levels = (Level(n, total, labels, self._sums(items).moments),) if total else ()
        plan = Plan(levels, rank + 1, rank, self.block, grown=True)
        out, lse, error, read, spared = self.method.rows(q, k, v, plan, [described], self.scale, True, slice(0, n_q))
        counts = (x.masked_fill((rank < 0)[:, None], 0).to(q.dtype) for x in (error, read + spared, spared))
        return out, torch.stack([lse, *counts])

    # Learning from queries and keys.

    def learn(self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int) -> None:
        """Add new positions, and cluster the blocks and chunks that become complete."""
        for item, rows in enumerate(self._put(fresh, q, length)):
            self._learn(item, q[item, :, rows], k, v)
        self.ready = []

    def _put(self, fresh: Tensor | None, q: Tensor, length: int) -> list[list[int]]:
        """Return the rows of each item that are not padding, and store the positions of their keys in `place`."""
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
        """Learn from the queries (H, m, d) of the item's next m keys."""
        n, block = self.counts[item], self.block
        kept, queries = n % block, self.store.part("queries")[item]
        self.counts[item] = n + q.shape[1]
        if kept + q.shape[1] < block:
            queries[:, kept : kept + q.shape[1]] = q
            return
        q = torch.cat([queries[:, :kept], q], dim=1)
        whole = q.shape[1] // block
        done, rest = q[None, :, : whole * block], q[:, whole * block :]
        queries[:, : rest.shape[1]] = rest
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
        parts = self.store.parts()
        parts["mean"][item], parts["variance"][item] = known.mean[0, :, -1], known.variance[0, :, -1]
        rows = partial(self._rows, item, k, v)

        before, after = n // block, n // block + whole  # number of complete blocks
        chunks, complete = before // BLOCKS, after // BLOCKS
        if complete > chunks:
            ends = torch.arange(chunks, complete, device=q.device) * BLOCKS + BLOCKS - 1 - before
            self.add(item, rows, chunks, complete, known.at(ends), whole=True)
            if chunks:
                self.again(item, rows, chunks - 1, known.at(ends[:1]))
        start = max(before, complete * BLOCKS)
        if after > start:
            recent = torch.arange(start - before, after - before, device=q.device)
            self.add(item, rows, start, after, known.at(recent), whole=False)
        self.show(item, after)

    def _rows(self, item: int, k: Tensor, v: Tensor, low: int, high: int) -> list[Tensor]:
        """Return the keys and values of the ranks from `low` to `high`, (1, H, ., .)."""
        place = slice(low, high) if self.place is None else self.place[item, low:high]
        return [x[item, :, place].to(self.store.reals.dtype).repeat_interleave(self.groups, 0)[None] for x in (k, v)]

    def _sums(self, items: slice) -> Sums:
        """Return the sums over the queries of some items."""
        told = torch.tensor(self.told[items], dtype=torch.float64, device=self.first.device).view(-1, 1, 1, 1)
        return Sums(told, self.first[items].unsqueeze(2), self.second[items].unsqueeze(2))

    # Changes of the cache.

    def crop(self, length: int, k: Tensor, v: Tensor) -> None:
        """Forget positions from `length` on. What was learnt from their queries stays."""
        for item, n in enumerate(self.counts):
            left = min(n, length) if self.place is None else int((self.place[item, :n] < length).sum())
            self.counts[item] = left
            blocks, chunks = left // self.block, left // self.method.chunk
            if blocks == n // self.block:
                self.lost[item] = min(self.lost[item], left % self.block)
                continue
            self.lost[item] = left % self.block  # the stored queries belong to other keys
            self.show(item, blocks)
            self.store.part("labels")[item, :, blocks * self.block :] = -1
            if n // self.method.chunk > chunks and blocks > chunks * BLOCKS:  # one summary stood for these blocks
                known = self._sums(slice(item, item + 1)).moments
                again = known.at(torch.zeros(blocks - chunks * BLOCKS, dtype=torch.long, device=k.device))
                rows = partial(self._rows, item, k, v)
                self.add(item, rows, chunks * BLOCKS, blocks, again, whole=False)

    def select(self, items: Tensor) -> None:
        """Keep these items, in this order; an item may appear several times."""
        self.store.select(items)
        chosen = items.tolist()
        for name in ("counts", "told", "lost"):
            setattr(self, name, [getattr(self, name)[i] for i in chosen])
        self.first, self.second = self.first.index_select(0, items), self.second.index_select(0, items)
        self.place = None if self.place is None else self.place.index_select(0, items)
