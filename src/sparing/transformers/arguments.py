"""Read and check the arguments of `approximate()`, before anything is changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sparing.contract import Method, Unsupported
from sparing.contract import method as _method
from sparing.draws import check_seed
from sparing.spec import shown
from sparing.transformers import reasons
from sparing.transformers.find import AttentionLayer, base_name
from sparing.transformers.recipe import WHEN, Recipe, is_path
from sparing.transformers.state import LayerSettings

What = str | Method | Mapping[Any, str | Method] | Recipe | os.PathLike[str]
Layers = int | str | Sequence[int | str]


def read_arguments(
    model: nn.Module,
    places: list[AttentionLayer],
    what: What | None,
    layers: Layers | None,
    seed: int | None,
    when: str | None,
) -> tuple[dict[int, LayerSettings], dict[int, str]]:
    """Return the settings of layers by number, and the reasons why other layers stay exact."""
    if what is None:
        what = Recipe.of_config(getattr(model, "config", None))
        if what is None:
            raise ValueError("what: the model's config holds no recipe; pass a method, such as 'window(size=256)'")
    check_seed(seed)
    if when is not None and when not in WHEN:
        raise ValueError(f"when={when!r} is not one of {', '.join(map(repr, WHEN))}")
    exact: dict[int, str] = {}
    if isinstance(what, Recipe) or is_path(what):
        wanted = _from_recipe(Recipe.of(what), model, places, layers)  # type: ignore[arg-type]
    elif isinstance(what, Mapping):
        wanted = _from_mapping(what, places, layers, seed)
    else:
        wanted, exact = _from_method(what, places, layers, seed)  # type: ignore[arg-type]
    for settings in wanted.values():
        settings.when = settings.when if when is None else when
    _refuse(places, wanted)
    _warn(places, wanted)
    return wanted, exact


def _from_method(
    what: str | Method, places: list[AttentionLayer], layers: Layers | None, seed: int | None
) -> tuple[dict[int, LayerSettings], dict[int, str]]:
    """Return the settings of the layers that run the method, and the reasons why others stay exact."""
    method, exact = _method(what), {}
    if layers is not None:
        named = [places[index] for index in _select(places, layers, "layers")]
        return {p.index: LayerSettings(p.method(what), seed, p.stream) for p in named}, {}
    for layer in places:
        if layer.unsupported is not None:
            exact[layer.index] = layer.unsupported
        elif layer.window is not None and method.name != "exact":
            exact[layer.index] = f"it attends within a window of {layer.window} tokens already"
    if len(exact) == len(places):
        first = places[0]
        way_out = (
            "leave this model as it is"
            if first.unsupported
            else "name the layers in `layers` to change them all the same"
        )
        raise Unsupported(f"{first.name} and all other layers stay exact: {exact[first.index]}; {way_out}")
    return {p.index: LayerSettings(p.method(what), seed, p.stream) for p in places if p.index not in exact}, exact


def _from_mapping(
    what: Mapping[Any, str | Method | None], places: list[AttentionLayer], layers: Layers | None, seed: int | None
) -> dict[int, LayerSettings]:
    if layers is not None:
        raise ValueError("layers: the mapping names the layers already; pass one of the two")
    if not what:
        raise ValueError("what: an empty mapping names no layer")
    wanted: dict[int, LayerSettings] = {}
    for key, spec in what.items():
        for index in _select(places, key, "what"):
            if spec is None:  # as in a recipe: this layer is left alone
                continue
            method = places[index].method(spec)
            if index in wanted and wanted[index].method != method:
                raise ValueError(f"what: {places[index].name} is named twice, for {wanted[index].method} and {method}")
            wanted[index] = LayerSettings(method, seed, places[index].stream)
    return wanted


def _from_recipe(
    recipe: Recipe, model: nn.Module, places: list[AttentionLayer], layers: Layers | None
) -> dict[int, LayerSettings]:
    if layers is not None:
        raise ValueError("layers: the recipe names the layers already; pass one of the two")
    have = getattr(getattr(model, "config", None), "model_type", None)
    if recipe.architecture is not None and recipe.architecture != have:
        raise ValueError(f"what: the recipe is for {shown(recipe.architecture)}, but the model is {have!r}")
    names = [base_name(model, layer.name) for layer in places]
    for key in recipe.layers:
        if not any(key == name or fnmatchcase(name, key) for name in names):
            raise ValueError(
                f"what: the recipe names {shown(key)}, which is not an attention layer; there are {_some(places)}"
            )
    wanted = {}
    for layer, name in zip(places, names, strict=True):
        spec = recipe.spec_of(name)
        if spec is not None:
            method, when = layer.method(spec), recipe.when_of(name)
            wanted[layer.index] = LayerSettings(method, recipe.seed_of(name), layer.stream, when=when)
    return wanted


def _select(places: list[AttentionLayer], layers: Any, argument: str) -> list[int]:
    """Return the numbers of the layers that an argument names."""
    if isinstance(layers, bool) or not isinstance(layers, int | str | Sequence):
        raise TypeError(f"{argument}: {layers!r} must be a layer's number or name, or a list of those")
    if isinstance(layers, str):
        found = [p.index for p in places if p.name == layers or fnmatchcase(p.name, layers)]
        if not found:
            raise ValueError(f"{argument}: no attention layer is named {layers!r}; there are {_some(places)}")
        return found
    if isinstance(layers, int):
        if not -len(places) <= layers < len(places):
            raise ValueError(f"{argument}: there is no layer {layers}; the model has {len(places)} attention layers")
        return [layers % len(places)]
    if not layers:
        raise ValueError(f"{argument}: an empty list names no layer")
    return sorted({index for one in layers for index in _select(places, one, argument)})


def _refuse(places: list[AttentionLayer], wanted: dict[int, LayerSettings]) -> None:
    """Raise if a layer cannot run its settings."""
    found = [(places[i], settings, _refusal(places[i], settings)) for i, settings in wanted.items()]
    bad = [(layer, settings, why) for layer, settings, why in found if why is not None]
    if bad:
        layer, settings, why = bad[0]
        method, cannot_decode = settings.method, settings.when == "decode" and not settings.method.supports.decode
        more = f" (and {len(bad) - 1} more layers)" if len(bad) > 1 else ""
        good = next((p.name for p, _, why in found if why is None), None)
        other = reasons.method(method.name).way_out if cannot_decode else "use another method"
        way_out = f"name the layers that can, as layers=[{good!r}]" if good else other
        raise Unsupported(f"{layer.name}{more} cannot run {method}: {why}; {way_out}")


def _refusal(layer: AttentionLayer, settings: LayerSettings) -> str | None:
    method = settings.method
    if settings.when == "decode" and not settings.exact and layer.unsupported is None:
        if not method.supports.decode:
            return f"when='decode', but {method.name} cannot continue a cache"
        if not layer.causal or layer.cross:
            return "when='decode', but the layer never continues a cache"
        if layer.window is not None:
            return f"when='decode', but the layer attends within a window of {layer.window} tokens by itself"
    return layer.refusal(method)


def _warn(places: list[AttentionLayer], wanted: dict[int, LayerSettings]) -> None:
    for spec in dict.fromkeys(str(each.method) for each in wanted.values() if each.method.oracle):
        warnings.warn(
            f"{spec} is an oracle, a yardstick: it computes exact attention first, so the model runs slower than with "
            "exact attention; see sparing.list_methods() for methods to use",
            stacklevel=4,
        )
    found = {}
    for index, settings in wanted.items():
        method, target = settings.method, places[index].target
        fits = method.supports.training_free if target == "softmax" else method.target == target
        if not settings.exact and not method.oracle and not fits:
            found[str(method), target] = method
    for (spec, target), method in found.items():
        warnings.warn(
            f"{spec} converges to {method.target} attention, or learns its own weights: a model that was trained with "
            f"{target} needs further training with it",
            stacklevel=4,
        )


def _some(places: list[AttentionLayer]) -> str:
    names = [repr(p.name) for p in places]
    return ", ".join(names if len(names) <= 4 else [*names[:3], "...", names[-1]])
