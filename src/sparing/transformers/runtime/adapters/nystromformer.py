"""Nystromformer: any method in the place of the model's landmarks."""

from __future__ import annotations

from torch import Tensor
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from sparing.transformers.families import NYSTROMFORMER
from sparing.transformers.runtime.adapters.base import AdaptedAttention
from sparing.transformers.runtime.masks import shown_keys


class AdaptedNystromformerSelfAttention(AdaptedAttention, NystromformerSelfAttention):
    """Any method, beside the module's convolution."""

    family = NYSTROMFORMER
    stock = NystromformerSelfAttention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run as the module's own, but hide padding from the convolution; attention_mask is additive. No weights."""
        present = self.present()
        if present is None:
            return super().forward(hidden_states, attention_mask, output_attentions)
        keep = None if attention_mask is None else shown_keys(attention_mask)
        return self.attend_and_convolve(present, hidden_states, attention_mask, keep, output_attentions)
