"""The inputs of every attention layer of a model, as it runs on real text."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.contract import Projection


class Layer(NamedTuple):
    """What one self-attention layer was given."""

    name: str
    query: Tensor  # [B, H, n, d]
    key: Tensor
    value: Projection  # the hidden states and the value layer


@torch.no_grad()
def capture(model: nn.Module, **inputs: Any) -> list[Layer]:
    """Run `model(**inputs)` and return the inputs of its BERT-like self-attention layers, in the order they ran.

    A BERT-like layer has linear modules `query`, `key`, `value` and an `attention_head_size`. The model is left as
    it was, also after an exception.
    """
    layers: list[Layer] = []

    def record(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            query, key = (
                linear(hidden).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
                for linear in (module.query, module.key)
            )
            layers.append(Layer(name, query, key, Projection(hidden, module.value.weight, module.value.bias)))

        return hook

    hooks = [
        module.register_forward_pre_hook(record(name), with_kwargs=True)
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, part, None), nn.Linear) for part in ("query", "key", "value"))
        and hasattr(module, "attention_head_size")
    ]
    if not hooks:
        raise ValueError(f"model: {type(model).__name__} has no BERT-like self-attention layers to capture")
    try:
        model(**inputs)
    finally:
        for handle in hooks:
            handle.remove()
    return layers
