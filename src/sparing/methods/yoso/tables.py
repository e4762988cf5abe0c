"""Sums over all pairs of tokens that share a bucket, in time linear in the number of tokens.

out_i = sum_{j in the bucket of i} (left_i . left_j) slope(point_i . point_j) point_j

A bucket with r tokens on one side and c on the other is summed pair by pair, or, without a slope, through the outer
products of the c tokens, `left_i (sum_j left_j^T point_j)`: never more than O((r + c) e d). Where the order of the
tokens matters ("past": j <= i, "future": j >= i), a bucket is cut into tiles of a few tokens: the tile that i stands in
goes pair by pair, whole tiles before or after it through a running sum of outer products. What is summed how, and in
which order, then never depends on tokens that i may not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from sparing.maths.long_sums import RUN

Order = Literal["all", "past", "future"]
Slope = Callable[[Tensor], Tensor]

_TILE = 32
_PAIR_COST = 8  # time of a multiply-add of a pair, whose operands are gathered, over one in a matrix product
_PAIRS_AT_ONCE = 1 << 13  # so few that their rows stay in the cache


class Tokens(NamedTuple):
    """One side of a sum, one row per token, in the order of their places within each sequence."""

    place: Tensor  # (N,) int64, position in the sequence
    left: Tensor  # (N, e)
    point: Tensor  # (N, d)


class Runs(NamedTuple):
    """Tokens sorted by bucket: one run per bucket that holds any, then an empty run that stands for all others."""

    bucket: Tensor  # (R,)
    order: Tensor  # (N,) which token stands where
    first: Tensor  # (R + 1,)
    size: Tensor  # (R + 1,)

    def find(self, bucket: Tensor) -> Tensor:
        """Return the run of each bucket."""
        nowhere = len(self.bucket)
        run = torch.searchsorted(self.bucket, bucket)
        return run.masked_fill(self.bucket[run.clamp_max(nowhere - 1)] != bucket, nowhere)


def runs_of(bucket: Tensor) -> Runs:
    """Sort tokens by bucket, keeping their order inside each; there must be at least one."""
    ordered, order = bucket.sort(stable=True)
    distinct, count = ordered.unique_consecutive(return_counts=True)
    count = torch.cat([count, count.new_zeros(1)])
    return Runs(distinct, order, count.cumsum(0) - count, count)


def table_sums(mine: Tensor, theirs: Tensor, values: Tensor) -> Tensor:
    """Return the sum of the values (M, e) in the bucket of each of mine: tables without their empty rows.

    Long runs are summed in pieces, whose sums are added up: one running sum of 10^5 numbers loses three digits.
    """
    runs = runs_of(theirs)
    pieces = (runs.size + RUN - 1) // RUN
    before = pieces.cumsum(0) - pieces
    run = torch.arange(len(pieces), device=pieces.device).repeat_interleave(pieces)
    number = torch.arange(len(run), device=run.device)
    parts = embedding_bag(runs.order, values, runs.first[run] + RUN * (number - before[run]), mode="sum")
    table = embedding_bag(number, parts, before, mode="sum")  # (R + 1, e), the last row zero
    return table.index_select(0, runs.find(mine))


def bucket_sums(
    mine: Tokens, theirs: Tokens, buckets: tuple[Tensor, Tensor], order: Order, slope: Slope | None = None
) -> Tensor:
    """Return the sum at the top of this module, (N, d). With a slope all colliding pairs are visited: O(N^2) at worst.

    buckets: those of mine (N,) and of theirs (M,), as int64; different sequences have different buckets.
    """
    runs = runs_of(buckets[1])
    run = runs.find(buckets[0])
    begin, end = runs.first[run], runs.first[run] + runs.size[run]
    start, stop = begin, end  # which of the sorted tokens each of mine sees
    if order != "all":
        seen = _seen(mine.place, theirs.place, buckets, runs, order).clamp(begin, end)
        start, stop = (begin, seen) if order == "past" else (seen, end)
    left, point = theirs.left.index_select(0, runs.order), theirs.point.index_select(0, runs.order)
    if slope is not None:
        return _pair_sums(mine, left, point, start, stop, slope)

    if order == "all":
        tiled = _prefers_tiles(torch.bincount(run, minlength=len(runs.size)), runs.size, left, point)
    else:
        tiled = runs.size >= _TILE
    states, first_tile, tiles = _states(left, point, runs, tiled, backwards=order == "future")
    if order == "all":
        state = torch.where(tiled[run], (first_tile + tiles - 1)[run], -1)
        start = torch.where(tiled[run], stop, start)
    elif order == "past":
        whole = (stop - begin) // _TILE
        state = torch.where(whole > 0, first_tile[run] + whole - 1, -1)
        start = begin + whole * _TILE
    else:
        beyond = (start - begin) // _TILE + 1
        state = torch.where(beyond < tiles[run], first_tile[run] + beyond, -1)
        stop = torch.minimum(stop, begin + beyond * _TILE)
    out = _pair_sums(mine, left, point, start, stop, None)
    _add_products(out, mine.left, states, state)
    return out


def _seen(place: Tensor, their_place: Tensor, buckets: tuple[Tensor, Tensor], runs: Runs, order: Order) -> Tensor:
    """Return where in the sorted tokens the past of each of mine ends, or its future begins."""
    span = int(torch.maximum(place.max(), their_place.max())) + 1
    placed = (buckets[1] * span + their_place).index_select(0, runs.order)
    return torch.searchsorted(placed, buckets[0] * span + place, right=order == "past")


def _prefers_tiles(r: Tensor, c: Tensor, left: Tensor, point: Tensor) -> Tensor:
    """Return for each run whether outer products are cheaper than r x c pairs; they are where r x c >> r + c."""
    e, d = left.shape[1], point.shape[1]
    return _PAIR_COST * r * c * (e + d) > _TILE * (_tiles(r) + _tiles(c)) * e * d


def _tiles(count: Tensor) -> Tensor:
    return (count + _TILE - 1) // _TILE


def _slots(count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give each group of rows tiles of its own; return each row's slot, and each group's first tile and tile count."""
    tiles = _tiles(count)
    first = tiles.cumsum(0) - tiles
    shift = first * _TILE - (count.cumsum(0) - count)
    slot = torch.arange(int(count.sum()), device=count.device) + shift.repeat_interleave(count)
    return slot, first, tiles


