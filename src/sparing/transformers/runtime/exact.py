"""Handle calls that run exact attention, by transformers' own function."""

from __future__ import annotations

import warnings

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparing.contract import Projection
from sparing.transformers.reasons import Reason
from sparing.transformers.runtime.call import ModelCall
from sparing.transformers.state import LayerSettings, LayerState


def exact(call: ModelCall, reason: Reason | None = None, *, count: bool = True) -> Tensor:
    """Run transformers' attention function for SDPA, and count the call if the layer has settings.

    reason: why a token that continues a cache runs exact attention although a method was asked for.
    """
    if call.settings is not None and count and not call.tracing:
        call.settings.tally.exact_calls += 1
        if reason is not None:
            _note(call.state, call.settings, reason)
    value = call.value.project(call.key.shape[1]) if isinstance(call.value, Projection) else call.value
    others = call.others if call.position_bias is None else {**call.others, "position_bias": call.position_bias}
    out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        call.module, call.query, call.key, value, call.mask.for_sdpa(), dropout=call.dropout, scaling=call.scale,
        is_causal=call.is_causal, **others,
    )  # fmt: skip
    return out


def _note(state: LayerState, settings: LayerSettings, reason: Reason) -> None:
    """Count the reason, and warn of it if no layer of the handle has."""
    settings.tally.reasons[reason.text] += 1
    if reason.text not in settings.warned:
        settings.warned.add(reason.text)
        warnings.warn(
            f"{state.name}: tokens that continue a cache run exact attention although {settings.method} was asked for: "
            f"{reason.text}; {reason.way_out}",
            stacklevel=2,
        )
