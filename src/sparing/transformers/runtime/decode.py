"""Handle tokens that continue a cache: approximate attention from the index beside the cache."""

from __future__ import annotations

from torch import Tensor

from sparing.transformers.runtime.call import ModelCall, can_index
from sparing.transformers.runtime.exact import exact


def decode(call: ModelCall) -> Tensor:
    """Run the method from the index of the cache, or exact attention if there is no index that fits the call."""
    query, key, value, settings = call.query, call.key, call.value, call.settings
    layer = call.layer if call.may_index else None
    if layer is None or (index := layer.index) is None:
        return exact(call)
    assert isinstance(value, Tensor)
    assert settings is not None
    method, n_q, n_k = settings.method, call.mask.n_q, call.mask.n_k
    known, keep = call.mask.padding()
    follows = known and call.dropout == 0 and can_index(query, key, value)
    same = (index.method is method or index.method == method) and index.length + n_q == n_k
    if not (follows and same and index.fits(query, key, value) and index.agrees(keep)):
        layer.set_index(None)  # it would lack these tokens
        return exact(call)
    if method.covers(n_k):
        index.append(query, key, value, keep)
        settings.tally.add_step(method, query, key, value, keep, None)
        return exact(call, count=False)
    if n_q > 1 and settings.when == "decode":  # a chunk of a prompt
        index.append(query, key, value, keep)
        return exact(call)
    out = index.advance(query, key, value, keep)
    settings.tally.add_step(method, query, key, value, keep, index.statistics)
    return out.transpose(1, 2).contiguous() if n_q > 1 else out.reshape(-1, 1, *out.shape[1::2])
