"""What multipole keeps of growing sequences: copies of their complete blocks, appended and never made again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing import native
from sparing.methods.multipole.copies import (
    KEY_BITS,
    Copy,
    copy_keys,
    copy_values,
    unpack_keys,
    unpack_values,
)
from sparing.methods.multipole.native import Packed, multipole
from sparing.native.tensors import WritableState, writable

if TYPE_CHECKING:
    from sparing.methods.multipole.method import Multipole


class MultipolePast(WritableState):
    """Copies of the keys and values of a batch of sequences.

    q, k, v: tensors (B, H, ., d), (B, H_kv, ., d) and (B, H_kv, ., e) that show sizes and device. Keys are counted by
    their rank among the valid ones, item by item.
    """

    def __init__(self, method: Multipole, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.method, self.scale, self.bits = method, scale, method.value_bits(causal=True)
        self.counts = [0] * q.shape[0]  # keys of each item
        self.place: Tensor | None = None  # (B, .) position of each rank; None while they are the same
        self.ready: Packed | None = None  # the copies of a prompt, if its attention was computed from them
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.copies = self._packed(k[:, :, :0], v[:, :, :0], first=0)

    def _packed(self, k: Tensor, v: Tensor, first: int) -> Packed:
        """Return the copies of blocks of keys and values; first: rank of the first key."""
        m = self.method
        keys, values = copy_keys(k, m.block, m.sinks if first == 0 else 0), copy_values(v, m.block, self.bits)
        return Packed.of(keys, values)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return attention of the newest queries, and what was noted. Rows of padding give zeros."""
        before = list(self.counts)
        self.learn(q, k, v, fresh, length)
        block, (batch, _, n_q, _) = self.method.block, q.shape
        if self.place is None and n_q == 1:  # the usual case, with few operations
            last = self.counts[0] - 1
            return self.attend(q, k, v, _filled(q, last + 1), _filled(q, last // block * block))
        if self.place is None:  # all items are alike
            seen = torch.arange(before[0] + 1, self.counts[0] + 1, device=q.device).repeat(batch, 1)
            return self.attend(q, k, v, seen, (seen - 1) // block * block)
        seen = q.new_zeros(batch, n_q, dtype=torch.long)
        for item, count in enumerate(before):
            rows = slice(None) if fresh is None else fresh[item]
            seen[item, rows] = torch.arange(count + 1, self.counts[item] + 1, device=q.device)
        return self.attend(q, k, v, seen, (seen - 1).clamp_min(0) // block * block)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, near: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return attention of q (B, H, n_q, d), of the type of k and v, with extents as of `Multipole.extents`."""
        m = self.method
        if native.ready(q, half=True):
            place = None if self.place is None else self.place[:, : k.shape[2]].contiguous()
            settings = (m.block, self.bits, m.sinks, m.least_share(self.bits), self.scale)
            out, notes = multipole(q, k, v, (place, seen, near), self.copies, settings)
            lse, error, read = notes.unbind(0)
            return out, {"lse": lse, "error": error, "touched": read.long()}
        groups = q.shape[1] // k.shape[1]
        if self.place is not None:
            order = pad(self.place, (0, k.shape[2]))[:, None, : k.shape[2], None]
            k, v = k.take_along_dim(order, dim=2), v.take_along_dim(order, dim=2)
        k, v = (x.to(self.wide).repeat_interleave(groups, 1) for x in (k, v))
        keys, values = (
            Copy(x.codes.repeat_interleave(groups, 1), x.scales.repeat_interleave(groups, 2), x.bits)
            for x in self._unpacked(k.shape[2] // m.block)
        )
        out, lse, error, read = m.rows(q.to(self.wide), k, v, (keys, values), seen, near, self.scale)
        return out, {"lse": lse, "error": error, "touched": read}

    def _unpacked(self, blocks: int) -> tuple[Copy, Copy]:
        """Return the copies of at most so many blocks; those of blocks that are not complete mean nothing."""
        key_codes, key_scales, value_codes, value_scales = self.copies
        return (
            Copy(unpack_keys(key_codes[:, :, :blocks], key_scales.shape[-1]), key_scales[:, :, :, :blocks], KEY_BITS),
            Copy(
                unpack_values(value_codes[:, :, :blocks], value_scales.shape[-1], self.bits),
                value_scales[:, :, :, :blocks],
                self.bits,
            ),
        )

    def learn(self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int) -> None:
        """Take in new positions, and copy the blocks that are complete now."""
        before = list(self.counts)
        self._put(fresh, q.shape[2], length, q.device)
        block, ready = self.method.block, self.ready
        self.ready = None
        if ready is not None and not any(before):
            self.copies = writable(ready)
            return
        for item in range(len(before)):
            first, last = before[item] // block, self.counts[item] // block
            if self.place is None:  # all items are alike
                if item == 0 and last > first:
                    self._append(
                        slice(None),
                        first,
                        last,
                        k[:, :, first * block : last * block],
                        v[:, :, first * block : last * block],
                    )
                continue
            if last > first:
                ranks = self.place[item, first * block : last * block]
                self._append(
                    slice(item, item + 1), first, last, k[item : item + 1, :, ranks], v[item : item + 1, :, ranks]
                )

    def _append(self, items: slice, first: int, last: int, k: Tensor, v: Tensor) -> None:
        made = self._packed(k, v, first)
        if (more := last - self.copies[0].shape[2]) > 0:  # once in a block: room to spare would only take memory
            self.copies = Packed(_longer(x, axis, more) for x, axis in zip(self.copies, (2, 3, 2, 3), strict=True))
        for old, new, axis in zip(self.copies, made, (2, 3, 2, 3), strict=True):
            if axis == 2:  # scales have low and step in front
                old[items, :, first:last] = new
            else:
                old[:, items, :, first:last] = new

    def _put(self, fresh: Tensor | None, n_q: int, length: int, device: torch.device) -> None:
        """Count new positions, and note where the keys of each item are."""
        every = list(range(n_q))
        new = [every] * len(self.counts) if fresh is None else [row.nonzero().flatten().tolist() for row in fresh]
        alike = all(n == length and rows == every for n, rows in zip(self.counts, new, strict=True))
        if self.place is None and not alike:
            self.place = torch.arange(length, device=device).expand(len(self.counts), -1).contiguous()
        if self.place is not None:
            need = max(self.counts) + n_q
            if need > self.place.shape[1]:
                self.place = pad(self.place, (0, need + self.method.block - self.place.shape[1]))
            for item, (n, rows) in enumerate(zip(self.counts, new, strict=True)):
                self.place[item, n : n + len(rows)] = torch.tensor(rows, dtype=torch.long, device=device) + length
        self.counts = [n + len(rows) for n, rows in zip(self.counts, new, strict=True)]

    def crop(self, length: int) -> None:
        """Forget positions from `length` on; copies of blocks that are no longer complete are made again later."""
        for item, n in enumerate(self.counts):
            self.counts[item] = min(n, length) if self.place is None else int((self.place[item, :n] < length).sum())

    def select(self, items: Tensor) -> None:
        """Go on with these items, in this order; an item may appear again."""
        self.counts = [self.counts[i] for i in items.tolist()]
        self.place = None if self.place is None else self.place.index_select(0, items)
        self.copies = Packed(x.index_select(axis, items) for x, axis in zip(self.copies, (0, 1, 0, 1), strict=True))


def _filled(q: Tensor, number: int) -> Tensor:
    """Return the number for one query of each item."""
    return torch.full((q.shape[0], 1), number, device=q.device)


def _longer(x: Tensor, axis: int, more: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = more
    return torch.cat([x, x.new_zeros(shape)], dim=axis)
