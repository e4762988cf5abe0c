"""Handle prompts, and all other calls that do not continue a cache: run the method, and index what a cache keeps."""

from __future__ import annotations

from torch import Tensor

from sparing.index import Index
from sparing.transformers.cache import IndexedLayer, attach_index
from sparing.transformers.runtime.call import ModelCall, obstacle
from sparing.transformers.runtime.exact import exact
from sparing.transformers.runtime.method import run_call
from sparing.transformers.state import LayerSettings


def prefill(call: ModelCall) -> Tensor:
    """Run the method, or exact attention if when="decode"; index the prompt if a cache keeps it."""
    query, key, value, settings = call.query, call.key, call.value, call.settings
    assert isinstance(value, Tensor)
    assert settings is not None
    layer, index, keep, past = call.layer, None, None, None
    if call.looks_back and settings.decodes and obstacle(call) is None:
        known, keep = call.mask.padding()
        if known and call.mask.n_q == call.mask.n_k:
            index = new_index(settings, key, call.scale)
            past = index.begin(query, key, value)  # the prompt's attention may store results there
    out = (
        exact(call, as_given=settings.method.covers(call.mask.n_k))
        if settings.when == "decode"
        else run_call(call, past)
    )
    if index is not None:
        index.append(query, key, value, keep)
        if layer is not None:
            layer.set_index(index)
        else:
            attach_index(call.module, call.given.key, index)
    return out


def index_prompt(settings: LayerSettings, layer: IndexedLayer, query: Tensor, scale: float | None) -> None:
    """Index a prompt without padding that a layer of a cache holds, and whose attention is already computed."""
    assert layer.keys is not None
    assert layer.values is not None
    index = new_index(settings, layer.keys, scale)
    index.append(query, layer.keys, layer.values)
    layer.set_index(index)


def new_index(settings: LayerSettings, key: Tensor, scale: float | None) -> Index:
    """Return an empty index for keys [B, H_kv, n, d] of a layer."""
    return Index(settings.method, seed=settings.seed, scale=scale, streams=settings.streams(key.shape[1]))
