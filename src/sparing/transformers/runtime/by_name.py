"""Layers of a model that was loaded with attn_implementation="sparing", and never passed to `approximate()`.

The attention function gets a module and no model, so the recipe is read from the config, and the module's number from
its `layer_idx`; where modules carry none (ViT, DistilBERT), from the order in which they first run.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparing.transformers.cache import prepare_cache
from sparing.transformers.recipe import Recipe
from sparing.transformers.state import CHOSEN, LayerSettings, LayerState, config_state, set_state


def state_by_name(module: nn.Module) -> LayerState:
    """Return the state that the config's recipe gives to this module, and keep it there for later calls.

    Where `approximate()` changed the config, a module that has no settings gets an empty state: it stays exact.
    """
    config: Any = getattr(module, "config", None)
    label = type(module).__name__
    if getattr(config, "_attn_implementation", None) == CHOSEN:
        return LayerState(label)  # nothing is set for this layer; others share its config
    recipe = Recipe.of_config(config)
    if recipe is None:
        raise RuntimeError(
            f"{label}: attn_implementation='sparing', but the config holds no recipe; "
            "call sparing.approximate(model, method)"
        )
    way_out = "call sparing.approximate(model) once after loading"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise RuntimeError(f"{label}: which of the model's stacks a layer belongs to cannot be seen from it; {way_out}")
    shared = config_state(config)
    number = getattr(module, "layer_idx", None)
    if number is None:
        if module.training:
            raise RuntimeError(f"{label} carries no layer number, and layers may be skipped in training; {way_out}")
        number = shared.numbered
        shared.numbered += 1
        if number >= getattr(config, "num_hidden_layers", number + 1):
            raise RuntimeError(f"{label}: more layers than the config has share it, and carry no numbers; {way_out}")
    name = recipe.name_at(number)
    if name is None:
        raise RuntimeError(f"{label}: the recipe does not say what layer {number} of this model runs; {way_out}")
    state = LayerState(name, configs=[shared])
    method = recipe.method_of(name)
    if method is not None:
        if method.supports.projection:
            raise RuntimeError(f"{name}: {method.name} works on the value layer; {way_out}")
        settings = LayerSettings(method, recipe.seed_of(name), number, recipe.when_of(name), from_config=True)
        state.stack.append(settings)
    set_state(module, state)
    module.register_forward_pre_hook(prepare_cache, with_kwargs=True)  # does nothing once the state is gone
    return state
