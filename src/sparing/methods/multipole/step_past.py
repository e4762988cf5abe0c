"""The memory of growing sequences that `multipole_step` reads."""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from sparing.native.tensors import WritableState

_Sizes = dict[str, tuple[int, ...]]


class StepPast(WritableState):
    """Two tensors, [B, H, .], divided into named parts, because each tensor passed to a step costs time.

    Each [B, H, ...]:
    - keys [clusters, depth], values [clusters, width] (times weight), offset, weight, spread, scatter [clusters]:
      summaries; begin, size [clusters]: where a cluster's members begin in `members`, and how many there are
    - labels [ranks]: the cluster that stands for a key, or -1; shares [ranks]: its weight there; members [ranks]: ranks
      sorted by cluster
    - visible []: number of clusters in use; these are the first
    - mean [depth], variance []: of the queries; queries [block, depth]: those of the block that is not complete
    """

    def __init__(self, q: Tensor, width: int, block: int) -> None:
        """Start without keys. q: queries (B, H, ., depth) whose sizes, device and dtype are used."""
        self.depth, self.width, self.block = q.shape[3], width, block
        self.clusters = self.ranks = 0  # numbers that there is room for
        self.reals, self.ints = self._room(q)

    def part(self, name: str) -> Tensor:
        """Return a view of a part."""
        return self.parts()[name]

    def parts(self) -> dict[str, Tensor]:
        """Return views of all parts."""
        found: dict[str, Tensor] = {}
        for store, sizes in zip((self.reals, self.ints), self._sizes(), strict=True):
            pieces = store.split([math.prod(size) for size in sizes.values()], dim=2)
            for (name, size), piece in zip(sizes.items(), pieces, strict=True):
                found[name] = piece.unflatten(2, size) if size else piece.squeeze(2)
        return found

    def make_room(self, clusters: int, ranks: int) -> None:
        """Make room for this many clusters and ranks; what grows, grows by at least a quarter."""
        if clusters <= self.clusters and ranks <= self.ranks:
            return
        before = self.parts()
        if clusters > self.clusters:
            self.clusters = max(clusters, self.clusters * 5 // 4)
        if ranks > self.ranks:
            self.ranks = max(ranks, self.ranks * 5 // 4)
        self.reals, self.ints = self._room(self.reals)
        for name, x in self.parts().items():
            old = before[name]
            if x.shape == old.shape:
                x.copy_(old)
                continue
            x[:, :, : old.shape[2]] = old
            if name == "labels":
                x[:, :, old.shape[2] :] = -1

    def of(self, items: slice) -> StepPast:
        """Return the past of some items of the batch, which shares memory with this one."""
        some = copy(self)
        some.reals, some.ints = self.reals[items], self.ints[items]
        return some

    def select(self, items: Tensor) -> None:
        """Keep these items, in this order; an item may appear several times."""
        self.reals, self.ints = (x.index_select(0, items) for x in (self.reals, self.ints))

    def _room(self, like: Tensor) -> tuple[Tensor, Tensor]:
        reals, ints = (sum(math.prod(size) for size in sizes.values()) for sizes in self._sizes())
        return like.new_zeros(*like.shape[:2], reals), like.new_zeros(*like.shape[:2], ints, dtype=torch.int32)

    def _sizes(self) -> tuple[_Sizes, _Sizes]:
        """Return the sizes of the parts, in their order in memory, which must match StepPast in multipole/call.h."""
        rows, ranks = (self.clusters,), (self.ranks,)
        reals: _Sizes = {
            "keys": (*rows, self.depth), "values": (*rows, self.width), "offset": rows, "weight": rows, "spread": rows,
            "scatter": rows, "shares": ranks, "mean": (self.depth,), "variance": (),
            "queries": (self.block, self.depth),
        }  # fmt: skip
        return reals, {"begin": rows, "size": rows, "labels": ranks, "members": ranks, "visible": ()}
