"""Draw landmark rows among valid queries and keys by rank, so that they do not depend on padding or the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.call import Call
from sparing.maths.packing import place_of_rank


class Landmarks(NamedTuple):
    """Row numbers of [Q; K]: queries first, keys from n_q on. Items with few rows leave slots unused."""

    rows: Tensor  # (B or 1, H or 1, m) int64
    used: Tensor  # (B or 1, 1, m) boolean
    valid: Tensor  # (B or 1, n_q + n_k) boolean: rows that may be landmarks


def draw_landmarks(sampling: str, count: int, n_q: int, n_k: int, call: Call, device: torch.device) -> Landmarks:
    """Draw `count` landmark rows per item and head, or take all valid rows where there are no more.

    sampling: "without_replacement" and "half" take half of them from the queries and half from the keys, the latter
        with replacement; a side with too few rows leaves the rest to the other. "iid" draws from all rows with
        replacement. "all" takes every row.
    """
    for_q = torch.ones(1, n_q, dtype=torch.bool, device=device) if call.mask.influence is None else call.mask.influence
    for_k = torch.ones(1, n_k, dtype=torch.bool, device=device) if call.mask.keep is None else call.mask.keep
    items = max(for_q.shape[0], for_k.shape[0])
    valid = torch.cat([for_q.expand(items, -1), for_k.expand(items, -1)], dim=-1)
    queries, keys = (t.expand(items, -1).sum(-1).view(-1, 1, 1) for t in (for_q, for_k))  # (B or 1, 1, 1)
    rows = queries + keys
    slot = torch.arange(n_q + n_k if sampling == "all" else min(count, n_q + n_k), device=device)
    ranks, used = slot.expand(items, 1, -1), slot < rows  # all rows
    if sampling != "all" and bool((rows > count).any()):
        drawn = _ranks(sampling, count, slot, queries, keys, n_q, n_k, call)
        ranks, used = torch.where(rows > count, drawn, ranks), (rows > count) | used
    places = place_of_rank(valid).unsqueeze(1).take_along_dim(ranks, dim=-1)
    return Landmarks(places, used, valid)


def _ranks(
    sampling: str, count: int, slot: Tensor, queries: Tensor, keys: Tensor, n_q: int, n_k: int, call: Call
) -> Tensor:
    """Return ranks (B or 1, H, m): queries from 0, keys after the valid queries. Only valid where rows > count."""
    if sampling == "without_replacement":
        from_q = torch.minimum(queries, (count - keys).clamp_min(count // 2))
        q_ranks = _shuffled("skyformer.queries", n_q, min(count, n_q), queries, call)
        k_ranks = _shuffled("skyformer.keys", n_k, min(count, n_k), keys, call)
        at_q = slot.clamp(max=q_ranks.shape[-1] - 1).expand(queries.shape[0], 1, -1)
        at_k = (slot - from_q).clamp(0, k_ranks.shape[-1] - 1)
        return torch.where(slot < from_q, q_ranks.take_along_dim(at_q, -1), queries + k_ranks.take_along_dim(at_k, -1))
    uniform = call.draws.uniform(f"skyformer.{sampling}", slot.shape[0]).to(slot.device)  # (H, m)
    if sampling == "iid":
        return (uniform * (queries + keys)).long()
    from_q = torch.where(keys == 0, count, count // 2).where(queries > 0, torch.zeros_like(queries))
    return torch.where(slot < from_q, (uniform * queries).long(), queries + (uniform * keys).long())


def _shuffled(purpose: str, n: int, count: int, valid: Tensor, call: Call) -> Tensor:
    """Return ranks below `valid` (B or 1, 1, 1) in random order, (B or 1, H, count); a smaller count gives a prefix."""
    rank = torch.arange(n, device=valid.device)
    # The rank in the low bits makes all numbers different, so that no order depends on how ties are broken.
    number = (call.draws.bits(purpose, n) << 31) | rank
    number = number.expand(valid.shape[0], -1, -1).masked_fill(rank >= valid, torch.iinfo(torch.int64).max)
    return number.topk(count, dim=-1, largest=False).indices
