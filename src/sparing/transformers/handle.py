"""`approximate()`: replace the attention of a model by other methods; the handle that it returns restores it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn

from sparing.methods.exact import Exact
from sparing.notebook import block
from sparing.transformers.arguments import Layers, What, read_arguments
from sparing.transformers.cache import prepare_cache
from sparing.transformers.config_recipe import recipe_of, write_recipe
from sparing.transformers.find import AttentionLayer, find
from sparing.transformers.packing import is_packing, packable_encoders
from sparing.transformers.positions import check_learned_positions, is_position_check
from sparing.transformers.recipe import Recipe
from sparing.transformers.runtime.adapters import set_class
from sparing.transformers.runtime.by_name import state_by_name
from sparing.transformers.runtime.function import register
from sparing.transformers.runtime.projection import UnprojectedLinear
from sparing.transformers.runtime.refusals import check_called
from sparing.transformers.state import (
    NAME,
    LayerSettings,
    LayerState,
    config_state,
    method_of,
    names_sparing,
    set_state,
    state_of,
)
from sparing.transformers.statistics import LayerStatistics, Statistics, Tally


class Handle:
    """Returned by `approximate()`. `restore()`, or leaving a `with` block, gives back the model as it was."""

    def __init__(
        self, model: nn.Module, layers: list[AttentionLayer], settings: dict[int, LayerSettings], exact: dict[int, str]
    ) -> None:
        self.model = model
        self._layers = layers
        self._settings = settings
        self._exact = exact  # by layer: why it stays exact although the method was for all layers
        self._undo: list[Callable[[], None]] = []
        self._restored = False
        config = getattr(model, "config", None)
        self._config = None if config is None else config_state(config)  # kept alive until the handle is gone

    def restore(self) -> None:
        """Undo the call of `approximate()`. Calling it again does nothing."""
        self._restored = True
        while self._undo:
            self._undo.pop()()
        write_recipe(self.model, self._layers)

    @property
    def active(self) -> bool:
        """Whether neither `restore()` nor `sparing.restore(model)` has been called."""
        states = {index: state_of(self._layers[index].module) for index in self._settings}
        here = [state is not None and self._settings[index] in state.stack for index, state in states.items()]
        return not self._restored and (any(here) or not here)

    @property
    def layers(self) -> dict[str, str]:
        """The spec that every attention layer of the model runs now, by the layer's name; "exact" is also its own."""
        return {layer.name: str(method_of(layer.module) or "exact") for layer in self._layers}

    @property
    def recipe(self) -> Recipe:
        """What the model runs now, to save or to apply to another model."""
        return recipe_of(self.model, self._layers)

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Return counts of what the approximated layers have run so far: calls, sampling rates, FLOPs; no times.

        `print(handle.statistics())` shows a table. Runs of a compiled model are not counted, which `compiled` says, but
        for the reason why its tokens run exact attention, which counts as one call.

        reset: set all counts to zero afterwards.
        """
        layers, compiled = [], any(settings.compiled for settings in self._settings.values())
        for index, settings in self._settings.items():
            layers.append(LayerStatistics(self._layers[index].name, settings.method, settings.counted()))
            if reset:
                settings.tally, settings.graph_reason, settings.compiled = Tally(), None, False
        return Statistics(tuple(copy.deepcopy(layer) for layer in layers), compiled)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        lines = [f"<sparing on {type(self.model).__name__}: {self._summary()}"]
        if not self.active:
            return f"{lines[0]}>"
        runs: list[tuple[str, list[str]]] = []
        for layer in self._layers:
            method = method_of(layer.module)
            why = self._exact.get(layer.index)
            own = "exact, by sparing where that is faster" if _runs_exact(layer) else "the model's own attention"
            text = str(method) if method is not None else f"exact: {why}" if why else own
            if method is not None and layer.window is not None and not method.supports.attn_mask:
                text += f", on inputs within the layer's own window of {layer.window} tokens"
            if (reasons := self._reasons(layer)) and method is not None:
                text += f"; tokens that continued a cache ran exact attention: {reasons}"
            if not runs or runs[-1][0] != text:
                runs.append((text, []))
            runs[-1][1].append(layer.name)
        for text, names in runs:
            place = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"
            lines.append(f"  {place}: {text}")
        lines += [f"  {line}" for line in self._phases()]
        if any((state := state_of(layer.module)) is not None and state.packing for layer in self._layers):
            lines.append("  the padding of batches is removed")
        if any(
            layer.causal and (method := method_of(layer.module)) and method.supports.projection
            for layer in self._layers
        ):
            lines.append("  methods on the value layer need use_cache=False")
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        first, *lines = repr(self).strip("<>").splitlines()
        return block(first, *(line.strip() for line in lines))

    def _reasons(self, layer: AttentionLayer) -> str:
        """Return why tokens that continued a cache ran exact attention in a layer; "" if none did."""
        settings = self._settings.get(layer.index)
        return "" if settings is None else "; ".join(settings.counted().reasons)

    def _phases(self) -> list[str]:
        """Return lines that say what causal layers do with prompts, and with tokens that continue a cache."""
        found = {}
        for layer in self._layers:
            state = state_of(layer.module)
            settings = None if state is None else state.settings
            if layer.causal and settings is not None and not settings.exact:
                found[settings.when == "decode", settings.decodes] = True
        lines = {
            (False, False): "prompts run as above; tokens that continue a cache (decoding) run exact attention",
            (False, True): "prompts and tokens that continue a cache (decoding) run as above",
            (True, True): "prompts run exact attention; tokens that continue a cache (decoding) run as above",
        }
        return [text if len(found) == 1 else f"some layers: {text}" for case, text in lines.items() if case in found]

    def _summary(self) -> str:
        count = sum(method_of(layer.module) is not None for layer in self._layers)
        text = f"{count} of {len(self._layers)} attention layers approximated"
        if self.active:
            return text
        return f"restored ({text} by another handle)" if count else "restored"


def approximate(
    model: nn.Module,
    what: What | None = None,
    *,
    layers: Layers | None = None,
    seed: int | None = 0,
    when: str | None = None,
    padding: str = "keep",
) -> Handle:
    """Replace the attention of a Hugging Face model, in place. No weight is changed and nothing is copied.

    what: a `Method` or its spec string, for all layers or for those of `layers`; a mapping from layers to methods; a
        `Recipe` or the path of its JSON file. None takes the recipe that the model's config holds. "exact" is sparing's
        exact attention, equal but for rounding, where it is faster than the model's own; layers that are not named are
        left alone.
    layers: numbers (in the order of `handle.layers`, negative ones from the end) or names, which may hold `*`.
        None: every attention layer, except those that attend within a window by themselves and those whose code
        sparing cannot replace; `print(handle)` shows which stayed exact, and why.
    seed: fixes all random choices. None draws new ones at each call, which depend on `torch.manual_seed`.
    when: "prefill" approximates prompts, and all other calls without a cache; "decode" leaves these exact and
        approximates tokens that continue a cache; "always" does both. None: as the recipe says, or else "always".
    padding: "remove" runs the blocks of an encoder on the valid tokens of a padded batch alone, one sequence after the
        other, and pads its outputs again, with zeros; other layers and the results are as before. With what="exact"
        that is all that changes. Calls that ask for the hidden states of all layers run padded, and so do compiled
        models and training with gradient checkpointing. "keep": batches run as they are.

    Returns a handle. `handle.restore()` restores the model, and so does the end of a `with` block, also after an
    exception. Calls may be nested: a later one applies to the layers that it names, until it is restored. What a layer
    cannot run raises `Unsupported` before anything is changed.

    Tokens that continue a cache (`generate`) are approximated by multipole, skip, window and top_keys, from a
    `sparing.Index` beside the layers of a `DynamicCache` or `StaticCache`. Where they run exact attention instead, one
    warning per handle and reason names the way out; `print(handle)` and `handle.statistics()` show the reason for each
    layer.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64))
    >>> with sparing.approximate(model, "nystrom(landmarks=16)") as handle:
    ...     print(handle)
    <sparing on BertModel: 2 of 2 attention layers approximated
      encoder.layer.0.attention.self ... encoder.layer.1.attention.self (2 layers): nystrom(landmarks=16)>
    """
    places = find(model)
    wanted, exact = read_arguments(model, places, what, layers, seed, when)
    if padding not in ("keep", "remove"):
        raise ValueError(f"padding={padding!r} is not one of 'keep', 'remove'")
    encoders = packable_encoders(model, places) if padding == "remove" else []
    for layer in places if encoders else ():  # every layer gets packed sequences
        wanted.setdefault(layer.index, LayerSettings(Exact(), seed, layer.stream))
    register()
    handle = Handle(model, places, wanted, exact)
    warned: set[str] = set()
    for settings in wanted.values():
        settings.warned = warned
    try:
        states = _states(places)
        for index, settings in wanted.items():
            _apply(places[index], states[index], settings, handle._undo)
        for encoder in encoders:
            encoder.install(states, handle._undo)
        if any(settings.decodes and places[index].causal for index, settings in wanted.items()):
            handle._undo.append(check_learned_positions(model))
        write_recipe(model, places)
    except BaseException:
        handle.restore()
        raise
    return handle


def _runs_exact(layer: AttentionLayer) -> bool:
    """Return whether a layer is set to run sparing's exact attention, and can."""
    state = state_of(layer.module)
    settings = None if state is None else state.settings
    return settings is not None and settings.exact and (layer.family is None or layer.family.takes_exact)


