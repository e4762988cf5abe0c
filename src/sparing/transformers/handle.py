"""`approximate()`: swap methods into a model, and the handle that swaps them out again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn

from sparing.transformers.adapters import settle
from sparing.transformers.choose import Layers, What, choose
from sparing.transformers.decode import look_ahead
from sparing.transformers.deferred import Deferred
from sparing.transformers.find import Layer, find
from sparing.transformers.hook import register
from sparing.transformers.keep import keep_recipe, recipe_of, running
from sparing.transformers.recipe import Recipe
from sparing.transformers.resolve import resolve
from sparing.transformers.slot import Choice, Slot, hang, slot_of
from sparing.transformers.statistics import LayerStatistics, Statistics, Tally
from sparing.transformers.switch import NAME, adopt, is_ours, switch_of


class Handle:
    """What `approximate()` did to a model. `restore()` undoes it, as does leaving a `with` block."""

    def __init__(
        self, model: nn.Module, layers: list[Layer], choices: dict[int, Choice], exact: dict[int, str]
    ) -> None:
        self.model = model
        self._layers = layers
        self._choices = choices
        self._exact = exact  # why layers that nobody named stayed exact
        self._undo: list[Callable[[], None]] = []
        self._restored = False
        config = getattr(model, "config", None)
        self._record = None if config is None else switch_of(config)  # lives as long as somebody may restore

    def restore(self) -> None:
        """Give the model back as it was before this call; harmless when repeated."""
        self._restored = True
        while self._undo:
            self._undo.pop()()
        keep_recipe(self.model, self._layers)

    @property
    def active(self) -> bool:
        """Whether it has not been restored."""
        return not self._restored

    @property
    def layers(self) -> dict[str, str]:
        """What every attention layer of the model runs now."""
        return {layer.name: str(running(layer) or "exact") for layer in self._layers}

    @property
    def recipe(self) -> Recipe:
        """The model's present state, to save or to apply elsewhere."""
        return recipe_of(self.model, self._layers)

    def statistics(self, *, reset: bool = False) -> Statistics:
        """What the layers that this call approximated have run so far: calls, sampling rates, FLOPs; no times.

        `print(handle.statistics())` shows a table. Runs of a compiled model are not counted.

        reset: start again from zero afterwards.
        """
        layers = []
        for index, choice in self._choices.items():
            layers.append(LayerStatistics(self._layers[index].name, choice.method, choice.tally.settle()))
            if reset:
                choice.tally = Tally()
        return Statistics(tuple(copy.deepcopy(layer) for layer in layers))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        lines = [f"<sparing on {type(self.model).__name__}: {self._summary()}"]
        runs: list[tuple[str, list[str]]] = []
        for layer in self._layers:
            method = running(layer)
            why = self._exact.get(layer.index)
            text = str(method) if method is not None else f"exact: {why}" if why else "exact"
            if method is not None and layer.window is not None and not method.supports.attn_mask:
                text += f", on inputs within the layer's own window of {layer.window} tokens"
            if not runs or runs[-1][0] != text:
                runs.append((text, []))
            runs[-1][1].append(layer.name)
        for text, names in runs:
            place = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"
            lines.append(f"  {place}: {text}")
        lines += [f"  {line}" for line in self._phases()]
        if any(layer.causal and (method := running(layer)) and method.supports.projection for layer in self._layers):
            lines.append("  methods on the value layer need use_cache=False")
        return "\n".join(lines) + ">"

    def _phases(self) -> list[str]:
        """What causal layers do with prompts, and with tokens that continue a cache."""
        found = {}
        for layer in self._layers:
            slot = slot_of(layer.module)
            if layer.causal and running(layer) is not None and slot is not None and slot.choice is not None:
                found[slot.choice.when == "decode", slot.choice.decodes] = True
        lines = {
            (False, False): "prompts run as above; tokens that continue a cache (decoding) run exact attention",
            (False, True): "prompts and tokens that continue a cache (decoding) run as above",
            (True, True): "prompts run exact attention; tokens that continue a cache (decoding) run as above",
        }
        return [text if len(found) == 1 else f"some layers: {text}" for case, text in lines.items() if case in found]

    def _summary(self) -> str:
        if not self.active:
            return "restored"
        count = sum(running(layer) is not None for layer in self._layers)
        return f"{count} of {len(self._layers)} attention layers approximated"


