"""The inputs of an encoder's attention layers, for studies that work on one layer's queries, keys and values."""

from __future__ import annotations

from torch import Tensor, nn

from sparing.transformers.watch import Seen, record_calls


def encoder_layers(model: nn.Module, input_ids: Tensor) -> list[Seen]:
    """Run the model on token ids [1, n] and return what each layer is given; the values as a `Projection`."""
    found = record_calls(model, "monte_carlo", lambda: model(input_ids=input_ids))
    if any(seen.call["is_causal"] or seen.call["attn_mask"] is not None for seen in found):
        raise ValueError(f"model: {type(model).__name__} masks its attention; this study takes an encoder such as BERT")
    return found
