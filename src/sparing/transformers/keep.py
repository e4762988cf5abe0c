"""The recipe of an approximated model, and keeping it in the config, which is saved with the model."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from sparing.contract import Method
from sparing.store import add_checksum
from sparing.transformers.choose import base_name
from sparing.transformers.find import Layer, find
from sparing.transformers.recipe import Recipe
from sparing.transformers.slot import slot_of
from sparing.transformers.switch import Switch, switch_of


def running(layer: Layer) -> Method | None:
    """What the layer runs now; None for exact attention."""
    slot = slot_of(layer.module)
    choice = None if slot is None else slot.choice
    return None if choice is None or choice.exact else choice.method


def recipe_of(model: nn.Module, layers: list[Layer]) -> Recipe:
    """What the model runs now."""
    specs, seeds, whens = {}, {}, {}
    for layer in layers:
        name, slot = base_name(model, layer.name), slot_of(layer.module)
        specs[name] = str(running(layer) or "exact")
        if slot is not None and slot.choice is not None:
            seeds[name], whens[name] = slot.choice.seed, slot.choice.when
    architecture = getattr(getattr(model, "config", None), "model_type", None)
    seed = seeds if len(set(seeds.values())) > 1 else next(iter(seeds.values()), 0)
    when = whens if len(set(whens.values())) > 1 else next(iter(whens.values()), "always")
    return Recipe(specs, seed, architecture, when=when)


def keep_recipe(model: nn.Module, layers: list[Layer]) -> None:
    """Write what the model runs into its config, or give back what was there before any model was approximated.

    A part of a model (its encoder, a layer) writes nothing of its own: the names in its recipe would be read as those
    of the whole. But wholes that wrote into its configs do so again.
    """
    config: Any = getattr(model, "config", None)
    if config is not None and _is_whole(model):
        switch = switch_of(config)
        if not switch.writers:
            switch.recipe = getattr(config, "sparing", None)
        switch.writers.pop(id(model), None)
        switch.writers[id(model)] = model
        _write(switch)
        return
    for host in {id(host): host for layer in layers for host in layer.hosts}.values():
        if switch_of(host).writers:
            _write(switch_of(host))


def _write(switch: Switch) -> None:
    """Of several models with one config, the last that was touched and is approximated writes."""
    for writer in reversed(list(switch.writers.values())):
        layers = find(writer)
        if any(_chosen(layer) for layer in layers):
            switch.config.sparing = add_checksum(recipe_of(writer, layers).to_dict())
            return
    switch.writers.clear()
    if switch.recipe is not None:
        switch.config.sparing = switch.recipe
    elif hasattr(switch.config, "sparing"):
        del switch.config.sparing


def _chosen(layer: Layer) -> bool:
    slot = slot_of(layer.module)
    return slot is not None and any(not choice.by_name for choice in slot.choices)


def _is_whole(model: nn.Module) -> bool:
    """Whether `from_pretrained` of an Auto class could load it: not the encoder of an encoder-decoder, for example."""
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