def approximate(
    model: nn.Module,
    what: What | None = None,
    *,
    layers: Layers | None = None,
    seed: int | None = 0,
    when: str | None = None,
) -> Handle:
    """Let a Hugging Face model run other attention, in place; no weight is changed and nothing is copied.

    what: a `Method` or its spec string, for all layers or for those of `layers`; a mapping from layers to methods; a
        `Recipe` or the path of its JSON file. None takes the recipe that the model's config holds.
    layers: numbers (in the order of `handle.layers`, negative ones from the end) or names, which may hold `*`.
        None: every attention layer, except those that attend within a window by themselves and those whose code
        sparing cannot reach; the handle's repr tells which stayed exact, and why.
    seed: fixes all random choices. None draws new ones at each call, governed by `torch.manual_seed`.
    when: "prefill" approximates prompts, and all other calls without a cache; "decode" leaves these exact and
        approximates tokens that continue a cache; "always" does both. None: as the recipe says, or else "always".

    Returns a handle: `handle.restore()` gives the model back, and so does the end of a `with` block, also after an
    exception. Calls may be nested: a later one rules where it says something, until it is restored. What a layer cannot
    run is refused before anything is changed. Tokens that continue a cache (`generate`) run methods that can decode:
    multipole, window and top_keys, from a `sparing.Index` beside the cache; all other methods leave them exact, and so
    do caches that are not plain `DynamicCache` layers of float32 or float64.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64))
    >>> with sparing.approximate(model, "nystrom(landmarks=16)") as handle:
    ...     print(handle)
    <sparing on BertModel: 2 of 2 attention layers approximated
      encoder.layer.0.attention.self ... encoder.layer.1.attention.self (2 layers): nystrom(landmarks=16)>
    """
    places = find(model)
    wanted, exact = choose(model, places, what, layers, seed, when)
    register()
    handle = Handle(model, places, wanted, exact)
    try:
        slots = _slots(places)
        for index, choice in wanted.items():
            _apply(places[index], slots[index], choice, handle._undo)
        keep_recipe(model, places)
    except BaseException:
        handle.restore()
        raise
    return handle


def _slots(places: list[Layer]) -> list[Slot]:
    """The slots of the layers, hung where there was none; what a config's recipe said by name is read first."""
    for layer in places:
        slot, config = slot_of(layer.module), getattr(layer.module, "config", None)
        by_name = slot is not None and all(choice.by_name for choice in slot.choices)
        if by_name and config is not None and not is_ours(config):
            hang(layer.module, None)  # the model was loaded by name and switched away since
        if slot_of(layer.module) is None and getattr(config, "_attn_implementation", None) == NAME:
            with suppress(RuntimeError):  # what cannot be read raises when the layer runs
                resolve(layer.module)
    slots = []
    for layer in places:
        slot = slot_of(layer.module) or Slot(layer.name)
        for switch in slot.switches:
            adopt(switch)
        slot.name, slot.cross, slot.value, slot.window = layer.name, layer.cross, layer.value, layer.window
        slot.switches = [switch_of(config) for config in layer.hosts]
        slots.append(slot)
    return slots


def _apply(layer: Layer, slot: Slot, choice: Choice, undo: list[Callable[[], None]]) -> None:
    """Let the layer run the choice; whatever is changed first puts its undoing on the list."""
    undo.append(lambda: _drop(layer, slot, choice))
    slot.choices.append(choice)
    hang(layer.module, slot)
    for switch in slot.switches:
        undo.append(switch.on())
    settle(layer.module, slot, layer.own)
    if choice.decodes and layer.causal:
        undo.append(layer.module.register_forward_pre_hook(look_ahead, with_kwargs=True).remove)
    if choice.method.supports.projection and layer.value is not None and layer.own is None:
        present = getattr(layer.module, layer.value)
        if not isinstance(present, Deferred):
            setattr(layer.module, layer.value, Deferred(present, slot))
    if not choice.exact and not slot.served:
        undo.append(layer.module.register_forward_hook(_Probation(slot)).remove)


def _drop(layer: Layer, slot: Slot, choice: Choice) -> None:
    slot.choices.remove(choice)
    if not slot.choices:
        hang(layer.module, None)
    settle(layer.module, slot, layer.own)
    if layer.value is not None and not any(c.method.supports.projection for c in slot.choices):
        present = getattr(layer.module, layer.value)
        if isinstance(present, Deferred):
            setattr(layer.module, layer.value, present.restored())


class _Probation:
    """A forward hook that sees to it that the layer calls sparing: its code may have rules that do not show."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self.slot.serving and not self.slot.served:
            raise RuntimeError(f"{self.slot.name}: {type(module).__name__} did not call sparing; leave it exact")