def _states(places: list[AttentionLayer]) -> list[LayerState]:
    """Return the state of every layer: the one it has, the one that the config's recipe gives, or a new one."""
    for layer in places:
        state, config = state_of(layer.module), getattr(layer.module, "config", None)
        from_config = state is not None and all(settings.from_config for settings in state.stack)
        if from_config and config is not None and not names_sparing(config):
            set_state(layer.module, None)  # loaded with attn_implementation="sparing", and another name was set since
        if state_of(layer.module) is None and getattr(config, "_attn_implementation", None) == NAME:
            with suppress(RuntimeError):  # a recipe that cannot be read raises when the layer runs
                state_by_name(layer.module)
    states = []
    for layer in places:
        state = state_of(layer.module) or LayerState(layer.name)
        state.name, state.cross, state.value_name, state.window = layer.name, layer.cross, layer.value, layer.window
        state.config = layer.config
        state.set_configs(layer.configs)
        states.append(state)
    return states


def _apply(layer: AttentionLayer, state: LayerState, settings: LayerSettings, undo: list[Callable[[], None]]) -> None:
    """Let the layer run the settings; add a function to `undo` before each change."""
    undo.append(lambda: _remove(layer, state, settings))
    state.stack.append(settings)
    set_state(layer.module, state)
    for config in state.configs:
        undo.append(config.name_sparing())
    set_class(layer.module, state, layer.family)
    if settings.decodes and layer.causal:
        undo.append(layer.module.register_forward_pre_hook(prepare_cache, with_kwargs=True).remove)
    if settings.method.supports.projection and layer.value is not None and layer.family is None:
        present = getattr(layer.module, layer.value)
        if not isinstance(present, UnprojectedLinear):
            setattr(layer.module, layer.value, UnprojectedLinear(present, state))
    if not settings.exact and not state.called:
        undo.append(layer.module.register_forward_hook(_check_called).remove)


