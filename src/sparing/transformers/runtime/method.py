"""Run a layer's method by `sparing.attention`, with errors that name the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.call import Past
from sparing.compiled import for_length
from sparing.contract import Projection, Unsupported
from sparing.functional import attention, inspect
from sparing.transformers.runtime import refusals
from sparing.transformers.runtime.call import ModelCall
from sparing.transformers.runtime.exact import exact
from sparing.transformers.runtime.masks import count_valid_keys
from sparing.transformers.state import LayerSettings, LayerState, ObservedCall


@dataclass(frozen=True, eq=False)
class MethodArguments:
    """What a layer passes to `attention()`, under shorter names."""

    query: Tensor  #: [B, H, n_q, d]
    key: Tensor  #: [B, H_kv, n_k, d]
    value: Tensor | Projection  #: [B, H_kv, n_k, e]
    mask: Tensor | None
    is_causal: bool = False
    scale: float | None = None
    dropout: float = 0.0


def run_call(call: ModelCall, past: Past | None = None) -> Tensor:
    """Run the method of the layer on a call of the attention function; return [B, n_q, H, e].

    An observer gets the call instead, which then runs the model's own attention.
    """
    assert call.settings is not None
    mask = call.mask.for_door(call.position_bias)
    given = MethodArguments(call.query, call.key, call.value, mask, call.mask.causal, call.scale, call.dropout)
    if call.settings.observer is not None:
        call.settings.observer(_observed(call.state, call.settings, given))
        return exact(call, count=False)
    return run_method(call.state, call.settings, given, past).transpose(1, 2).contiguous()


def run_method(
    state: LayerState, settings: LayerSettings, given: MethodArguments, past: Past | None = None, *,
    is_call: bool = True,
) -> Tensor:  # fmt: skip
    """Run the method that the settings name, count the call, and return [B, H, n_q, e].

    is_call: False for a sequence of a pack, which is a part of a call.
    """
    seen = _observed(state, settings, given)
    query, key, value, call = seen.query, seen.key, seen.value, seen.call
    if settings.observer is not None:
        settings.observer(seen)
        return attention(query, key, value, **{**call, "method": "exact"})
    try:
        if torch.compiler.is_compiling():  # calls in a graph are not counted
            settings.compiled = True
            return attention(query, key, value, **call)
        found = inspect(query, key, value, brief=True, past=past, **call)
    except Unsupported as error:
        raise refusals.unsupported(state, error) from error
    facts, valid = found.statistics, found.statistics.get("tokens")
    lengths = count_valid_keys(given.mask, len(query), key.shape[2]) if valid is None else valid.amax(-1).tolist()
    settings.tally.add(call["method"], query, key, value, lengths, given.is_causal, facts, is_call=is_call)
    return found.output


def _observed(state: LayerState, settings: LayerSettings, given: MethodArguments) -> ObservedCall:
    """Return what `attention()` is to run, or raise if the method cannot drop weights as the model does."""
    query, key = given.query, given.key
    refusals.check_dropout(state, settings, given.dropout)
    rows = None
    if state.cross and query.shape[2] == key.shape[2]:  # the mask is about the keys' sequence, not the queries'
        rows = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    call: dict[str, Any] = {
        "attn_mask": given.mask, "dropout_p": given.dropout, "is_causal": given.is_causal, "scale": given.scale,
        "query_mask": rows, "enable_gqa": query.shape[1] != key.shape[1], "streams": settings.streams(key.shape[1]),
        "method": for_length(settings.method, state.max_length), "seed": settings.seed,
    }  # fmt: skip
    return ObservedCall(state.name, query, key, given.value, call, state.max_length)
