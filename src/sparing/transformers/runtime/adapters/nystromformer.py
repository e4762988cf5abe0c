"""Nystromformer: any method in the place of the model's landmarks."""

from __future__ import annotations

from torch import Tensor
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from sparing.transformers.families import NYSTROMFORMER
from sparing.transformers.runtime.adapters.base import ConvolvingAttention
from sparing.transformers.runtime.masks import shown_keys
from sparing.transformers.state import LayerState


class AdaptedNystromformerSelfAttention(ConvolvingAttention, NystromformerSelfAttention):
    """Takes additive masks."""

    family = NYSTROMFORMER
    stock = NystromformerSelfAttention

    def read_mask(self, state: LayerState, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask as it is, and the keys that it shows."""
        return mask, shown_keys(mask)
