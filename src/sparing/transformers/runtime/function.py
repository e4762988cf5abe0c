"""The attention function that transformers calls under the name "sparing", and its registration.

The attention function needs its mask function beside it: without one, transformers silently makes no mask, and padding
and causality are lost. So every call checks that both are registered.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from sparing.transformers.cache import find_layer
from sparing.transformers.runtime import refusals
from sparing.transformers.runtime.by_name import state_by_name
from sparing.transformers.runtime.call import Given, ModelCall
from sparing.transformers.runtime.decode import decode
from sparing.transformers.runtime.exact import exact, may_replace, replaces
from sparing.transformers.runtime.masks import cut_mask, hides_rest, mask_function, read_mask
from sparing.transformers.runtime.method import MethodArguments
from sparing.transformers.runtime.packed import given_offsets, run_batch, run_packed
from sparing.transformers.runtime.prefill import prefill
from sparing.transformers.runtime.projection import projection, read_projection
from sparing.transformers.state import CHOSEN, NAME, LayerState, exact_settings, state_of


def register() -> None:
    """Register `attn_implementation="sparing"` with transformers. Calling it again does nothing."""
    for name in (NAME, CHOSEN):
        AttentionInterface.register(name, attention_function)
        AttentionMaskInterface.register(name, mask_function)


def _restored_state() -> LayerState:
    """Return an empty state for a model that another process unpickles, where nobody has called `approximate()`."""
    register()
    return LayerState("")


copyreg.pickle(LayerState, lambda state: (_restored_state, (), vars(state)))


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output [B, n_q, H, e], and None for the weights.

    query: [B, H, n_q, d]. key, value: [B, H_kv, n_k, .]. Signature and names are those of transformers.
    """
    known, tracing = state_of(module), torch.compiler.is_compiling()
    state = state_by_name(module) if known is None else known
    settings = state.settings
    stays_exact = settings is None or (
        settings.exact and not may_replace(settings, query, key, value, dropout, scaling, tracing=tracing)
    )
    looks_back = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if not tracing and (batch := state.batch) is not None and batch.is_in(query) and settings is not None:
        state.called = True
        refusals.check_arguments(state, others)
        held = read_projection(module, state, value, query) if state.projects else value
        shape = MethodArguments(query, key, held, attention_mask, scale=scaling, dropout=dropout)
        return run_batch(state, settings, shape, batch).transpose(1, 2), None
    offsets = None
    if others and not tracing:  # of a graph, they are refused as arguments that nobody knows
        offsets, others = given_offsets(state, query, key, attention_mask, looks_back, others)
    if offsets is not None:
        if position_bias is not None:
            raise refusals.packed_bias(state)
        state.called = True
        refusals.check_arguments(state, others)
        held = read_projection(module, state, value, query) if state.projects else value
        shape = MethodArguments(query, key, held, None, looks_back, scaling, dropout)
        return run_packed(state, settings or exact_settings(), shape, offsets).transpose(1, 2), None
    layer = None if tracing else find_layer(module, state, key, value)
    given, n_q, filled = Given(key, value, attention_mask, position_bias), query.shape[2], key.shape[2]
    if layer is not None:
        filled = layer.filled
    elif looks_back and 1 < n_q < filled and not stays_exact and hides_rest(attention_mask, written_out=known is None):
        filled = n_q  # a prompt in a static cache that sparing does not follow, or not yet
    if filled < key.shape[2]:
        key, value, attention_mask = key[:, :, :filled], value[:, :, :filled], cut_mask(attention_mask, filled)
        position_bias = None if position_bias is None else position_bias[..., :filled]
    n_k = filled
    simplify = looks_back and not stays_exact and not tracing
    mask = read_mask(attention_mask, n_q, n_k, looks_back=looks_back, simplify=simplify)
    call = ModelCall(
        module=module, state=state, settings=settings, tracing=tracing, layer=layer,
        given=given, query=query, key=key,
        value=read_projection(module, state, value, query) if state.projects else value,
        mask=mask, is_causal=is_causal, dropout=dropout, scale=scaling, position_bias=position_bias, others=others,
        continues=(n_q == 1 and n_k > 1) or (n_q < n_k and mask.written_out and not state.cross),
        looks_back=looks_back,
    )  # fmt: skip
    refusals.check_call(call)
    if not tracing:
        state.called = True
    if stays_exact or (settings is not None and settings.exact and not replaces(call)):
        return exact(call), None
    if state.projects:
        return projection(call), None
    return (decode(call) if call.continues else prefill(call)), None
