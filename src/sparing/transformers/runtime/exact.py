"""Handle calls that run exact attention, by transformers' own function."""

from __future__ import annotations

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparing.contract import Projection
from sparing.transformers.runtime.call import ModelCall


def exact(call: ModelCall, *, count: bool = True) -> Tensor:
    """Run transformers' attention function for SDPA, and count the call if the layer has settings."""
    if call.settings is not None and count and not call.tracing:
        call.settings.tally.exact_calls += 1
    value = call.value.project(call.key.shape[1]) if isinstance(call.value, Projection) else call.value
    others = call.others if call.position_bias is None else {**call.others, "position_bias": call.position_bias}
    out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        call.module, call.query, call.key, value, call.mask.for_sdpa(), dropout=call.dropout, scaling=call.scale,
        is_causal=call.is_causal, **others,
    )  # fmt: skip
    return out
