"""The keys that a query sees when keys are sorted by bucket: a short arc of the sorted list per hash round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LAST = 2**62  # above every code of a bucket and a position


class Round(NamedTuple):
    """One hash round.

    Query i looks at the keys whose place in the sorted list is base_i + t (mod valid keys), begin_i <= t < end_i; end_i
    is at most twice the chunk. Padded keys come last in the list.
    """

    order: Tensor  # (B, H, n_k): the key at each place
    place: Tensor  # (B, H, n_k): the place of each key
    base: Tensor  # (B, H, n_q)
    begin: Tensor  # (B, H, n_q)
    end: Tensor  # (B, H, n_q)
    group: Tensor  # (B, H, n_q): queries of one group have one base

    def sees(self, query: Tensor | None, key: Tensor | None, count: Tensor) -> Tensor:
        """Return hits of queries (B, H, ..., a) and valid keys (B, H, ..., b), token numbers: (B, H, ..., a, b).

        None stands for all tokens. count: (B or 1,) valid keys.
        """
        place = self.place if key is None else take(self.place, key)
        arc = (x if query is None else take(x, query) for x in (self.base, self.begin, self.end))
        base, begin, end = (x.int().unsqueeze(-1) for x in arc)  # half the memory traffic of int64
        steps = place.int().unsqueeze(-2) - base
        steps = torch.where(steps < 0, steps + count.int().view(-1, *[1] * (steps.ndim - 1)), steps)
        return (steps >= begin) & (steps < end)

    def stretch(self, query: Tensor, width: int, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys from the base of each block of queries on, and which of these each query sees.

        query: (B, H, blocks, rows), one group per block. Returns (B, H, blocks, width) and (B, H, blocks, rows, width).
        """
        steps = torch.arange(width, device=query.device)
        begin, end = (take(x, query).unsqueeze(-1) for x in (self.begin, self.end))
        places = (take(self.base, query[..., :1]) + steps) % count.clamp_min(1)[:, None, None, None]
        return take(self.order, places), (steps >= begin) & (steps < end)


class Tokens(NamedTuple):
    """The masks and sizes that all rounds share."""

    keep: Tensor | None  # (B, n_k) valid keys
    influence: Tensor | None  # (B, n_q) queries that may affect other rows
    valid: Tensor  # (B or 1,) how many keys are valid
    chunk: int


