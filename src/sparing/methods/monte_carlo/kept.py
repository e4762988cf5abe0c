"""Keep what projections of a weight share, as long as the memory of the weight lives and holds the same entries.

The tables are an attribute of the weight's storage, so that they go when it goes, and views of a parameter that a
module makes anew in each call find them. Each use compares a hash of the weight's entries, which takes a sixth of the
time of the tables: version counters would miss what is written through `.data`, numpy or shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.native.library import instruction_set_in_use

_TABLES = "sparing_projection_tables"


class Tables(NamedTuple):
    """What `projection_tables` returns, for each head."""

    rows: Tensor
    inverse: Tensor
    ladder: Tensor
    starts: Tensor


class _Kept(NamedTuple):
    fingerprint: Tensor
    tables: Tables


def tables_of(weight: Tensor, heads: int) -> Tables:
    """Return the tables of a contiguous weight (H e, d), computed once while its entries stay the same."""
    storage: Any = weight.untyped_storage()
    kept: dict[Any, _Kept] | None = getattr(storage, _TABLES, None)
    if kept is None:
        kept = {}
        setattr(storage, _TABLES, kept)
    place = weight.storage_offset(), tuple(weight.shape), weight.dtype
    key = (heads, instruction_set_in_use(), *place)  # the layout of rows differs by instruction set
    fingerprint = torch.ops.sparing.weight_fingerprint(weight)
    found = kept.get(key)
    if found is None or not _same(found.fingerprint, fingerprint):
        found = kept[key] = _Kept(fingerprint, Tables(*torch.ops.sparing.projection_tables(weight, heads)))
    return found.tables


def _same(before: Tensor, now: Tensor) -> bool:
    return torch.equal(before, now)
