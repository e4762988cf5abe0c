"""Handle prompts, and all other calls that do not continue a cache: run the method, and index what a cache keeps."""

from __future__ import annotations

from torch import Tensor

from sparing.index import Index
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
    if settings.when == "decode":
        out = exact(call, as_given=settings.method.covers(call.mask.n_k))
    else:
        out = run_call(call, past)
    if index is not None and layer is not None:
        index.append(query, key, value, keep)
        layer.set_index(index)
    return out


def new_index(settings: LayerSettings, key: Tensor, scale: float | None) -> Index:
    """Return an empty index for keys [B, H_kv, n, d] of a layer."""
    return Index(settings.method, seed=settings.seed, scale=scale, streams=settings.streams(key.shape[1]))
