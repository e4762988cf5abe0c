"""Handle tokens that continue a cache: approximate attention from the index beside the cache."""

from __future__ import annotations

from torch import Tensor

from sparing.transformers import reasons
from sparing.transformers.reasons import Reason
from sparing.transformers.runtime.call import ModelCall, obstacle
from sparing.transformers.runtime.exact import exact
from sparing.transformers.runtime.prefill import new_index


def decode(call: ModelCall) -> Tensor:
    """Run the method from the index of the cache, or exact attention if no index can serve the call."""
    query, key, value, settings, layer = call.query, call.key, call.value, call.settings, call.layer
    assert isinstance(value, Tensor)
    assert settings is not None
    if not call.looks_back or settings.when == "prefill":
        if layer is not None:
            layer.set_index(None)  # it would lack these tokens
        return exact(call)
    reason, keep = obstacle(call), None
    if reason is None:
        known, keep = call.mask.padding()
        reason = _catch_up(call, keep) if known else reasons.MASK
    if reason is not None or layer is None or (index := layer.index) is None:
        if layer is not None:
            layer.set_index(None)
        return exact(call, reason)
    method, n_q, n_k = settings.method, call.mask.n_q, call.mask.n_k
    if method.covers(n_k):
        index.append(query, key, value, keep)
        settings.tally.add_step(method, query, key, value, keep, None)
        return exact(call, count=False, as_given=True)
    if n_q > 1 and settings.when == "decode":  # a chunk of a prompt
        index.append(query, key, value, keep)
        return exact(call)
    out = index.advance(query, key, value, keep)
    settings.tally.add_step(method, query, key, value, keep, index.statistics)
    return out.transpose(1, 2).contiguous() if n_q > 1 else out.reshape(-1, 1, *out.shape[1::2])


def _catch_up(call: ModelCall, keep: Tensor | None) -> Reason | None:
    """Let the index of the layer know all positions before the queries, or return why it cannot."""
    query, key, value, settings, layer = call.query, call.key, call.value, call.settings, call.layer
    assert isinstance(value, Tensor)
    assert settings is not None
    if layer is None:
        return reasons.UNSEEN_CACHE
    method, index, before = settings.method, layer.index, call.mask.n_k - call.mask.n_q
    if index is not None:
        same = (index.method is method or index.method == method) and index.length <= before
        if not (same and index.fits(query, key, value) and index.agrees(keep)):
            index = None
        elif index.length == before:
            return None
    if not method.supports.adopt:
        return reasons.unseen_tokens(method.name)
    index = new_index(settings, key, call.scale) if index is None else index
    shown = None if keep is None else keep[:, :before]
    index.adopt(key[:, :, :before], value[:, :, :before], shown, heads=query.shape[1])
    layer.set_index(index)
    return None
