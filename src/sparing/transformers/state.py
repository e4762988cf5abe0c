"""The state that sparing keeps for an attention module and for a config, outside weights and state_dict.

`LayerState` holds what a module runs. `ConfigState` holds which attention implementation a config names, and which
models wrote a recipe into it. A config may be shared, by the encoder and the decoder of a model or by two models: its
state is found by the config object, and not through a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn

from sparing.compiled import run_while_tracing
from sparing.contract import Method, Projection
from sparing.contract import method as _method
from sparing.methods.exact import Exact
from sparing.transformers.packing import PackedBatch, Packing
from sparing.transformers.reasons import Reason
from sparing.transformers.statistics import Tally

#: The value of attn_implementation: layers run what the config's recipe says.
NAME = "sparing"
#: Its value while `approximate()` has set methods for some layers; other layers of the config stay exact.
CHOSEN = "sparing_chosen"

_ATTRIBUTE = "_sparing"
_HEADS = 2**16  # random streams per layer, more than any layer has heads


class ObservedCall(NamedTuple):
    """One call of a layer: what `sparing.attention(query, key, value, **call)` would run."""

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor | Projection
    call: dict[str, Any]
    max_length: int | None = None  #: the longest input that the model is made for

    def with_method(self, method: str | Method) -> dict[str, Any]:
        """Return the arguments of the call with another method, in the setting that the layer would run."""
        return {**self.call, "method": _method(method).for_length(self.max_length)}

    @property
    def projected(self) -> Tensor:
        """Return the projected values."""
        return self.value.project(self.key.shape[1]) if isinstance(self.value, Projection) else self.value


@dataclass(eq=False)
class LayerSettings:
    """What one call of `approximate()`, or the recipe of a config, sets for one layer."""

    method: Method
    seed: int | None
    number: int  #: of the layer in its model; selects the random streams
    when: str = "always"  #: one of `recipe.WHEN`
    from_config: bool = False  #: read from the config's recipe, and not set by `approximate()`
    tally: Tally = field(default_factory=Tally)
    warned: set[str] = field(default_factory=set)  #: reasons that were warned about, in all layers of the handle
    graph_reason: str | None = None  #: why a compiled graph, whose calls are not counted, ran exact attention
    compiled: bool = False  #: the method was traced into a compiled graph, whose calls are not counted
    observer: Callable[[ObservedCall], None] | None = None  #: gets every call; the layer then runs exact attention
    exact: bool = field(init=False)  #: the method is exact attention

    def __post_init__(self) -> None:
        self.exact = type(self.method) is Exact

    @property
    def decodes(self) -> bool:
        """Whether tokens that continue a cache are approximated."""
        return self.when != "prefill" and self.method.supports.decode

    def counted(self) -> Tally:
        """Return the tally, with all steps counted; the reason of a compiled graph counts as one call."""
        if self.graph_reason is not None:
            self.tally.reasons.setdefault(self.graph_reason, 1)
        return self.tally.count_pending()

    @run_while_tracing
    def warn_once(self, layer: str, reason: str, way_out: str) -> None:
        """Warn that tokens which continue a cache run exact attention, once per handle and reason."""
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(
                f"{layer}: tokens that continue a cache run exact attention although {self.method} was asked for: "
                f"{reason}; {way_out}",
                stacklevel=2,
            )

    def streams(self, heads: int) -> list[int]:
        """Return the random streams of the key-value heads, which no other layer of the model uses."""
        return list(range(self.number * _HEADS, self.number * _HEADS + heads))


@dataclass(eq=False)
class LayerState:
    """The settings of one layer, the last of which apply, and facts about the layer."""

    name: str
    cross: bool = False  #: the keys come from another sequence
    value_name: str | None = None  #: the name of the layer's linear layer of the values
    config: Any = None  #: the config of the layer's model, which states how long inputs may be
    window: int | None = None  #: width of the window that the layer's mask sets, in tokens
    stack: list[LayerSettings] = field(default_factory=list)
    configs: list[ConfigState] = field(default_factory=list)
    called: bool = False  #: the layer has called sparing at least once
    cache_reason: Reason | None = None  #: why sparing cannot follow the cache that the layer was last called with
    packing: list[Packing] = field(default_factory=list)  #: what removes the padding of its batches; the last applies

    @property
    def batch(self) -> PackedBatch | None:
        """The batch without padding that runs through the model now; None: it is as the user passed it."""
        return self.packing[-1].batch if self.packing else None

    @property
    def settings(self) -> LayerSettings | None:
        """What the layer runs while its config names sparing; None for exact attention."""
        return self.stack[-1] if self.stack else None

    @property
    @run_while_tracing
    def max_length(self) -> int | None:
        """The longest input that the model is made for, or None if its config does not say.

        RoBERTa's config, and those of its descendants, count two positions more.
        """
        found = getattr(self.config, "max_position_embeddings", None)
        return found if type(found) is int and found > 0 else None

    @property
    def active(self) -> bool:
        """Whether the configs name sparing, which the user may change at any time."""
        return all(names_sparing(state.config) for state in self.configs)

    @property
    def projects(self) -> bool:
        """Whether the layer's method works on the projection of the values."""
        return self.settings is not None and self.settings.method.supports.projection

    def set_configs(self, configs: Iterable[Any]) -> None:
        """Set the configs that decide how the layer is run; register the states that a copied model brought along."""
        for state in self.configs:
            _config_states.setdefault(id(state.config), state)
        self.configs = [config_state(config) for config in configs]