def restore(model: nn.Module) -> None:
    """Undo every call of `approximate()` on a model, also those whose handles are lost, and on a copy of a model.

    A recipe with which the model was loaded (`attn_implementation="sparing"`) stays.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64))
    >>> for method in ("nystrom", "window"):
    ...     handle = sparing.approximate(model, method)  # the first handle is lost
    >>> sparing.restore(model)
    >>> print(handle)
    <sparing on BertModel: restored>
    """
    places = find(model)
    for layer in places:
        if (state := state_of(layer.module)) is None:
            continue
        for settings in [each for each in state.stack if not each.from_config]:
            _remove(layer, state, settings)
        state.packing.clear()
        for config in state.configs:
            config.release()
    for module in model.modules():
        for hooks, kinds in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
                kinds.pop(key, None)
    write_recipe(model, places)


def _is_ours(hook: Any) -> bool:
    return hook in (prepare_cache, _check_called) or is_position_check(hook) or is_packing(hook)


def _remove(layer: AttentionLayer, state: LayerState, settings: LayerSettings) -> None:
    if settings not in state.stack:  # `restore(model)` was faster
        return
    state.stack.remove(settings)
    if not state.stack:
        set_state(layer.module, None)
    set_class(layer.module, state, layer.family)
    if layer.value is not None and not any(each.method.supports.projection for each in state.stack):
        present = getattr(layer.module, layer.value)
        if isinstance(present, UnprojectedLinear):
            setattr(layer.module, layer.value, present.restored())


def _check_called(module: nn.Module, args: Any, output: Any) -> None:
    """Raise if the layer ran without calling sparing: a forward hook."""
    state = state_of(module)
    if state is not None and not torch.compiler.is_compiling():
        check_called(state, module)
