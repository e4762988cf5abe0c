"""What hangs on an attention module while a model is approximated: plain Python, outside weights and state_dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from sparing.contract import Method
from sparing.methods.exact import Exact
from sparing.transformers.statistics import Tally
from sparing.transformers.switch import Switch, is_ours

if TYPE_CHECKING:
    from sparing.transformers.watch import Seen

#: Which tokens are approximated: a prompt, those that continue a cache one by one, or both.
WHEN = ("always", "prefill", "decode")

_ATTRIBUTE = "_sparing"
_HEADS = 2**16  # streams per layer, more than any layer has heads


@dataclass(eq=False)
class Choice:
    """What one call of `approximate()` decided for one layer."""

    method: Method
    seed: int | None
    index: int  #: the layer's number in its model; keys the random streams
    tally: Tally = field(default_factory=Tally)
    when: str = "always"  #: one of `WHEN`
    by_name: bool = False  #: read from the config's recipe, and not by `approximate()`
    see: Callable[[Seen], None] | None = None  #: looks at the calls instead, which are exact then

    @property
    def exact(self) -> bool:
        return type(self.method) is Exact

    @property
    def decodes(self) -> bool:
        """Whether tokens that continue a cache are approximated."""
        return self.when != "prefill" and self.method.supports.decode

    def streams(self, heads: int) -> list[int]:
        """Random streams of the key-value heads; no two layers share one."""
        return list(range(self.index * _HEADS, self.index * _HEADS + heads))


@dataclass(eq=False)
class Slot:
    """The choices for one layer, the latest of which rules, and what is known of the layer."""

    name: str
    cross: bool = False  #: the keys come from another sequence
    value: str | None = None  #: the name of the layer's linear layer of the values
    window: int | None = None  #: the layer attends within so many tokens, by its mask
    choices: list[Choice] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    served: bool = False  #: the layer has called sparing at least once
    orphan: Any = field(default=None, repr=False)  #: keys and their index, until their cache is known

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "orphan": None}  # a copy of a model has no cache

    @property
    def choice(self) -> Choice | None:
        """What the layer runs while its model is switched to sparing; None for exact attention."""
        return self.choices[-1] if self.choices else None

    @property
    def serving(self) -> bool:
        """Whether the model is switched to sparing; the user may switch it away and back."""
        return all(is_ours(switch.config) for switch in self.switches)

    @property
    def projects(self) -> bool:
        """Whether the layer's method works on the projection of the values."""
        return bool(self.choices) and self.choices[-1].method.supports.projection


def slot_of(module: nn.Module) -> Slot | None:
    """The slot of an attention module, if it has one."""
    return getattr(module, _ATTRIBUTE, None)


def hang(module: nn.Module, slot: Slot | None) -> None:
    """Give the module its slot, or take it away."""
    if slot is not None:
        setattr(module, _ATTRIBUTE, slot)
    elif slot_of(module) is not None:
        delattr(module, _ATTRIBUTE)
