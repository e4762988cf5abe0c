"""One attention call, checked and normalised, as a method sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparing.contract import Past
from sparing.draws import Draws


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call besides q, k and v.

    When a method runs, 16-bit inputs are float32, key and value heads are repeated to the number of query heads,
    padded keys and values are zero, and no entry is infinite or NaN.
    """

    scale: float
    is_causal: bool
    keep: Tensor | None  #: (B, n_k) boolean, False for padded keys
    influence: Tensor | None  #: (B, n_q) boolean, False for queries that must not affect other rows
    mask: Tensor | None  #: boolean (True = attend) or additive, broadcastable to (B, H, n_q, n_k)
    draws: Draws  #: one stream per query head: that of its key-value head
    groups: int = 1  #: query heads per key-value head
    dropout_p: float = 0.0
    slot_keyed_dropout: bool = False  #: each batch slot drops its own weights (calls without an explicit seed)
    state: nn.Module | None = None  #: the method's learned state, when a module owns one
    past: Past | None = None  #: of the sequence whose first call this is; methods may leave there what they computed
    statistics: dict[str, Tensor] | None = field(default=None, compare=False)
    brief: bool = False  #: of the statistics, only those that come for free

    def note(self, **values: Tensor) -> None:
        """Keep facts about the computation for `inspect()`; free when nobody asked."""
        if self.statistics is not None:
            self.statistics.update({name: value.detach() for name, value in values.items()})

    @property
    def noted(self) -> bool:
        """Whether facts that take extra work are asked for; those at hand may be noted in any case."""
        return self.statistics is not None and not self.brief

    def visible(self, n_q: int, n_k: int, device: torch.device) -> Tensor | None:
        """Boolean, broadcastable to (B, H, n_q, n_k): which keys a query may attend to; None when all."""
        allowed: Tensor | None = None
        if self.is_causal:  # upper-left aligned, like SDPA: query i sees keys 0..i
            allowed = torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril()[None, None]
        if self.keep is not None:
            keep = self.keep[:, None, None, :]
            allowed = keep if allowed is None else allowed & keep
        if self.mask is not None:
            mask = self.mask if self.mask.dtype == torch.bool else self.mask != -torch.inf
            allowed = mask if allowed is None else allowed & mask
        return allowed

    def key_ranks(self, n_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B or 1, n_k) rank of each key among the valid ones, and (B or 1,) how many there are.

        A padded key carries the rank of the last valid key before it; draws keyed by the rank are thus the same
        with and without padding.
        """
        return _ranks(self.keep, n_k, device)

    def query_ranks(self, n_q: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same for the queries that may influence other rows."""
        return _ranks(self.influence, n_q, device)


def _ranks(valid: Tensor | None, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if valid is None:
        return torch.arange(n, device=device)[None], torch.tensor([n], device=device)
    return (valid.long().cumsum(-1) - 1).clamp_min(0), valid.sum(-1)
