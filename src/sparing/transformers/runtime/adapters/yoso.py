"""YOSO: its own attention on any machine and with its padding mask, or any other method in its place."""

from __future__ import annotations

from torch import Tensor
from transformers.models.yoso.modeling_yoso import YosoSelfAttention

from sparing.transformers.families import YOSO
from sparing.transformers.runtime.adapters.base import ConvolvingAttention
from sparing.transformers.runtime.refusals import other_mask
from sparing.transformers.state import LayerState


class AdaptedYosoSelfAttention(ConvolvingAttention, YosoSelfAttention):
    """Takes padding masks [B, n] that are 0 for padding, which the module's own code ignores."""

    family = YOSO
    stock = YosoSelfAttention

    def read_mask(self, state: LayerState, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the valid keys twice."""
        if mask.ndim != 2:
            raise other_mask(state, mask)
        keep = (mask != 0)[:, None, None, :]
        return keep, keep
