"""A layer that was never given a slot: its model was loaded with attn_implementation="sparing".

The function gets a module and no model, so the recipe is read from the config, and the module's number from its
`layer_idx`; where modules carry none (ViT, DistilBERT), from the order in which they first run.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from sparing.transformers.decode import look_ahead
from sparing.transformers.recipe import Recipe
from sparing.transformers.slot import Choice, Slot, hang
from sparing.transformers.switch import CHOSEN

#: id of a config -> the config, and how many of its modules have a number. Not in the config, which is saved to a file.
_numbered: dict[int, tuple[weakref.ref[Any], int]] = {}


def resolve(module: nn.Module) -> Slot:
    """The slot that the config's recipe gives to this module; hung on it for later calls.

    Where `approximate()` switched the config, a module for which nothing was chosen gets an empty one: it stays exact.
    """
    config: Any = getattr(module, "config", None)
    label = type(module).__name__
    if getattr(config, "_attn_implementation", None) == CHOSEN:
        return Slot(label)  # nobody chose anything for this layer; others share its config
    recipe = Recipe.of_config(config)
    if recipe is None:
        raise RuntimeError(
            f"{label}: attn_implementation='sparing', but the config holds no recipe; "
            "call sparing.approximate(model, method)"
        )
    way_out = "call sparing.approximate(model) once after loading"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise RuntimeError(f"{label}: which of the model's stacks a layer belongs to cannot be seen from it; {way_out}")
    index = getattr(module, "layer_idx", None)
    if index is None:
        if module.training:
            raise RuntimeError(f"{label} carries no layer number, and layers may be skipped in training; {way_out}")
        index = _next_number(config)
        if index >= getattr(config, "num_hidden_layers", index + 1):
            raise RuntimeError(f"{label}: more layers than the config has share it, and carry no numbers; {way_out}")
    name = recipe.name_at(index)
    if name is None:
        raise RuntimeError(f"{label}: the recipe does not say what layer {index} of this model runs; {way_out}")
    slot = Slot(name)
    method = recipe.method_of(name)
    if method is not None:
        if method.supports.projection:
            raise RuntimeError(f"{name}: {method.name} works on the value layer; {way_out}")
        slot.choices.append(Choice(method, recipe.seed_of(name), index, when=recipe.when_of(name), by_name=True))
    hang(module, slot)
    module.register_forward_pre_hook(look_ahead, with_kwargs=True)  # does nothing once the slot is gone
    return slot


def _next_number(config: Any) -> int:
    """How many modules of this config have been numbered before."""
    known, seen = _numbered.get(id(config), (None, 0))
    if known is None or known() is not config:
        seen = 0
    _numbered[id(config)] = (weakref.ref(config), seen + 1)
    return seen