def by_bucket(in_q: Tensor, in_k: Tensor, tokens: Tokens, *, strict: bool) -> Round:
    """Return the 2 * chunk sorted keys around the query's bucket; with `strict` only those inside it.

    The arc is centred on the bucket. Of a bucket that holds more than 2 * chunk keys, it takes those around the query's
    own position (where n_q = n_k; else those in the middle). It starts at a multiple of chunk / 2, so that queries
    share arcs, or ends with the list.
    """
    codes, order, place, span = _sorted(in_k, tokens.keep, in_q.shape[-1])
    low, high = (torch.searchsorted(codes, (in_q + more) * span) for more in (0, 1))
    chunk, step = tokens.chunk, max(tokens.chunk // 2, 1)
    centre = (low + high) // 2
    if in_q.shape[-1] == in_k.shape[-1]:
        own = torch.searchsorted(codes, in_q * span + torch.arange(in_q.shape[-1], device=in_q.device))
        inner = own.maximum(low + chunk).minimum(high - chunk)
        centre = torch.where(high - low > 2 * chunk, inner, centre)
    count = tokens.valid[:, None, None]
    base = ((centre - chunk + step // 2) // step * step).minimum(count - 2 * chunk).clamp_min(0)
    begin, end = torch.zeros_like(base), count.clamp_max(2 * chunk).expand_as(base)
    if strict:
        begin = (low - base).clamp_min(0)
        end = (high - base).clamp_max(2 * chunk).maximum(begin)
    return Round(order, place, base, begin, end, base)


def by_bucket_causal(in_q: Tensor, in_k: Tensor, tokens: Tokens) -> Round:
    """Return the keys of the query's bucket up to its position: those of the current and the previous chunk.

    Which keys these are, and where they stand in the arc, does not depend on later tokens.
    """
    codes, order, place, span = _sorted(in_k, tokens.keep, in_q.shape[-1])
    low = torch.searchsorted(codes, in_q * span)
    upto = in_q * span + torch.arange(in_q.shape[-1], device=in_q.device)
    passed = torch.searchsorted(codes, upto, right=True) - low  # keys of the bucket so far
    chunk = (passed - 1).clamp_min(0) // tokens.chunk
    skipped = (chunk - 1).clamp_min(0) * tokens.chunk
    # Groups are numbered by bucket and not by base, since an empty bucket has the same base as the next one.
    group = in_q * (in_k.shape[-1] // tokens.chunk + 2) + chunk
    return Round(order, place, low + skipped, torch.zeros_like(low), passed - skipped, group)


def by_rank(in_q: Tensor, in_k: Tensor, tokens: Tokens) -> Round:
    """Sort queries like keys; chunk i of the queries sees chunks i - 1 and i of the keys, chunk 0 the last and 0."""
    _, order, place, _ = _sorted(in_k, tokens.keep, in_q.shape[-1])
    _, _, rank, _ = _sorted(in_q, tokens.influence, in_k.shape[-1])
    count = tokens.valid[:, None, None]
    last = ((count - 1) // tokens.chunk).clamp_min(0)  # the last chunk of keys, perhaps a short one
    chunk = (rank // tokens.chunk).minimum(last)
    base = torch.where(chunk == 0, last, chunk - 1) * tokens.chunk
    stop = ((chunk + 1) * tokens.chunk).minimum(count)
    end = torch.where((chunk == 0) & (last > 0), count - base + stop, stop - base)
    return Round(order, place, base, torch.zeros_like(base), end, base)


def _sorted(buckets: Tensor, valid: Tensor | None, other: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sort tokens by (bucket, position), padded last: sorted codes, sorted tokens, places of tokens, code span."""
    span = max(buckets.shape[-1], other)
    codes = buckets * span
    if valid is not None:
        codes = codes.masked_fill(~valid[:, None], _LAST)
    codes, order = (codes + torch.arange(buckets.shape[-1], device=buckets.device)).sort(-1)
    places = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(order)
    return codes, order, torch.empty_like(order).scatter_(-1, order, places), span


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return x (B, H, n) at the tokens `index` (B, H, ...)."""
    return x.gather(-1, index.flatten(2)).view_as(index)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x (B, H, n, d) at the tokens `index` (B, H, ...): (B, H, ..., d)."""
    heads = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], *[1] * (index.ndim - 2))
    rows = (heads * x.shape[2] + index).flatten()  # whole rows are copied faster than entries are gathered
    return x.flatten(0, 2).index_select(0, rows).view(*index.shape, x.shape[-1])


def pack(group: Tensor, influence: Tensor | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Put queries in blocks of `rows`, each from one group; those without influence have blocks of their own.

    Returns the query in each place (B, H, blocks, rows), whether there is one, and each query's place (B, H, n_q).
    """
    if influence is not None:
        group = torch.where(influence[:, None], group, group + group.amax() + 1)
    group, order = group.sort(dim=-1, stable=True)
    n = group.shape[-1]
    position = torch.arange(n, device=group.device).expand_as(group)
    fresh = torch.ones_like(group, dtype=torch.bool)
    fresh[..., 1:] = group[..., 1:] != group[..., :-1]
    row = (position - position.masked_fill(~fresh, 0).cummax(-1).values) % rows
    block = (row == 0).cumsum(-1) - 1
    places = int(block.max()) * rows + rows
    place = block * rows + row
    query = torch.zeros(*group.shape[:2], places, dtype=torch.int64, device=group.device).scatter_(-1, place, order)
    filled = torch.zeros_like(query, dtype=torch.bool).scatter_(-1, place, torch.ones_like(fresh))
    slot = torch.empty_like(place).scatter_(-1, order, place)
    return query.unflatten(-1, (-1, rows)), filled.unflatten(-1, (-1, rows)), slot
