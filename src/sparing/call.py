"""One attention call, checked and normalised: the only record that travels from the door to a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from sparing.draws import Draws
from sparing.mask import Mask

Impl = Literal["auto", "reference", "native"]


class Past(Protocol):
    """The state that a method keeps of growing sequences. Queries are (B, H, n_q, d), keys and values (B, H_kv, n, .).

    fresh: (B, n_q), False for new positions that are padding; None if none is. length: positions before these.
    """

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return attention of the newest queries and the statistics for `inspect()`, and `learn` the new positions."""

    def learn(self, q: Tensor, k: Tensor, v: Tensor, fresh: Tensor | None, length: int) -> None:
        """Add new positions to the state."""

    def crop(self, length: int) -> None:
        """Forget positions from `length` on."""

    def select(self, items: Tensor) -> None:
        """Keep these items of the batch, in this order."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call besides its method and q, k and v.

    When a method runs, 16-bit inputs are float32, key and value heads are repeated to the number of query heads,
    padded keys and values are zero, and no entry is infinite or NaN. Only `native` of a method that supports
    `native_16bit` gets 16-bit inputs, and of one that supports `native_gqa` shared key heads, as they are.
    """

    scale: float
    mask: Mask
    draws: Draws  #: random numbers; query heads that share a key-value head share its stream
    groups: int = 1  #: query heads per key-value head
    dropout_p: float = 0.0
    slot_keyed_dropout: bool = False  #: each batch slot drops its own weights (calls without an explicit seed)
    impl: Impl = "auto"
    dtype: torch.dtype = torch.float32  #: the type that the method computes in
    state: nn.Module | None = None  #: the method's learned state, when a module owns one
    past: Past | None = None  #: the `Index` state of the sequence that starts here, to which methods may add
    statistics: dict[str, Tensor] | None = field(default=None, compare=False)
    brief: bool = False  #: only statistics that cost nothing extra
    tracked: bool = False  #: a gradient may be asked for although autograd does not record, inside an operator

    def note(self, **values: Tensor) -> None:
        """Record statistics for `inspect()`; do nothing in a call of `attention()`."""
        if self.statistics is not None:
            self.statistics.update({name: value.detach() for name, value in values.items()})

    def with_mask(self, **changes: Any) -> Call:
        """Return the call with other fields of its mask."""
        return replace(self, mask=replace(self.mask, **changes))

    @property
    def noted(self) -> bool:
        """Whether statistics that cost extra work are wanted; those that cost nothing may always be noted."""
        return self.statistics is not None and not self.brief
