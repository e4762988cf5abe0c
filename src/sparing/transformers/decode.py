"""Tokens that continue a cache: approximate attention from the index that is kept beside it."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from sparing.contract import Past
from sparing.index import Index
from sparing.transformers.cache import IndexedLayer, indexed
from sparing.transformers.slot import Choice, Slot, slot_of


class _Present(threading.local):
    """The layer of a cache that a thread's present call appends to, and whose call it is."""

    call: tuple[Slot | None, IndexedLayer | None] = (None, None)


_present = _Present()


def expect(slot: Slot, layer: IndexedLayer | None) -> None:
    """The slot's next call, in this thread, appends to this layer of a cache."""
    _present.call = (slot, layer)


def look_ahead(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: finds the cache that an attention module is about to append to."""
    if torch.compiler.is_compiling() or (slot := slot_of(module)) is None:
        return
    expect(slot, None)
    number = getattr(module, "layer_idx", None)
    if slot.choice is None or not slot.choice.decodes or slot.cross or slot.window is not None or number is None:
        return
    cache = next((x for x in (*kwargs.values(), *args) if isinstance(x, Cache)), None)
    if cache is None or (layer := indexed(cache, number)) is None:
        return
    expect(slot, layer)
    if layer.index is None and slot.orphan is not None:
        keys, index = slot.orphan
        if layer.keys is not None and keys() is layer.keys:
            layer.give(index)
    slot.orphan = None


def start(
    slot: Slot, choice: Choice, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, *,
    unasked: bool,
) -> Start | None:  # fmt: skip
    """The index of a prompt, beside its cache, where there can be one; `Start.learn` fills it.

    unasked: `look_ahead` was not there yet, so that the index has to wait until the cache is known.
    """
    layer = _claim(slot, key, value)
    if (layer is None and not unasked) or query.shape[2] != key.shape[2] or not _possible(query, key, value):
        return None
    known, keep = padding(mask, query.shape[2], key.shape[2])
    if not known:
        return None
    index = Index(choice.method, seed=choice.seed, scale=scale, streams=choice.streams(key.shape[1]))
    return Start(slot, layer, index, keep, index.begin(query, key, value))


@dataclass(frozen=True, eq=False)
class Start:
    """An index that is about to learn a prompt."""

    slot: Slot
    layer: IndexedLayer | None
    index: Index
    keep: Tensor | None
    past: Past | None  #: where the prompt's attention may leave what it computed

    def learn(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in the prompt, and stay beside the cache."""
        self.index.append(query, key, value, self.keep)
        if self.layer is not None:
            self.layer.give(self.index)
        else:
            self.slot.orphan = (weakref.ref(key), self.index)


def decode(
    slot: Slot, choice: Choice, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> Tensor | None:
    """Attention of tokens that continue the cache, [B, H, n_q, e]; None where it has to be exact."""
    layer, n_q, n_k = _claim(slot, key, value), query.shape[2], key.shape[2]
    index = None if layer is None else layer.index
    method, tally = choice.method, choice.tally
    known, keep = (True, None) if mask is None else padding(mask, n_q, n_k)
    follows = known and dropout == 0 and _possible(query, key, value)
    if index is not None:
        same = (index.method is method or index.method == method) and index.length + n_q == n_k
        follows = follows and same and index.fits(query, key, value) and index.agrees(keep)
    if index is None or not follows:
        if layer is not None:
            layer.give(None)  # it would miss these tokens
        tally.exact_calls += 1
        return None
    covered = method.covers(n_k)
    if covered or (n_q > 1 and choice.when == "decode"):
        index.append(query, key, value, keep)
        if covered:
            tally.add_step(method, query, key, value, keep, None)
        else:
            tally.exact_calls += 1
        return None
    out = index.advance(query, key, value, keep)
    tally.add_step(method, query, key, value, keep, index.statistics)
    return out


def _claim(slot: Slot, key: Tensor, value: Tensor) -> IndexedLayer | None:
    """The layer of the cache, if it holds just these keys and values."""
    expected, layer = _present.call
    _present.call = (None, None)
    if expected is not slot:
        return None
    return layer if layer is not None and layer.keys is key and layer.values is value else None


def padding(mask: Tensor | None, n_q: int, n_k: int) -> tuple[bool, Tensor | None]:
    """Whether a mask of the last n_q of n_k positions is causality and padding alone, and the padding [B, n_k]."""
    if mask is None:
        return True, None
    if mask.ndim == 2:
        return True, mask
    if mask.shape[1] != 1 or mask.requires_grad:
        return False, None
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((mask[~shown] <= torch.finfo(mask.dtype).min).all()):
        return False, None
    keep = shown[:, 0, -1]  # (B, n_k)
    if n_q > 1:
        causal = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril(n_k - n_q)
        # A row of padding may be shown anything.
        rows = keep[:, n_k - n_q :, None]
        if not torch.equal(shown[:, 0] & rows, causal & keep[:, None] & rows):
            return False, None
    return True, keep


def _possible(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether an index can follow: no gradient, and no 16-bit cache, all of which a step would have to convert."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return False
    alike = query.dtype == key.dtype == value.dtype and key.dtype in (torch.float32, torch.float64)
    return alike and query.shape[0] == key.shape[0] == value.shape[0]
