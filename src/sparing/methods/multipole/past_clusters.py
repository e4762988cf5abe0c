"""Clusters of growing sequences: complete chunks or blocks are clustered, and described by the queries so far."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparing import native
from sparing.draws import Draws
from sparing.methods.multipole import poles
from sparing.methods.multipole.clusters import Moments, cluster, native_cluster
from sparing.methods.multipole.poles import BLOCKS, Level
from sparing.methods.multipole.step_past import StepPast
from sparing.native.tensors import WritableState

if TYPE_CHECKING:
    from sparing.methods.multipole.method import Multipole

_SLACK = 16  # kernels may read, without using them, this many clusters beyond the last
_SUMMARY = ("keys", "values", "offset", "weight", "spread", "scatter")

Rows = Callable[[int, int], list[Tensor]]  # keys and values (1, H, ., .) of the ranks from one to another
Described = tuple[Level, tuple[Tensor, ...]]


class PastClusters(WritableState):
    """Clusters in a `StepPast`: those of complete chunks first, then those of the blocks after them."""

    def __init__(self, method: Multipole, q: Tensor, width: int, draws: Draws, scale: float) -> None:
        self.method, self.draws, self.scale = method, draws, scale
        self.block = method.chunk // BLOCKS
        self.each = method.clusters_of(method.chunk)  # clusters of a chunk
        self.block_each = -(-self.each // BLOCKS)
        self.store = StepPast(q, width, self.block)
        # Levels of the prompt with their summaries, if its attention has computed them; used once.
        self.ready: list[Described] = []

    def before(self, block: int) -> int:
        """Return the number of clusters before those of a block."""
        return block // BLOCKS * self.each + block % BLOCKS * self.block_each

    def show(self, item: int, blocks: int) -> None:
        """Make the clusters of the first `blocks` blocks visible."""
        self.store.part("visible")[item] = self.before(blocks)

    def add(self, item: int, rows: Rows, start: int, end: int, known: Moments, *, whole: bool) -> None:
        """Add the clusters of the chunks from `start` to `end` if `whole`, else of the blocks."""
        size, wanted = (self.method.chunk, self.each) if whole else (self.block, self.block_each)
        at, low, high = self.before(start * (BLOCKS if whole else 1)), start * size, end * size
        if self.ready:
            level, described = self._of_prompt(item, start, end, whole)
        else:
            k, v = rows(low, high)
            cut = partial(native_cluster if native.ready(k) else cluster, steps=self.method.steps)
            usable = (torch.arange(low, high, device=k.device) >= self.method.sinks).unsqueeze(0)
            many, purpose = torch.tensor([[wanted]], device=k.device), poles.CHUNK if whole else poles.BLOCK
            level = poles.cluster_chunks(k, usable, known, size, many, self.draws, purpose, cut, start)
            if whole:  # chunks before the last are described by the queries up to the end of the next chunk
                after = torch.arange(1, end - start + 1, device=k.device).clamp_max(end - start - 1)
                level = level._replace(known=known.at(after))
            described = list(poles.described(k, v, level, self.scale))

        # Sort ranks by cluster, those outside all clusters last.
        *summaries, shares = described
        total, device = level.chunks * level.clusters, level.labels.device
        slot = torch.where(level.labels < 0, total, level.labels)
        sizes = torch.zeros(*slot.shape[:2], total + 1, dtype=torch.int32, device=device)
        sizes.scatter_add_(2, slot, torch.ones_like(slot, dtype=torch.int32))
        sizes = sizes[:, :, :total]
        begin = sizes.cumsum(2, dtype=torch.int32) - sizes + low
        number = torch.where(
            level.labels < 0, -1, level.labels % level.clusters + level.labels // level.clusters * wanted + at
        )

        count = (end - start) * wanted
        self.store.make_room(at + count + _SLACK, high)
        parts = self.store.parts()
        for name, x in zip((*_SUMMARY, "begin", "size"), (*summaries, begin, sizes), strict=True):
            slots = parts[name][item, :, at : at + count].unflatten(1, (end - start, wanted))
            slots.zero_()
            slots[:, :, : level.clusters] = x[0].unflatten(1, (end - start, level.clusters))
        for name, y in (("labels", number), ("shares", shares), ("members", slot.argsort(dim=2, stable=True) + low)):
            parts[name][item, :, low:high] = y[0]

    def again(self, item: int, rows: Rows, chunk: int, known: Moments) -> None:
        """Describe the clusters of a chunk again, by the queries of `known`."""
        at, low, high = self.before(chunk * BLOCKS), chunk * self.method.chunk, (chunk + 1) * self.method.chunk
        parts = self.store.parts()
        labels = parts["labels"][item, :, low:high].long()
        level = Level(self.method.chunk, self.each, torch.where(labels < 0, -1, labels - at)[None], known)
        k, v = rows(low, high)
        *summaries, shares = poles.described(k, v, level, self.scale)
        for name, x in zip(_SUMMARY, summaries, strict=True):
            parts[name][item, :, at : at + self.each] = x[0]
        parts["shares"][item, :, low:high] = shares[0]

    def _of_prompt(self, item: int, start: int, end: int, whole: bool) -> tuple[Level, list[Tensor]]:
        """Return the clusters of these chunks or blocks that were found when the prompt's attention was computed."""
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
