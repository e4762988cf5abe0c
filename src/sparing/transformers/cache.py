"""Layers of a Hugging Face cache that keep sparing's index beside their keys and values.

Transformers changes a cache (append, crop, reorder for beams, repeat, select, reset) through methods of its layers, so
the index follows. Other changes are noticed before the next token: the tensors are not the ones that the layer made, or
were written to.

A model passes keys and values to its attention function, and not the cache that they come from. So the keys that a
layer returns carry the layer as an attribute. That needs no other state, and works in any thread.

A static cache returns all of its positions, filled or not, and the model's masks have that length. The layer says how
many are filled, and `attention_function` cuts keys, values and mask to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

from sparing.index import Index
from sparing.transformers import reasons
from sparing.transformers.reasons import Reason
from sparing.transformers.state import LayerState, state_of

_LAYER = "_sparing_cache_layer"  # attribute of the keys that a layer returns: the layer, and the keys that it holds


class IndexedLayer(CacheLayerMixin):
    """A layer of a cache with an index. Its subclasses are the kinds of layers that sparing can follow."""

    number: int | None = None  #: in its cache
    index: Index | None = None  #: None: there is no index of what the layer holds
    _known: tuple[tuple[Tensor | None, int | None], ...] = ()  # keys and values, with their versions

    @classmethod
    def from_layer(cls, layer: Any, number: int) -> IndexedLayer:
        """Return a layer with the same keys and values."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        made.number = number
        made.set_index(None)
        return made

    @property
    def filled(self) -> int:
        """The number of positions that hold a token."""
        return int(self.get_seq_length())

    def set_index(self, index: Index | None) -> None:
        """Keep an index of what the layer holds now; None drops the present one."""
        self.index = index
        self._remember()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch, also in the index."""
        self._check()
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def reset(self) -> None:
        """Remove keys, values and index."""
        super().reset()
        self.index = None
        self._remember()

    def offload(self) -> None:
        """Move keys and values to the CPU; the index stays."""
        super().offload()
        self._select(None)

    def prefetch(self) -> None:
        """Move keys and values back to their device; the index stays."""
        super().prefetch()
        self._select(None)

    def _carrying(self, keys: Tensor) -> Tensor:
        """Return a view of the keys that carries the layer; the layer's own keys would form a reference cycle."""
        if not torch.compiler.is_compiling():
            keys = keys.view_as(keys)
            setattr(keys, _LAYER, (self, self.keys))
        return keys

    def _select(self, items: Tensor | None) -> None:
        """Go on with these items of the batch in the index, after the layer's tensors were replaced."""
        if self.index is not None and items is not None:
            self.index.select(items.cpu())
        self._remember()

    def _crop_index(self) -> None:
        """Remove the positions from the index that the layer does not hold any more."""
        filled = self.filled
        if self.index is not None and self.index.length < filled:
            self.index = None  # it lacks tokens: the model was restored in between
        elif self.index is not None:
            self.index.crop(filled)
        self._remember()

    def _remember(self) -> None:
        self._known = ((self.keys, _version(self.keys)), (self.values, _version(self.values)))

    def _check(self) -> None:
        """Raise if keys or values were changed other than by this layer since the index was made or extended."""
        if self.index is None:
            return
        for name, x, (known, version) in zip(("keys", "values"), (self.keys, self.values), self._known, strict=True):
            if x is not known or _version(x) != version:
                raise RuntimeError(
                    f"cache: the {name} of a layer were changed without its methods, so that sparing's index is wrong; "
                    "use the cache's own crop, reorder_cache or batch_select_indices, start a new cache, or set "
                    "cache.layers[i].index = None to drop the index"
                )

    def _check_new(self, keys: Tensor, values: Tensor, *, promotes: bool) -> None:
        """Raise, before anything changes, if new keys and values do not continue those that the layer holds.

        promotes: the layer takes other types, if torch.autocast mixes them.
        """
        for name, held, new in (("keys", self.keys, keys), ("values", self.values, values)):
            if held is None or held.ndim != 4 or held.shape[2] == 0:
                continue
            where = f"cache: layer {self.number} holds {name} of"
            if (held.shape[1], held.shape[3]) != (new.shape[1], new.shape[3]):
                raise ValueError(
                    f"{where} {held.shape[1]} heads of size {held.shape[3]}, and the model brings {new.shape[1]} heads "
                    f"of size {new.shape[3]}: the cache belongs to another model; start a new one"
                )
            if held.shape[0] != new.shape[0]:
                raise ValueError(
                    f"{where} a batch of {held.shape[0]}, and the model brings a batch of {new.shape[0]}; select items "
                    "by cache.batch_select_indices, repeat them by cache.batch_repeat_interleave, or start a new cache"
                )
            mixes = promotes and torch.is_autocast_enabled(new.device.type)
            if held.dtype != new.dtype and not mixes:
                raise ValueError(
                    f"{where} {held.dtype}, and the model brings {new.dtype}; run the model in the type that the cache "
                    "was filled in, or start a new cache"
                )

    def __getstate__(self) -> dict[str, Any]:
        self._check()
        return {**vars(self), "_known": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._remember()


class IndexedDynamicLayer(IndexedLayer, DynamicLayer):
    """A `DynamicLayer` with an index, which grows in place instead of copying everything at each token."""

    _buffers: tuple[Tensor, Tensor] | None = None  # keys and values are the first part of these

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them; the keys carry the layer."""
        self._check()
        self._check_new(key_states, value_states, promotes=True)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, n = (key_states, value_states), self.get_seq_length()
        end = n + key_states.shape[-2]
        held: Any = (self.keys, self.values)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*new, *held)):
            keys, values = super().update(*new)
            self._buffers = None
        else:
            if not self._fits(new, end):
                self._buffers = (_enlarged(held[0], key_states, n, end), _enlarged(held[1], value_states, n, end))
            assert self._buffers is not None
            for buffer, fresh in zip(self._buffers, new, strict=True):
                buffer.narrow(-2, n, end - n).copy_(fresh)  # sooner done than indexing
            keys, values = (buffer.narrow(-2, 0, end) for buffer in self._buffers)
            self.keys, self.values = keys, values
        self._remember()
        return self._carrying(keys), values

    def _fits(self, new: tuple[Tensor, Tensor], end: int) -> bool:
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            return False
        # Tensors of inference mode cannot be written to outside it.
        frozen = self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()
        return not frozen and all(
            (x.dtype, x.device, x.shape[:2]) == (torch.promote_types(x.dtype, y.dtype), y.device, y.shape[:2])
            for x, y in zip(self._buffers, new, strict=True)
        )

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove the last tokens, from the index too."""
        self._check()
        before = self.filled
        super().crop(*args, **kwargs)
        if self.filled != before:
            self._buffers = None  # the removed tokens may be in use elsewhere
        self._crop_index()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the items of the batch, also in the index."""
        self._check()
        if self.index is not None:
            self.index.select(torch.arange(self.index.batch).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)
        self._select(None)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select items of the batch, also in the index."""
        self._check()
        chosen = None if self.index is None else torch.arange(self.index.batch)[indices.cpu()]
        super().batch_select_indices(indices)
        self._select(chosen)

    def reset(self) -> None:
        """Remove keys, values and index."""
        # Older versions zero the tensors instead, which fails for tensors of inference mode, and keep their length.
        self.keys, self.values, self.is_initialized, self._buffers = None, None, False, None
        super().reset()

    def _select(self, items: Tensor | None) -> None:
        self._buffers = None
        super()._select(items)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_buffers": None}


class IndexedStaticLayer(IndexedLayer, StaticLayer):
    """A `StaticLayer` with an index of its filled positions. It returns all positions, as a `StaticLayer` does."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values to the next positions, and return all positions; the keys carry the layer."""
        if torch.compiler.is_compiling():
            self.index = None  # it would lack the tokens of a compiled model
            return super().update(key_states, value_states, *args, **kwargs)
        self._check()
        self._check_new(key_states, value_states, promotes=False)
        n, filled = key_states.shape[-2], self.filled
        if filled + n > self.max_cache_len:
            raise ValueError(
                f"cache: {filled} of the {self.max_cache_len} positions of layer {self.number} are filled, and the "
                f"model brings {n} more; make a StaticCache with a larger max_cache_len, or reset() this one"
            )
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._remember()
        return self._carrying(keys), values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end, from the index too; `tokens_to_remove` is negative, as in a `DynamicLayer`."""
        if not -self.filled <= tokens_to_remove <= 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be from {-self.filled} to 0")
        self._check()
        if tokens_to_remove:
            length: Any = self.cumulative_length  # a tensor, which keeps its address
            length.add_(tokens_to_remove)
        self._crop_index()


#: Older versions have a class for layers that quantise in groups alone.
_Quantised: type = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
_KINDS: dict[type, type[IndexedLayer]] = {DynamicLayer: IndexedDynamicLayer, StaticLayer: IndexedStaticLayer}


def indexed_layer(cache: Cache, number: int) -> IndexedLayer | Reason:
    """Replace a layer of the cache by an `IndexedLayer` and return it, or why sparing cannot follow it."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if getattr(cache, "offloading", False):
        return reasons.OFFLOADED
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= number:
            cache.layers.append(DynamicLayer())
    if not 0 <= number < len(cache.layers):
        return reasons.UNSEEN_CACHE
    layer = cache.layers[number]
    if type(layer) in _KINDS:
        layer = cache.layers[number] = _KINDS[type(layer)].from_layer(layer, number)
    if isinstance(layer, IndexedLayer):
        return layer
    return reasons.QUANTISED if isinstance(layer, _Quantised) else reasons.cache_layer(type(layer).__name__)


def prepare_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace the layer of the cache that an attention module appends to by an `IndexedLayer`: a forward pre-hook."""
    state, number = state_of(module), getattr(module, "layer_idx", None)
    if state is None or number is None or state.cross or state.window is not None or torch.compiler.is_compiling():
        return
    if state.settings is None or not state.settings.decodes:
        return
    for argument in (*kwargs.values(), *args):
        if isinstance(argument, Cache):
            if number == 0:
                _check_layers(module, argument)
            found = indexed_layer(argument, number)
            state.cache_reason = found if isinstance(found, Reason) else None
            if isinstance(found, IndexedLayer):
                _check_positions(module, state, found, kwargs.get("hidden_states", args[0] if args else None))
            return


def _check_layers(module: nn.Module, cache: Cache) -> None:
    """Raise, before anything changes, if a filled cache has another number of layers than the model."""
    config: Any = getattr(module, "config", None)
    count, shared = getattr(config, "num_hidden_layers", None), getattr(config, "num_kv_shared_layers", None) or 0
    if not isinstance(count, int) or isinstance(cache, EncoderDecoderCache) or not cache.layers:
        return
    first = cache.layers[0]
    if (
        isinstance(first, cache_utils.CacheLayerMixin)
        and first.get_seq_length()
        and len(cache.layers) not in (count, count - shared)
    ):
        raise ValueError(
            f"past_key_values: the cache has {len(cache.layers)} layers, and the model {count}: it belongs to another "
            "model; start a new one"
        )


def _check_positions(module: nn.Module, state: LayerState, layer: IndexedLayer, hidden: Any) -> None:
    """Raise, before anything changes, if tokens lie beyond the rotary positions that a model was trained with."""
    config: Any = getattr(module, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or not isinstance(hidden, Tensor) or hidden.ndim != 3:
        return
    if (total := layer.filled + hidden.shape[1]) <= limit:
        return
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    each = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    if {one.get("rope_type", "default") for one in each} != {"default"}:
        return  # positions are scaled, and the limit may be that of the original model
    raise ValueError(
        f"{state.name}: {total} tokens, but the model has {limit} positions; shorten the text, or set "
        "rope_parameters in the model's config for longer ones"
    )


def find_layer(module: nn.Module, state: LayerState, key: Tensor, value: Any) -> IndexedLayer | None:
    """Return the layer of the module's cache that holds exactly these keys and values, or None."""
    layer, keys = getattr(key, _LAYER, (None, None))
    if layer is None or layer.keys is not keys or layer.values is not value or layer.number is None:
        return None
    own = layer.number == getattr(module, "layer_idx", None)  # some models share the keys of one layer among several
    return layer if own and not state.cross and state.window is None else None


def _enlarged(old: Tensor, new: Tensor, kept: int, need: int) -> Tensor:
    """Return a buffer of an eighth more rows than needed, which starts with the old ones, in the promoted dtype."""
    shape = (*new.shape[:-2], need + max(need // 8, 64), new.shape[-1])
    buffer = new.new_empty(shape, dtype=torch.promote_types(old.dtype, new.dtype))
    if kept:
        buffer[..., :kept, :] = old
    return buffer


def _version(x: Tensor | None) -> int | None:
    """Return torch's count of writes to a tensor; None for tensors of inference mode, which have no count."""
    return None if x is None or x.is_inference() else x._version
