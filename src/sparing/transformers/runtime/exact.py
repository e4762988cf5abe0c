"""Run exact attention by transformers' own function, and say where sparing's takes its place.

A layer runs sparing's exact attention if the user asks for "exact" there, and only where our kernel is faster: results
are then equal to rounding. All other exact calls are transformers' own, to the bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparing.contract import Projection
from sparing.methods.exact import is_tracked, kernel_wins
from sparing.transformers.reasons import Reason
from sparing.transformers.runtime.call import ModelCall
from sparing.transformers.runtime.masks import is_padding, read_mask
from sparing.transformers.state import LayerSettings


def exact(call: ModelCall, reason: Reason | None = None, *, count: bool = True, as_given: bool = False) -> Tensor:
    """Run transformers' attention function for SDPA, and count the call if the layer has settings.

    reason: why a token that continues a cache runs exact attention although a method was asked for.
    as_given: read the empty positions of a static cache too, as the model does, to the same rounding.
    """
    settings = call.settings
    if settings is not None and call.tracing and reason is not None:
        settings.graph_reason = reason.text
        settings.warn_once(call.state.name, reason.text, reason.way_out)
    elif settings is not None and count and not call.tracing:
        settings.tally.exact_calls += 1
        if reason is not None:
            settings.tally.reasons[reason.text] += 1
            settings.warn_once(call.state.name, reason.text, reason.way_out)
    key, value, mask, bias = call.key, call.value, call.mask, call.position_bias
    if isinstance(value, Projection):
        value = value.project(key.shape[1])
    elif as_given and call.given.key is not key:
        key, value, tensor, bias = call.given
        mask = read_mask(tensor, call.mask.n_q, key.shape[2], looks_back=call.looks_back, simplify=False)
    others = call.others if bias is None else {**call.others, "position_bias": bias}
    out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        call.module, call.query, key, value, mask.for_sdpa(), dropout=call.dropout, scaling=call.scale,
        is_causal=call.is_causal, **others,
    )  # fmt: skip
    return out


#: Products of query and key entries, of all heads, from which our kernel saves more than the checks of `attention()`
#: cost, about 0.2 ms a call: SDPA takes 1 ms for them at 200 GFLOP/s, of which the kernel saves a third.
_LEAST_PRODUCTS = 5e7


def may_replace(
    settings: LayerSettings, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: Any, *, tracing: bool
) -> bool:
    """Return whether sparing's exact attention may serve a call of a layer that is to run it, whatever its mask."""
    if settings.observer is not None:
        return True
    return (
        settings.when != "decode" and not tracing and not dropout and query.dtype == key.dtype == value.dtype
        and (scale is None or isinstance(scale, int | float)) and query.numel() * key.shape[2] >= _LEAST_PRODUCTS
        and kernel_wins(query, padded=True, shared=True) and not is_tracked(query, key, value)
    )  # fmt: skip


def replaces(call: ModelCall) -> bool:
    """Return whether sparing's exact attention serves a call for which `may_replace` is true.

    Not tokens that continue a cache, whose few queries torch is faster with, and no mask that differs by query.
    """
    if call.settings is not None and call.settings.observer is not None:
        return True
    mask = call.mask.tensor
    if call.continues or call.position_bias is not None or not (call.mask.causal or is_padding(mask)):
        return False
    shared = call.query.shape[1] != call.key.shape[1]
    return kernel_wins(call.query, padded=mask is not None, shared=shared)
