"""Attention to keys that are read and to copies of few bits of the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.methods.multipole.copies import Copy, pack_keys, pack_values
from sparing.native.library import schemas
from sparing.native.tensors import contiguous_rows

schemas.define(
    "multipole(Tensor q, Tensor k, Tensor v, Tensor? place, Tensor seen, Tensor near, Tensor key_codes,"
    " Tensor key_scales, Tensor value_codes, Tensor value_scales, int block, int bits, int sinks, float least_share,"
    " float scale) -> (Tensor out, Tensor notes)"
)


class Packed(tuple[Tensor, Tensor, Tensor, Tensor]):
    """Codes and scales of keys, codes and scales of values, laid out for the kernel."""

    @classmethod
    def of(cls, keys: Copy, values: Copy) -> Packed:
        """Lay out both copies."""
        packed_values = pack_values(values.codes, values.bits)
        return cls((pack_keys(keys.codes), keys.scales.contiguous(), packed_values, values.scales.contiguous()))


def multipole(
    q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor | None, Tensor, Tensor], copies: Packed,
    settings: tuple[int, int, int, float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output (B, H, n_q, e) and notes (3, B, H, n_q): log-sum-exp, predicted error, keys that were read.

    q: (B, H, n_q, d). k, v: (B, H_kv, n, .), of the type of q, which may have 16 bits. rows: (B, .) position of each
    rank, or None where they are the same; (B, n_q) number of keys that a query sees; (B, n_q) rank from which on it
    reads all of them. settings: block, bits of values, sinks, least share of a key that is read, scale. There is
    no gradient.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    return torch.ops.sparing.multipole(q, k, v, *rows, *copies, *settings)


@torch.library.register_fake("sparing::multipole", lib=schemas)
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(3, *q.shape[:3], dtype=kind)
