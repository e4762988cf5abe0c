"""Handle calls that run exact attention, by transformers' own function."""

from __future__ import annotations

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparing.contract import Projection
from sparing.transformers.reasons import Reason
from sparing.transformers.runtime.call import ModelCall
from sparing.transformers.runtime.masks import read_mask


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
