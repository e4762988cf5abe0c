"""Sliding-window attention with sinks and global tokens (Longformer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing import native
from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob, method
from sparing.maths import blocks, dense
from sparing.maths.packing import place_of_rank
from sparing.methods.window.native import window, window_step
from sparing.native.attend import attend
from sparing.native.tensors import widened

_SCORES = 2**22  # most logits in memory at once


@dataclass(frozen=True, kw_only=True)
class Window(Method):
    """Softmax over a window around each query (Beltagy et al., "Longformer", 2020; Value-aware section 4).

    out_i = sum_{j in S_i} softmax_{j in S_i}(s q_i.k_j) v_j,  S_i = {j : |i - j| <= size/2} u sinks u globals

    One softmax runs over the union, in which each key counts once. The window is counted in absolute positions: masked
    tokens inside it keep their place and get no weight. Causal calls take S_i = {i - size, ..., i}, and sinks and
    global tokens up to i. Sinks and global tokens are the first *valid* tokens. There is no error bound: what lies
    outside the window is lost.

    size: number of keys besides the query's own position, half on each side, or all on the left if causal. It must be
        even; 0 leaves only the query's own position.
    sinks: number of first keys that every query sees.
    global_tokens: number of first tokens that every query sees *and* whose own queries see everything.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="window(size=32, sinks=4)", is_causal=True).shape
    torch.Size([1, 2, 300, 16])
    """

    name = "window"
    budget = "size"
    supports = Supports(
        causal=True, cross_attention=False, lse=True, position_based=True, decode=True, decode_16bit=True,
        native_16bit=True, adopt=True, training_free=True,
    )  # fmt: skip

    size: int = knob(128, minimum=0)
    sinks: int = knob(0, minimum=0)
    global_tokens: int = knob(0, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 2:
            raise ValueError(f"window: size={self.size} must be even: half of it lies on each side of the query")

    def sides(self, call: Call) -> tuple[int, int]:
        """Return keys to the left and to the right of the query."""
        return (self.size, 0) if call.mask.causal else (self.size // 2, self.size // 2)

    def reach(self, n_q: int, n_k: int, device: torch.device, call: Call) -> Tensor:
        """Return S_i as a boolean matrix, without padding and causality: (B or 1, 1, n, n)."""
        left, right = self.sides(call)
        position = torch.arange(n_k, device=device)
        apart = position - position[:, None]  # j - i
        ranks, _ = call.mask.key_ranks(n_k, device)  # (B or 1, n)
        valid = torch.ones_like(ranks, dtype=torch.bool) if call.mask.keep is None else call.mask.keep
        shared = valid & (ranks < max(self.sinks, self.global_tokens))
        everything = valid & (ranks < self.global_tokens)
        near = (apart >= -left) & (apart <= right)
        return near | shared[:, None, None, :] | everything[:, None, :, None]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        seen = self.reach(q.shape[-2], k.shape[-2], q.device, call)
        weights, lse = dense.softmax(dense.logits(q, k, call).masked_fill(~seen, -torch.inf))  # (B, H, n, n)
        call.note(lse=lse)
        return weights @ v

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        n = q.shape[-2]
        left, right = self.sides(call)
        if left >= n - 1 and (call.mask.causal or right >= n - 1):  # the window holds every pair
            return self.reference(q, k, v, call) if call.noted else method("exact").fast(q, k, v, call)
        left, right = min(left, n - 1), min(right, n - 1)
        near = _band(q, k, v, call, left, right)
        shared = min(max(self.sinks, self.global_tokens), n)
        if shared:
            near = blocks.merge(near, _first_keys(q, k, v, call, shared, left, right))
        out, lse = near.finish()
        if self.global_tokens:
            position, exists = _first_tokens(call, min(self.global_tokens, n), q.device)
            rows = _global_rows(_pick(q, position), k, v, call, position)
            out, lse = _replace_rows(out, lse, rows, position, exists)
        call.note(lse=lse)
        return out

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        n = q.shape[-2]
        left, right = self.sides(call)
        shared = None
        if count := min(max(self.sinks, self.global_tokens), n):
            position, exists = _first_tokens(call, count, q.device)
            shared = position.masked_fill(~exists, -1).expand(q.shape[0], -1)
        out, lse = window(q, k, v, call.mask.keep, shared, left, right, call.mask.causal, call.scale)
        if self.global_tokens:
            position, exists = _first_tokens(call, min(self.global_tokens, n), q.device)
            first = _pick(q, position)
            if call.mask.causal:  # global tokens come first, so they see only one another
                last = int(position.masked_fill(~exists, 0).max()) + 1
                first, early_k, early_v = (widened(x) for x in (first, k[:, :, :last], v[:, :, :last]))
                keep = None if call.mask.keep is None else call.mask.keep[:, :last]
                rows = _global_rows(first, early_k, early_v, call.with_mask(keep=keep), position)
            else:
                rows = attend(first, k, v, call.mask.keep, None, call.scale)
            out, lse = _replace_rows(out, lse, rows, position, exists)
        call.note(lse=lse)
        return out

    def covers(self, n_k: int) -> bool:
        return self.size >= n_k - 1

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        n_q, n = q.shape[2], k.shape[2]
        if keep is None and n - n_q >= self.global_tokens and native.ready(q, half=True) and k.dtype == q.dtype:
            shared = max(self.sinks, self.global_tokens)
            out, lse = window_step(q, k, v, self.size, shared, scale)
            own = torch.arange(n - n_q, n, device=q.device)
            read = (own + 1).clamp_max(self.size + 1) + (own - self.size).clamp(0, shared)
            return out, {"lse": lse, "touched": read.expand_as(lse)}
        q = widened(q)
        valid = torch.ones(q.shape[0], n, dtype=torch.bool, device=q.device) if keep is None else keep
        sees_all = valid.cumsum(-1)[:, n - n_q :, None] <= self.global_tokens  # (B, n_q, 1)
        low = max(n - n_q - self.size, 0)  # the first position of any window
        if self.global_tokens and bool(sees_all.any()):
            low = 0
        place, row = torch.arange(low, n, device=q.device), torch.arange(n - n_q, n, device=q.device)[:, None]
        seen = valid[:, None, low:] & ((place >= row - self.size) | sees_all) & (place <= row)
        keys, values = k[:, :, low:], v[:, :, low:]
        if shared := min(max(self.sinks, self.global_tokens), n):
            first = place_of_rank(valid)[:, :shared]
            exists = torch.arange(shared, device=q.device) < valid.sum(-1, keepdim=True)
            far = exists[:, None] & (first[:, None] < row - self.size) & ~sees_all  # each key once
            keys, values = (torch.cat([_pick(x, first), y], dim=2) for x, y in ((k, keys), (v, values)))
            seen = torch.cat([far, seen], dim=-1)
        seen = seen & valid[:, n - n_q :, None]
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.to(q.dtype).repeat_interleave(groups, dim=1) for x in (keys, values))
        weights, lse = dense.softmax((q @ keys.mT * scale).masked_fill(~seen[:, None], -torch.inf))
        return weights @ values, {"lse": lse, "touched": seen.sum(-1)[:, None].expand_as(lse)}

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, size=2 * max(shape.queries, shape.keys))

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        n, units = shape.queries, shape.batch * shape.heads
        shared, rows = min(max(self.sinks, self.global_tokens), n), min(self.global_tokens, n)
        if (self.size if shape.causal else self.size // 2) >= n - 1:  # the window holds every pair
            return method("exact").cost(shape)
        block = _block(self.size)
        # Each block of queries is multiplied with one stretch of keys; the last block is filled up.
        pairs = float(-(-n // block) * block * (self.size + block) + n * shared + rows * n)
        copies = n * (2 * shape.head_dim + 3 * shape.value_dim)  # padded q, k, v; parts of the output
        return Cost(
            units * pairs * (2 * shape.head_dim + 1 + 2 * shape.value_dim) + shape.projection_flops,
            4.0 * (2 * min(units * pairs, _SCORES) + units * copies),
            min(self.size + 1 + shared, n),
        )


def _block(size: int) -> int:
    """Return how many queries share one stretch of keys, so that a key lies in no more than about five stretches."""
    return max(64, size // 4)


def _band(q: Tensor, k: Tensor, v: Tensor, call: Call, left: int, right: int) -> blocks.Part:
    """Compute blocks of queries, each against the stretch of keys that its windows cover.

    All heads are laid end to end, so that the overlapping stretches are a view and not a copy; what a stretch covers
    of a neighbouring head is masked like padding.
    """
    batch, heads, n, _ = q.shape
    block = _block(left + right)
    count, width = -(-n // block), left + block + right
    spare = count * block - n

    def laid(x: Tensor, before: int, after: int) -> Tensor:
        return pad(pad(x, (0, 0, 0, spare)).flatten(0, 2), (0, 0, before, after))

    keys, values = (laid(x, left, right).unfold(0, width, block) for x in (k, v))  # (B H count, d or e, width)
    queries = laid(q, 0, 0).unflatten(0, (-1, block))  # (B H count, block, d)
    offset = torch.arange(width, device=q.device) - torch.arange(block, device=q.device)[:, None]
    outside = (offset < 0) | (offset > left + right)  # (block, width)
    valid = torch.ones(1, n, dtype=torch.bool, device=q.device) if call.mask.keep is None else call.mask.keep
    valid = pad(valid, (left, right + spare)).unfold(-1, width, block)  # (B or 1, count, width)
    hidden = ~valid[:, None].expand(batch, heads, -1, -1).flatten(0, 2)[:, None]  # (B H count, 1, width)
    at_once = max(_SCORES // (block * width), 1)
    parts = [
        blocks.part((a @ b * call.scale).masked_fill(outside | c, -torch.inf), d.mT)
        for a, b, c, d in zip(*(x.split(at_once) for x in (queries, keys, hidden, values)), strict=True)
    ]
    columns = (torch.cat(column).reshape(batch, heads, count * block, -1) for column in zip(*parts, strict=True))
    return blocks.Part(*(x[:, :, :n] for x in columns))


def _first_tokens(call: Call, how_many: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions (B or 1, how_many) of the first valid tokens, and which of these exist."""
    wanted = torch.arange(how_many, device=device)
    if call.mask.keep is None:
        return wanted[None], torch.ones(1, how_many, dtype=torch.bool, device=device)
    return place_of_rank(call.mask.keep)[:, :how_many], wanted < call.mask.keep.sum(-1, keepdim=True)