def exact_settings() -> LayerSettings:
    """Return the settings of a layer that runs exact attention, for which nothing was set."""
    return LayerSettings(Exact(), None, 0)


def state_of(module: nn.Module) -> LayerState | None:
    """Return the state of an attention module, or None if it has none."""
    return getattr(module, _ATTRIBUTE, None)


def set_state(module: nn.Module, state: LayerState | None) -> None:
    """Set the state of an attention module; None removes it."""
    if state is not None:
        setattr(module, _ATTRIBUTE, state)
    elif state_of(module) is not None:
        delattr(module, _ATTRIBUTE)


def method_of(module: nn.Module) -> Method | None:
    """Return the method that an attention module runs now; None for exact attention."""
    state = state_of(module)
    settings = None if state is None else state.settings
    return None if settings is None or settings.exact else settings.method


@dataclass(eq=False)
class ConfigState:
    """Sets the implementation that one config names: sparing's while any layer that reads it has settings."""

    config: Any
    implementation: str | None = None  #: the name in the config before
    users: int = 0  #: number of settings that need sparing's name
    released: int = 0  #: how often `release` has been called
    recipe: Any = None  #: `config.sparing` before any of `writers` wrote there
    writers: WeakValueDictionary[int, nn.Module] = field(default_factory=WeakValueDictionary)
    warned: set[str] = field(default_factory=set)  #: reasons that layers with the config's recipe warned about
    numbered: int = 0  #: how many modules without a `layer_idx` have got a number

    def name_sparing(self) -> Callable[[], None]:
        """Count one more user, and return a function that removes it; the last one to run restores the name."""
        previous, nested = self.config._attn_implementation, self.users > 0
        if not nested:
            self.implementation = previous
        self.users += 1
        self.config._attn_implementation_internal = NAME if self.implementation == NAME else CHOSEN
        epoch = self.released

        def remove() -> None:
            if self.released != epoch:
                return
            self.users -= 1
            if self.users == 0:
                self.config._attn_implementation_internal = self.implementation
            elif nested and previous not in (NAME, CHOSEN):  # the user had set another name in between
                self.config._attn_implementation_internal = previous

        return remove

    def release(self) -> None:
        """Restore the name, whoever uses it; functions that `name_sparing` has returned do nothing any more."""
        if self.users:
            self.users, self.released = 0, self.released + 1
            self.config._attn_implementation_internal = self.implementation

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "writers": None}  # a copied model has not written into the config

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, writers=WeakValueDictionary())


#: By the id of the config, which its state keeps alive. A state lives as long as a layer or a handle holds it.
_config_states: WeakValueDictionary[int, ConfigState] = WeakValueDictionary()


def config_state(config: Any) -> ConfigState:
    """Return the one state of this config."""
    return _config_states.setdefault(id(config), ConfigState(config))


def names_sparing(config: Any) -> bool:
    """Return whether layers that read this config call sparing."""
    return config._attn_implementation in (NAME, CHOSEN)
