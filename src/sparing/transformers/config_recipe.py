"""Write the recipe of an approximated model into its config, which is saved with the model."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from sparing.transformers.find import AttentionLayer, base_name, find
from sparing.transformers.recipe import Recipe
from sparing.transformers.state import ConfigState, config_state, state_of


def recipe_of(model: nn.Module, layers: list[AttentionLayer]) -> Recipe:
    """Return the recipe of what the model runs now."""
    specs: dict[str, str | None] = {}
    seeds, whens = {}, {}
    for layer in layers:
        name, state = base_name(model, layer.name), state_of(layer.module)
        specs[name] = None
        if state is not None and state.settings is not None:
            specs[name] = str(state.settings.method)
            seeds[name], whens[name] = state.settings.seed, state.settings.when
    architecture = getattr(getattr(model, "config", None), "model_type", None)
    seed = seeds if len(set(seeds.values())) > 1 else next(iter(seeds.values()), 0)
    when = whens if len(set(whens.values())) > 1 else next(iter(whens.values()), "always")
    return Recipe(specs, seed, architecture, when=when)


def write_recipe(model: nn.Module, layers: list[AttentionLayer]) -> None:
    """Write what the model runs into its config, or restore the entry from before any model was approximated.

    A part of a model (its encoder, a layer) writes no recipe: the names in it would be read as those of the whole
    model. Models that wrote into the part's configs before write again.
    """
    config: Any = getattr(model, "config", None)
    if config is not None and _is_whole(model):
        state = config_state(config)
        if not state.writers:
            state.recipe = getattr(config, "sparing", None)
        state.writers.pop(id(model), None)
        state.writers[id(model)] = model
        _write(state)
        return
    for shared in {id(config): config for layer in layers for config in layer.configs}.values():
        if config_state(shared).writers:
            _write(config_state(shared))


def _write(state: ConfigState) -> None:
    """Write the recipe of the model that was approximated last, among those that share the config."""
    for writer in reversed(list(state.writers.values())):
        layers = find(writer)
        if any(_is_approximated(layer.module) for layer in layers):
            state.config.sparing = recipe_of(writer, layers).with_checksum()
            return
    state.writers.clear()
    if state.recipe is not None:
        state.config.sparing = state.recipe
    elif hasattr(state.config, "sparing"):
        del state.config.sparing


def _is_approximated(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and any(not settings.from_config for settings in state.stack)


def _is_whole(model: nn.Module) -> bool:
    """Return whether an Auto class could load the model, unlike the encoder of an encoder-decoder."""
    model = getattr(model, "_orig_mod", model)
    return isinstance(model, PreTrainedModel) and any(cls.__name__ in _loadable() for cls in type(model).__mro__)


@cache
def _loadable() -> frozenset[str]:
    found: set[str] = set()
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES"):
            for classes in mapping.values():
                found.update([classes] if isinstance(classes, str) else classes)
    return frozenset(found)