def _pick(x: Tensor, position: Tensor) -> Tensor:
    """Return the tokens of x (B, H, n, d) at (B or 1, m) positions."""
    return x.gather(2, position[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))


def _first_keys(q: Tensor, k: Tensor, v: Tensor, call: Call, shared: int, left: int, right: int) -> blocks.Part:
    """Return the sinks and global keys outside the query's own window: each key counts once."""
    n = q.shape[-2]
    position, exists = _first_tokens(call, shared, q.device)  # (B or 1, shared)
    apart = position[:, None, :] - torch.arange(n, device=q.device)[:, None]  # (B or 1, n, shared)
    allowed = exists[:, None, :] & ((apart < -left) | (apart > right))
    if call.mask.causal:
        allowed = allowed & (apart <= 0)
    scores = q @ _pick(k, position).mT * call.scale
    return blocks.part(scores.masked_fill(~allowed[:, None], -torch.inf), _pick(v, position))


def _global_rows(first: Tensor, k: Tensor, v: Tensor, call: Call, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of global tokens at (B or 1, m) positions; first: their queries (B, H, m, d)."""
    scores = first @ k.mT * call.scale  # (B, H, m, n)
    if call.mask.keep is not None:
        scores = scores.masked_fill(~call.mask.keep[:, None, None, :], -torch.inf)
    if call.mask.causal:
        future = torch.arange(k.shape[-2], device=k.device) > position[..., None]
        scores = scores.masked_fill(future[:, None], -torch.inf)
    return blocks.part(scores, v).finish()


def _replace_rows(
    out: Tensor, lse: Tensor, rows: tuple[Tensor, Tensor], position: Tensor, exists: Tensor
) -> tuple[Tensor, Tensor]:
    """Put rows, (B, H, m, e) and (B, H, m), at those of (B or 1, m) positions that exist."""
    place, there = position[:, None].expand(*out.shape[:2], -1), exists[:, None]
    found = torch.where(there.unsqueeze(-1), rows[0], _pick(out, position))
    found_lse = torch.where(there, rows[1], lse.gather(2, place))
    return out.scatter(2, place.unsqueeze(-1).expand_as(found), found), lse.scatter(2, place, found_lse)
