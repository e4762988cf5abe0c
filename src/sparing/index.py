"""`Index`: the state that decoding keeps beside a cache of keys and values, so that a query need not read all of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sparing.call import Call, Past
from sparing.contract import Method, Unsupported, list_methods
from sparing.contract import method as _method
from sparing.draws import Draws, check_seed
from sparing.functional import inspect, memory_errors_named
from sparing.mask import Mask
from sparing.quarantine import LARGEST_SCALE, are_moderate, is_moderate, limit_of, quarantine

_WIDE = (torch.float32, torch.float64)  #: types that methods compute in


class Index:
    """Compute causal attention to a growing sequence by one method.

    Each call passes the queries of the newest positions, and all keys and values so far, as a cache holds them. The
    outputs are the rows that one `sparing.attention(..., is_causal=True)` over the whole sequence would give. The
    index is appended to and never built again: after a prompt, a step costs only what the method reads.

    method: a method that supports decoding, "multipole", "window" or "top_keys", with its settings.
    seed: fixes all random choices; None draws one number from torch's global generator.
    scale: factor of the logits; None for 1 / sqrt(d).
    streams: one random stream number per key-value head; None numbers them 0, 1, 2, ...

    `length` is the number of positions that the index knows. `statistics` holds what the method noted about the last
    call, each [B, H, n_q]: `lse`, the log-sum-exp of the logits, `touched`, the number of keys that were read, and
    `error`, the predicted distance to exact attention. Where the budget covers all keys, attention is exact and
    `statistics` is empty.

    >>> k, v = torch.randn(2, 1, 2, 301, 16).unbind(0)
    >>> index = sparing.Index("multipole(tolerance=0.02)")
    >>> prompt = index.attention(torch.randn(1, 4, 300, 16), k[:, :, :300], v[:, :, :300])
    >>> index.attention(torch.randn(1, 4, 1, 16), k, v).shape
    torch.Size([1, 4, 1, 16])
    """

    def __init__(
        self,
        method: str | Method,
        *,
        seed: int | None = 0,
        scale: float | None = None,
        streams: Sequence[int] | None = None,
    ) -> None:
        self.method = _method(method)
        if not self.method.supports.decode:
            able = ", ".join(name for name, cls in list_methods().items() if cls.supports.decode)
            raise Unsupported(f"method: {self.method.name} cannot continue a cache; methods that can: {able}")
        check_seed(seed)
        self.seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
            raise TypeError(f"scale={scale!r} must be a number or None")
        if scale is not None and not abs(scale) <= LARGEST_SCALE:
            raise ValueError(f"scale={scale!r} must be finite, and its magnitude at most {LARGEST_SCALE:g}")
        self.scale = scale
        self.streams = None if streams is None else list(streams)
        self.reset()

    def reset(self) -> None:
        """Forget everything, so that the next call starts a sequence."""
        self.length = 0
        self.statistics: Mapping[str, Tensor] = {}
        self._batch = 0
        self._kind: tuple[object, ...] | None = None
        self._keep: Tensor | None = None  # (B, length) which keys are valid; None for all
        self._past: Past | None = None
        self._odd = False  # whether any key or value so far, padding included, was non-finite or large

    def __copy__(self) -> Index:
        """Return an independent copy, as `copy.deepcopy` does, since a step writes to the index's tensors in place."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"Index({str(self.method)!r}, seed={self.seed}): {self.length} positions, batch of {self._batch}"

    @property
    def batch(self) -> int:
        """Number of sequences that the index follows; 0 before the first call."""
        return self._batch

    def attention(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return attention [B, H, n_q, e] of the newest positions to the whole sequence.

        query: [B, H, n_q, d], the newest positions. key: [B, H_kv, n, d] and value: [B, H_kv, n, e], all positions.
        attn_mask: boolean, [B, n] or [B, 1, 1, n], False for padding; it may not change for positions of earlier calls.
        Rows of padding give zeros, except in a prompt.
        """
        keep = self._arriving(query, key, value, attn_mask)
        if self.length == 0:
            mask, past = None if keep is None else keep[:, None, None, :], self.begin(query, key, value)
            try:
                found = inspect(
                    query, key, value, mask, is_causal=True, scale=self.scale, method=self.method, seed=self.seed,
                    enable_gqa=query.shape[1] != key.shape[1], streams=self.streams, brief=True, past=past,
                )  # fmt: skip
                self._learn(query, key, value, keep)
            except BaseException:
                self.reset()
                raise
            self.statistics = found.statistics
            return found.output
        return self.advance(query, key, value, keep)

    def advance(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Run `attention` after a prompt, for arguments that `fits` and `agrees` accepted. keep: [B, n]."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise Unsupported("query, key and value: decoding has no gradient; call it under torch.no_grad()")
        with memory_errors_named(self.method, query=query, key=key), _plainly(query):
            q, k, v, spoiled = self._clean(query, key, value, keep)
            if self.method.covers(key.shape[2]):
                out, self.statistics = self._exact(q, k, v, keep), {}
                self._take_in(q, k, v, keep)
            elif self._past is None:
                out, self.statistics = self.method.step(self._readable(q), k, v, keep, self._scale(query))
            else:
                q, k, v = map(self._readable, (q, k, v))
                out, self.statistics = self._past.step(q, k, v, self._fresh(keep, q.shape[2]), self.length)
            self._seen(query, key, value, keep)
            out = out if out.dtype is query.dtype else out.to(query.dtype)
            return out if spoiled is None else out.masked_fill(spoiled, torch.nan)

    def begin(self, query: Tensor, key: Tensor, value: Tensor) -> Past | None:
        """Make and return the state that the method keeps for a prompt like this; None if it keeps none."""
        with memory_errors_named(self.method, query=query, key=key), _plainly(query):
            draws = self._draws(query, key)
            self._past = self.method.past(self._readable(query), key, value, draws, self._scale(query))
        return self._past

    def append(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> None:
        """Add positions whose attention was computed elsewhere, such as an exact prompt."""
        self._learn(query, key, value, self._arriving(query, key, value, attn_mask))

    def adopt(self, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, heads: int) -> None:
        """Learn from positions whose queries nobody kept, such as those of a cache that was filled before.

        key, value, attn_mask: as in `attention`. heads: of the queries that will follow.
        """
        if not self.method.supports.adopt:
            able = ", ".join(name for name, cls in list_methods().items() if cls.supports.adopt)
            raise Unsupported(
                f"method: {self.method.name} learns from the queries of a sequence, which are needed to append it; "
                f"methods that need keys and values alone: {able}"
            )
        if key.ndim != 4:
            raise ValueError(f"key has shape {list(key.shape)}; it must be [batch, heads, positions, size]")
        if key.shape[2] <= self.length:
            raise ValueError(
                f"key has {key.shape[2]} positions, and the index knows {self.length}; there is nothing new"
            )
        unread = key[:, :1, self.length :].expand(-1, heads, -1, -1)  # stands in for the queries
        self.append(unread, key, value, attn_mask)

    def crop(self, length: int) -> None:
        """Forget the positions from `length` on."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length={length!r} must be an integer")
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length} must be from 0 to {self.length}, the positions that the index knows")
        if length == 0:
            self.reset()
        elif length < self.length:
            if self._past is not None:
                with torch.inference_mode(False):
                    self._past.crop(length)
            self._keep = None if self._keep is None else self._keep[:, :length]
            self.length = length

    def select(self, items: Tensor) -> None:
        """Keep these items of the batch, in this order; an item may appear again (beams)."""
        if self.length == 0:
            return
        items = torch.as_tensor(items)
        if items.dtype not in (torch.int32, torch.int64) or items.numel() == 0:
            raise ValueError(f"items={items.tolist()} must be a non-empty list of integers")
        if items.ndim != 1 or bool(((items < 0) | (items >= self._batch)).any()):
            raise ValueError(f"items={items.tolist()} must be a list of integers from 0 to {self._batch - 1}")
        if items.tolist() == list(range(self._batch)):
            return
        if self._past is not None:
            with memory_errors_named(self.method, items=items), _plainly(items):
                self._past.select(items)
        self._keep = None if self._keep is None else self._keep[items]
        self._batch = len(items)

    def _scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _arriving(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor | None:
        """Check every size before anything changes; return the mask as (B, n), or None."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} is {type(x).__name__}; it must be a tensor")
            if x.ndim != 4:
                raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, positions, size]")
        if len({x.dtype for x in (query, key, value)}) > 1 or not query.is_floating_point():
            raise ValueError(
                f"query {query.dtype}, key {key.dtype} and value {value.dtype} must have the same floating-point dtype"
            )
        batch, _, n_q, _ = query.shape
        n = key.shape[2]
        if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != query.shape[3]:
            raise ValueError(
                f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit together"
            )
        if not key.shape[1] or not query.shape[1]:
            raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; each must have at least one")
        if not query.shape[3]:
            raise ValueError(
                f"query has head dimension 0, shape {list(query.shape)}; use sparing.attention, which takes it"
            )
        if query.shape[1] % key.shape[1]:
            raise ValueError(f"query has {query.shape[1]} heads, not a multiple of the {key.shape[1]} of key")
        if self.streams is not None and len(self.streams) != key.shape[1]:
            raise ValueError(f"streams: {len(self.streams)} numbers for {key.shape[1]} key-value heads")
        if self.length and batch != self._batch:
            raise ValueError(
                f"query: a batch of {batch}, but the index follows {self._batch}; call select() or reset()"
            )
        if self._kind not in (None, (kind := _kind(query, key, value))):
            raise ValueError(
                "query, key and value: heads, sizes and type are "
                f"{kind}, but the index follows {self._kind}; call reset() to start another sequence"
            )
        if n_q == 0:
            raise ValueError("query has 0 positions; it must have at least one")
        if n != self.length + n_q:
            if n > self.length + n_q:
                what = "it holds keys whose queries were never seen; append() them first"
            elif n == self.length:
                what = "nothing new arrived; key and value must hold the positions of query, too"
            else:
                what = "the sequence shrank; call crop() first"
            raise ValueError(f"key has {n} positions, but the index knows {self.length} and query has {n_q}: {what}")
        keep = attn_mask
        if keep is not None and keep.ndim == 4 and keep.shape[1:3] == (1, 1):
            keep = keep[:, 0, 0]
        if keep is not None and (keep.dtype != torch.bool or keep.shape != (batch, n)):
            raise ValueError(f"attn_mask: {keep.dtype} {list(keep.shape)} must be boolean, [{batch}, {n}]")
        if not self.agrees(keep):
            raise ValueError("attn_mask hides other keys than in the previous call; call reset() and start again")
        return keep

    def fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether heads, sizes, type and batch are those that the index follows."""
        return self._kind in (None, _kind(query, key, value)) and self._batch in (0, query.shape[0])

    def agrees(self, keep: Tensor | None) -> bool:
        """Return whether a mask [B, n] hides the same known keys as in earlier calls; None hides none."""
        before, known = None if keep is None else keep[:, : self.length], self._keep
        if before is not None and known is not None:
            return torch.equal(before, known)
        either = known if before is None else before
        return either is None or bool(either.all())

    def _fresh(self, keep: Tensor | None, n_q: int) -> Tensor | None:
        return None if keep is None else keep[:, -n_q:]

    def _learn(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> None:
        with memory_errors_named(self.method, query=query, key=key), _plainly(query):
            q, k, v, _ = self._clean(query, key, value, keep)
            if self.length == 0 and self._past is None:
                self.begin(q, k, v)
            self._take_in(q, k, v, keep)
            self._seen(query, key, value, keep)

    def _take_in(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> None:
        if self._past is not None:
            self._past.learn(self._readable(q), k, v, self._fresh(keep, q.shape[2]), self.length)

    def _readable(self, x: Tensor) -> Tensor:
        return x if self.method.supports.decode_16bit else _wide(x)

    def _draws(self, query: Tensor, key: Tensor) -> Draws:
        numbers = torch.tensor(self.streams or range(key.shape[1]), device=query.device)
        return Draws(self.seed & (2**64 - 1), numbers.repeat_interleave(query.shape[1] // key.shape[1]))

    def _clean(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k and v without non-finite entries, as in `sparing.attention`, and the output entries they spoil.

        Only new positions are checked, until a key or value is non-finite; from then on each call reads all of them.
        Entries so large that products could overflow raise an error: the state of the index has no room for them.
        """
        if not self._odd and are_moderate(query, key, value, self.length):
            return query, key, value, None
        odd = self._odd or not all(is_moderate(x[:, :, self.length :]) for x in (key, value))
        n, q, k, v = query.shape[2], _wide(query), _wide(key), _wide(value)
        if (rows := self._fresh(keep, n)) is not None:
            q = q.masked_fill(~rows[:, None, :, None], 0.0)
        call = Call(
            scale=self._scale(query),
            mask=Mask(causal=True, keep=keep, influence=keep),
            draws=self._draws(query, key),
            groups=query.shape[1] // key.shape[1],
        )
        whole = quarantine(pad(q, (0, 0, key.shape[2] - n, 0)), k, v, self.method, call, balance=False)
        assert isinstance(whole.v, Tensor)
        if whole.wide is not None or (q.dtype == torch.float64 and float(whole.v.abs().max()) > limit_of(q.dtype)):
            raise Unsupported(
                f"query, key and value: decoding with {self.method.name} takes entries of up to "
                f"{limit_of(q.dtype):.2g}, and there are larger ones; use exact attention for this sequence"
            )
        self._odd = odd
        spoiled = None if whole.spoiled is None else whole.spoiled.expand(-1, -1, key.shape[2], -1)[:, :, -n:]
        if spoiled is not None and keep is not None:
            spoiled = spoiled & keep[:, None, -n:, None]
        return whole.q[:, :, -n:], whole.k, whole.v, spoiled

    def _seen(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> None:
        if self._kind is None:
            self._batch, self._kind = query.shape[0], _kind(query, key, value)
        self.length = key.shape[2]
        self._keep = None if keep is None else keep.clone()

    def _exact(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        n_q, n = query.shape[2], key.shape[2]
        mask = None if keep is None else keep[:, None, None, :]
        if n_q > 1:
            causal = torch.ones(n_q, n, dtype=torch.bool, device=key.device).tril(n - n_q)
            mask = causal if mask is None else causal & mask
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        rows = self._fresh(keep, n_q)
        return out if rows is None else out.masked_fill(~rows[:, None, :, None], 0.0)


def _kind(query: Tensor, key: Tensor, value: Tensor) -> tuple[object, ...]:
    """Return the sizes, type and device that may not change while a sequence grows."""
    _, heads, _, size = query.shape
    return heads, key.shape[1], size, value.shape[3], query.dtype, query.device


def _plainly(x: Tensor) -> AbstractContextManager[object]:
    """Switch off gradients, autocast and inference mode, whose tensors cannot be written to outside it."""
    kind = x.device.type
    if not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled(kind):
        return torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.autocast(kind, enabled=False))
    stack.enter_context(torch.no_grad())
    return stack


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in _WIDE else x.float()
