"""A layer of a Hugging Face cache, with sparing's index beside its keys and values.

Whatever transformers does to a cache (append, crop, reorder for beams, repeat, select, reset), it does through methods
of the layer, so the index follows. What is done behind them is seen before the next token: the tensors are not the
ones that the layer made, or were written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from sparing.index import Index


class IndexedLayer(DynamicLayer):
    """Grows in place, where a `DynamicLayer` copies everything at each token; `index` is None while there is none."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.index: Index | None = None
        self._room: tuple[Tensor, Tensor] | None = None  # what keys and values are the first part of
        self._made: tuple[tuple[Tensor | None, int | None], ...] = ()

    @classmethod
    def over(cls, layer: DynamicLayer) -> IndexedLayer:
        """The same keys and values."""
        made = cls()
        vars(made).update(vars(layer))
        return made

    def give(self, index: Index | None) -> None:
        """Keep an index of what the layer holds now."""
        self.index = index
        self._remember()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them."""
        self._check()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, n = (key_states, value_states), self.get_seq_length()
        end = n + key_states.shape[-2]
        held: Any = (self.keys, self.values)
        alike = all(x.shape[:2] == y.shape[:2] and x.shape[-1] == y.shape[-1] for x, y in zip(held, new, strict=True))
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (*new, *held))
        if gradient or (n and not alike):  # what does not fit is refused there
            keys, values = super().update(*new)
            self._room = None
        else:
            if not self._fits(new, end):
                self._room = (_roomier(held[0], key_states, n, end), _roomier(held[1], value_states, n, end))
            assert self._room is not None
            for room, fresh in zip(self._room, new, strict=True):
                room[..., n:end, :] = fresh
            keys, values = (room[..., :end, :] for room in self._room)
            self.keys, self.values = keys, values
        self._remember()
        return keys, values

    def _fits(self, new: tuple[Tensor, Tensor], end: int) -> bool:
        if self._room is None or end > self._room[0].shape[-2]:
            return False
        # Tensors of inference mode cannot be written to outside it.
        frozen = self._room[0].is_inference() and not torch.is_inference_mode_enabled()
        return not frozen and all(
            (x.dtype, x.device, x.shape[:2]) == (torch.promote_types(x.dtype, y.dtype), y.device, y.shape[:2])
            for x, y in zip(self._room, new, strict=True)
        )

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As for any layer; the index forgets the same tokens."""
        self._check()
        super().crop(*args, **kwargs)
        self._room = None  # the tokens that were cut off may be in use elsewhere
        if self.index is not None and self.index.length < self.get_seq_length():
            self.index = None  # it missed tokens: the model was restored in between
        elif self.index is not None:
            held: Any = (self.keys, self.values)
            self.index.crop(self.get_seq_length(), *held)
        self._remember()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """As for any layer; the index goes with the beams."""
        self._check()
        super().reorder_cache(beam_idx)
        self._follow(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As for any layer."""
        self._check()
        if self.index is not None:
            self.index.select(torch.arange(self.index.batch).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)
        self._follow(None)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As for any layer."""
        self._check()
        chosen = None if self.index is None else torch.arange(self.index.batch)[indices.cpu()]
        super().batch_select_indices(indices)
        self._follow(chosen)

    def _follow(self, items: Tensor | None) -> None:
        if self.index is not None and items is not None:
            self.index.select(items.cpu())
        self._room = None
        self._remember()

    def reset(self) -> None:
        """Forget keys, values and index, which start again with the next prompt."""
        # Older versions zero the tensors and keep their length; tensors of inference mode could not be written to.
        self.keys, self.values, self.is_initialized = None, None, False
        super().reset()
        self.index, self._room = None, None
        self._remember()

    def offload(self) -> None:
        """As for any layer."""
        super().offload()
        self._follow(None)

    def prefetch(self) -> None:
        """As for any layer."""
        super().prefetch()
        self._follow(None)

    def _remember(self) -> None:
        self._made = tuple((x, _version(x)) for x in (self.keys, self.values))

    def _check(self) -> None:
        """Raise where keys or values were changed by somebody else since the index was made or extended."""
        if self.index is None:
            return
        for name, x, (made, version) in zip(("keys", "values"), (self.keys, self.values), self._made, strict=True):
            if x is not made or _version(x) != version:
                raise RuntimeError(
                    f"cache: the {name} of a layer were changed behind sparing's index, which would now be wrong; use "
                    "the cache's own crop, reorder_cache or batch_select_indices, start a new cache, or set "
                    "cache.layers[i].index = None to go on with exact attention"
                )

    def __getstate__(self) -> dict[str, Any]:
        self._check()
        return {**vars(self), "_room": None, "_made": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._remember()


def indexed(cache: Cache, number: int) -> IndexedLayer | None:
    """A layer of the cache, made able to keep an index; None where it is of a kind that sparing does not know."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if getattr(cache, "offloading", False):
        return None
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= number:
            cache.layers.append(DynamicLayer())
    if not 0 <= number < len(cache.layers):
        return None
    layer = cache.layers[number]
    if type(layer) is DynamicLayer:
        layer = cache.layers[number] = IndexedLayer.over(layer)
    return layer if isinstance(layer, IndexedLayer) else None


def _roomier(old: Tensor, new: Tensor, kept: int, need: int) -> Tensor:
    """Room for an eighth more than is needed, with the old rows at its start; of the type that joins both."""
    shape = (*new.shape[:-2], need + max(need // 8, 64), new.shape[-1])
    room = new.new_empty(shape, dtype=torch.promote_types(old.dtype, new.dtype))
    if kept:
        room[..., :kept, :] = old
    return room


def _version(x: Tensor | None) -> int | None:
    """How often a tensor was written to; tensors of inference mode do not count that."""
    return None if x is None or x.is_inference() else x._version
