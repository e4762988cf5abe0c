"""What the attention layers of a model are given, as it runs: measurements need the very tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from sparing.contract import Method, Projection
from sparing.transformers.slot import slot_of

if TYPE_CHECKING:
    from sparing.transformers.choose import What
    from sparing.transformers.handle import Handle


class Seen(NamedTuple):
    """One call of a layer: what `sparing.attention(query, key, value, **call)` would run."""

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor | Projection
    call: dict[str, Any]

    @property
    def projected(self) -> Tensor:
        """The values that every method takes."""
        return self.value.project(self.key.shape[1]) if isinstance(self.value, Projection) else self.value


def is_approximated(model: nn.Module) -> bool:
    """Whether a layer runs a method now."""
    slots = [slot for module in model.modules() if (slot := slot_of(module)) is not None]
    return any(slot.serving and slot.choice is not None and not slot.choice.exact for slot in slots)


def swapped(model: nn.Module, what: What, *, seed: int | None = 0) -> Handle:
    """`approximate` for a measurement: prompts only, and no warning that a method wants training first."""
    from sparing.transformers.handle import approximate

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs further training")
        return approximate(model, what, seed=seed, when="prefill")


@contextmanager
def rehearse(model: nn.Module, what: str | Method, see: Callable[[Seen], None], *, seed: int = 0) -> Iterator[None]:
    """As if the model was approximated: `see` looks at every call that would be, and the model stays exact.

    What `approximate` refuses is refused here, too. For prompts and other calls without a cache.
    """
    with swapped(model, what, seed=seed) as handle:
        for choice in handle._choices.values():
            choice.see = see
        yield
