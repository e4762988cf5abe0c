"""Layers of a model that was loaded with attn_implementation="sparing", and not passed to `approximate()`.

The attention function gets a module and not the model. So the recipe is read from the config, and the module's number
from its `layer_idx`. Modules without one (ViT, DistilBERT) are numbered in the order in which they first run.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparing.transformers.cache import prepare_cache
from sparing.transformers.recipe import Recipe
from sparing.transformers.state import CHOSEN, LayerSettings, LayerState, config_state, set_state


def state_by_name(module: nn.Module) -> LayerState:
    """Return the state that the config's recipe gives to this module, and set it on the module.

    If `approximate()` changed the config for other layers, a module without settings gets an empty state and stays
    exact.
    """
    config: Any = getattr(module, "config", None)
    label = type(module).__name__
    if getattr(config, "_attn_implementation", None) == CHOSEN:
        return LayerState(label)  # nothing is set for this layer, but for others that share its config
    recipe = Recipe.of_config(config)
    if recipe is None:
        raise RuntimeError(
            f"{label}: attn_implementation='sparing', but the config holds no recipe; "
            "call sparing.approximate(model, method)"
        )
    way_out = "call sparing.approximate(model) once after loading"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise RuntimeError(f"{label}: the layer does not tell whether it is in the encoder or the decoder; {way_out}")
    shared = config_state(config)
    number = getattr(module, "layer_idx", None)
    if number is None:
        if module.training:
            raise RuntimeError(f"{label} has no layer_idx, and layers may be skipped in training; {way_out}")
        number = shared.numbered
        shared.numbered += 1
        if number >= getattr(config, "num_hidden_layers", number + 1):
            raise RuntimeError(f"{label}: more layers without a layer_idx share the config than it has; {way_out}")
    name = recipe.name_at(number)
    if name is None:
        raise RuntimeError(f"{label}: the recipe does not say what layer {number} of this model runs; {way_out}")
    state = LayerState(name, config=config, configs=[shared])
    method = recipe.method_of(name)
    if method is not None:
        if method.supports.projection:
            raise RuntimeError(f"{name}: {method.name} works on the value layer; {way_out}")
        settings = LayerSettings(method, recipe.seed_of(name), number, recipe.when_of(name), from_config=True)
        settings.warned = shared.warned
        state.stack.append(settings)
    set_state(module, state)
    module.register_forward_pre_hook(prepare_cache, with_kwargs=True)  # does nothing once the state is removed
    return state
