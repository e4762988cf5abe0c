"""The errors of a call of an approximated layer. Each names the layer and the way out.

What a layer can never run is refused earlier, by `approximate()`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionMaskInterface

from sparing.contract import Unsupported
from sparing.transformers.runtime.call import ModelCall
from sparing.transformers.runtime.masks import mask_function
from sparing.transformers.state import CHOSEN, NAME, LayerSettings, LayerState

#: Arguments that do not change the result, or are already in the mask (a window's width, packed sequences).
HARMLESS = {
    "cache_position", "deterministic", "hidden_states", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
    "position_ids", "return_dict", "sliding_window", "target_dtype", "use_cache",
}  # fmt: skip


def check_call(call: ModelCall) -> None:
    """Raise if the mask of a call may be lost, or if an argument is not known."""
    known, mask = AttentionMaskInterface._global_mapping, call.mask
    if known.get(NAME) is not mask_function or known.get(CHOSEN) is not mask_function:
        raise RuntimeError(
            f"the mask function registered under {NAME!r} is not sparing's, so padding and causality would be lost; "
            "call sparing.transformers.register() again"
        )
    if call.others:
        check_arguments(call.state, call.others)
    if mask.tensor is not None and not mask.written_out and not mask.causal:
        raise RuntimeError(
            f"{call.state.name}: the mask of shape {list(mask.tensor.shape)} is for causal layers, and this "
            "one is not causal; pass a mask of shape [B, 1, n_q, n_k]"
        )


def check_arguments(state: LayerState, others: Mapping[str, Any], harmless: Collection[str] = HARMLESS) -> None:
    """Raise if the model passes an argument that sparing does not know."""
    if others.get("cache") is not None:
        raise Unsupported(
            f"{state.name}: continuous batching passes a paged cache (cache=), beside which sparing keeps no index; "
            'use model.generate() with the default cache or cache_implementation="static", or restore the model'
        )
    for name, argument in others.items():
        if name not in harmless and argument is not None and argument is not False:
            raise Unsupported(f"{state.name}: the model passes {name}, which sparing does not know; leave it exact")


def check_dropout(state: LayerState, settings: LayerSettings, dropout: float) -> None:
    """Raise if the model uses attention dropout and the method does not support it."""
    if dropout > 0 and not settings.method.supports.dropout:
        raise Unsupported(
            f"{state.name}: the model drops attention weights in training (p={dropout}), which {settings.method.name} "
            "does not support; load the model with its attention dropout at 0, or call model.eval()"
        )


def check_called(state: LayerState, module: nn.Module) -> None:
    """Raise if a layer should have called sparing and has not: its code may choose otherwise."""
    if not state.called and state.active:
        raise RuntimeError(f"{state.name}: {type(module).__name__} did not call sparing; leave it exact")


def unsupported(state: LayerState, error: Unsupported) -> Unsupported:
    """Return the error of `attention()` with the name of the layer."""
    local = f" (the layer attends within {state.window} tokens; shorter inputs need no mask)" if state.window else ""
    return Unsupported(f"{state.name}: {error}{local}")


def replaced_value_layer(state: LayerState) -> Unsupported:
    """Return the error for a value layer that was replaced since the model was approximated."""
    return Unsupported(
        f"{state.name}.{state.value_name} is another layer than when the model was approximated; restore the model and "
        "approximate it again"
    )


def copied_values(state: LayerState) -> Unsupported:
    """Return the error for values that are not the value layer's own output."""
    return Unsupported(
        f"{state.name}: the values were copied before the attention function saw them, as a cache does, "
        "but the layer's method projects them itself; pass use_cache=False"
    )


def packed_bias(state: LayerState) -> Unsupported:
    """Return the error for packed sequences in a layer that adds a position bias to the scores of all positions."""
    return Unsupported(f"{state.name}: packed sequences have no common position bias; pass padded batches")


def other_mask(state: LayerState, mask: Tensor) -> Unsupported:
    """Return the error for a mask that YOSO does not take."""
    return Unsupported(f"{state.name}: attention_mask is {list(mask.shape)}; YOSO takes [B, n]")


def other_heads(state: LayerState) -> Unsupported:
    """Return the error for values that are split into heads in another way than by `Projection`."""
    return Unsupported(f"{state.name}: the model splits its values into heads in a way of its own; use another method")