def _packed(rows: Tensor, slot: Tensor, tiles: int) -> Tensor:
    """Return rows as (tiles, _TILE, width), zero where no row stands."""
    packed = rows.new_zeros(tiles * _TILE, rows.shape[1])
    packed.index_copy_(0, slot, rows)
    return packed.view(tiles, _TILE, rows.shape[1])


def _states(
    left: Tensor, point: Tensor, runs: Runs, tiled: Tensor, *, backwards: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outer products (T, e, d) of each tile, plus those of the tiles before (or after) it in its run."""
    members = tiled.repeat_interleave(runs.size).nonzero().squeeze(-1)
    slot, first, tiles = _slots(runs.size * tiled)
    total = int(tiles.sum())
    lefts, points = (_packed(x.index_select(0, members), slot, total) for x in (left, point))
    states = torch.bmm(lefts.mT, points)
    turn = torch.arange(total, device=left.device) - first.repeat_interleave(tiles)
    if backwards:
        turn = tiles.repeat_interleave(tiles) - 1 - turn
    if total:
        for at in turn.argsort(stable=True).split(turn.bincount().tolist())[1:]:
            states.index_add_(0, at, states.index_select(0, at + 1 if backwards else at - 1))
    return states, first, tiles


def _add_products(out: Tensor, left: Tensor, states: Tensor, state: Tensor) -> None:
    """Add left_i @ states[state_i] to out_i where state_i >= 0, rows with the same state together."""
    chosen = (state >= 0).nonzero().squeeze(-1)
    if not len(chosen):
        return
    ordered, by_state = state[chosen].sort(stable=True)
    chosen = chosen[by_state]
    distinct, count = ordered.unique_consecutive(return_counts=True)
    slot, _, tiles = _slots(count)
    packed = _packed(left.index_select(0, chosen), slot, int(tiles.sum()))
    products = torch.bmm(packed, states.index_select(0, distinct.repeat_interleave(tiles)))
    out.index_add_(0, chosen, products.flatten(0, 1).index_select(0, slot))


def _pair_sums(mine: Tokens, left: Tensor, point: Tensor, start: Tensor, stop: Tensor, slope: Slope | None) -> Tensor:
    """Sum each of mine against the sorted tokens from start to stop, a bounded number of pairs at a time."""
    count = stop - start
    out = []
    pieces = ((count.cumsum(0) - 1).clamp_min(0) // _PAIRS_AT_ONCE).unique_consecutive(return_counts=True)[1]
    for piece in torch.arange(len(count), device=count.device).split(pieces.tolist()):
        few = count[piece]
        before = few.cumsum(0) - few
        i = piece.repeat_interleave(few)
        j = torch.arange(len(i), device=i.device) + (start[piece] - before).repeat_interleave(few)
        weight = (mine.left.index_select(0, i) * left.index_select(0, j)).sum(-1)
        if slope is not None:
            weight = weight * slope((mine.point.index_select(0, i) * point.index_select(0, j)).sum(-1))
        out.append(embedding_bag(j, point, before, mode="sum", per_sample_weights=weight))
    return torch.cat(out)
