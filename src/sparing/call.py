"""One attention call, checked and normalised: the only record that travels from the door to a method."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparing.contract import Impl, Past
from sparing.draws import Draws
from sparing.mask import Mask


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call besides its method and q, k and v.

    When a method runs, 16-bit inputs are float32, key and value heads are repeated to the number of query heads,
    padded keys and values are zero, and no entry is infinite or NaN.
    """

    scale: float
    mask: Mask
    draws: Draws  #: one stream per query head: that of its key-value head
    groups: int = 1  #: query heads per key-value head
    dropout_p: float = 0.0
    slot_keyed_dropout: bool = False  #: each batch slot drops its own weights (calls without an explicit seed)
    impl: Impl = "auto"
    dtype: torch.dtype = torch.float32  #: that the method computes in
    state: nn.Module | None = None  #: the method's learned state, when a module owns one
    past: Past | None = None  #: of the sequence whose first call this is; methods may leave there what they computed
    statistics: dict[str, Tensor] | None = field(default=None, compare=False)
    brief: bool = False  #: of the statistics, only those that come for free

    def note(self, **values: Tensor) -> None:
        """Keep facts about the computation for `inspect()`; free when nobody asked."""
        if self.statistics is not None:
            self.statistics.update({name: value.detach() for name, value in values.items()})

    def with_mask(self, **changes: Any) -> Call:
        """Return the call with other fields of its mask."""
        return replace(self, mask=replace(self.mask, **changes))

    @property
    def noted(self) -> bool:
        """Whether facts that take extra work are asked for; those at hand may be noted in any case."""
        return self.statistics is not None and not self.brief
