"""One record for each config object: what its layers ran before, and who wrote a recipe into it.

A config may be shared, by the encoder and the decoder of a model or by two models: what belongs to it is found by the
object, and not through a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

#: The attention implementation, in the words of transformers: layers run what the config's recipe says.
NAME = "sparing"
#: The same while `approximate()` chose for some layers; all others of the config stay exact.
CHOSEN = "sparing_chosen"


@dataclass(eq=False)
class Switch:
    """The implementation name of one config object: sparing's while any layer that reads it has a choice."""

    config: Any
    before: str | None = None
    active: int = 0  #: choices that need it
    recipe: Any = None  #: `config.sparing` before any of `writers` wrote there
    writers: WeakValueDictionary[int, nn.Module] = field(default_factory=WeakValueDictionary)

    def on(self) -> Callable[[], None]:
        """One more choice; the function that takes it back. The last one gives the first name back."""
        previous, nested = self.config._attn_implementation, self.active > 0
        if not nested:
            self.before = previous
        self.active += 1
        self.config._attn_implementation_internal = NAME if self.before == NAME else CHOSEN

        def off() -> None:
            self.active -= 1
            if self.active == 0:
                self.config._attn_implementation_internal = self.before
            elif nested and previous not in (NAME, CHOSEN):  # the user had switched sparing away in between
                self.config._attn_implementation_internal = previous

        return off

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "writers": None}  # a copy of a model has not written anything

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, writers=WeakValueDictionary())


#: By the id of the config, which its switch keeps alive; a switch lives as long as a layer or a handle holds it.
_switches: WeakValueDictionary[int, Switch] = WeakValueDictionary()


def switch_of(config: Any) -> Switch:
    """The one switch of this config."""
    return _switches.setdefault(id(config), Switch(config))


def adopt(switch: Switch) -> None:
    """Let a switch that came with a copied model be found, unless its config has one."""
    _switches.setdefault(id(switch.config), switch)


def is_ours(config: Any) -> bool:
    """Whether layers that read this config call sparing."""
    return config._attn_implementation in (NAME, CHOSEN)
