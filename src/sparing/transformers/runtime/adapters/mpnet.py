"""MPNet: softmax attention with a position bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from sparing.transformers.families import MPNET
from sparing.transformers.runtime.adapters.base import AdaptedAttention, join_heads, outputs
from sparing.transformers.runtime.masks import add_bias
from sparing.transformers.runtime.refusals import check_arguments


class AdaptedMPNetSelfAttention(AdaptedAttention, MPNetSelfAttention):
    """Any method that takes additive masks. sparing computes exact attention too, without n^2 memory."""

    family = MPNET
    stock = MPNetSelfAttention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        """Run like the module's own `forward`; return no weights."""
        found = self.state_and_settings()
        if found is None:
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **others)
        check_arguments(found[0], others, harmless=())
        mask = attention_mask if position_bias is None else add_bias(position_bias, attention_mask)
        dropout = self.dropout.p if self.training else 0.0
        out = self.attend(*found, hidden_states, (self.q, self.k, self.v), mask, dropout)
        return outputs(self.o(join_heads(out)), output_attentions)
