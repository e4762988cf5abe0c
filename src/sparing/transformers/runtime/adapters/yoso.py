"""YOSO: its own attention on any machine and with its padding mask, or any other method in its place."""

from __future__ import annotations

from torch import Tensor
from transformers.models.yoso.modeling_yoso import YosoSelfAttention

from sparing.transformers.families import YOSO
from sparing.transformers.runtime.adapters.base import AdaptedAttention
from sparing.transformers.runtime.refusals import other_mask


class AdaptedYosoSelfAttention(AdaptedAttention, YosoSelfAttention):
    """Any method, beside the module's convolution."""

    family = YOSO
    stock = YosoSelfAttention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run as the module's own, but hide padding; attention_mask is [B, n], 0 for padding. No weights."""
        present = self.present()
        if present is None:
            return super().forward(hidden_states, attention_mask, output_attentions)
        if attention_mask is not None and attention_mask.ndim != 2:
            raise other_mask(present[0], attention_mask)
        keep = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
        return self.attend_and_convolve(present, hidden_states, keep, keep, output_attentions)
