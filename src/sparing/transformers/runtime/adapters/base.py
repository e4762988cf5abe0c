"""The base classes of adapted attention modules.

While such a module is approximated, its `__class__` is one derived from its own. It stays the same object in the same
place, so names, parameters, hooks, training flag, device and copies stay as they are. Setting `__class__` back to the
module's own class restores the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparing.contract import Projection
from sparing.transformers.families import Family
from sparing.transformers.runtime.method import MethodArguments, run_method
from sparing.transformers.runtime.packed import run_batch
from sparing.transformers.state import LayerSettings, LayerState, state_of


class AdaptedAttention(nn.Module):
    """The class of an attention module while it has settings that sparing computes."""

    family: ClassVar[Family]
    stock: ClassVar[type[nn.Module]]  #: the module's own class

    @classmethod
    def computes(cls, settings: LayerSettings) -> bool:
        """Return whether sparing computes these settings; if not, the module's own code runs."""
        return cls.family.takes_exact or not settings.exact

    def state_and_settings(self) -> tuple[LayerState, LayerSettings] | None:
        """Return what sparing has to compute in this call, or None if the module's own code runs."""
        state = state_of(self)
        if state is None or state.settings is None or not self.computes(state.settings):
            return None
        if not torch.compiler.is_compiling():
            state.called = True
        return state, state.settings

    def attend(
        self,
        state: LayerState,
        settings: LayerSettings,
        hidden: Tensor,
        layers: tuple[nn.Linear, nn.Linear, nn.Linear],
        mask: Tensor | None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Run hidden [B, n, d] through the layers of queries, keys and values and the method; return [B, H, n, e]."""
        heads = int(self.num_attention_heads)  # type: ignore[arg-type]
        q, k = (split_heads(layer(hidden), heads) for layer in layers[:2])
        value: Tensor | Projection
        if settings.method.supports.projection:
            value = Projection(hidden, layers[2].weight, layers[2].bias).map(lambda t: t.to(q.dtype))
        else:
            value = split_heads(layers[2](hidden), heads)
        if settings.exact:  # only dropout is random then, and must differ from step to step
            settings = replace(settings, seed=None)
        given = MethodArguments(q, k, value, mask, dropout=dropout)
        batch = None if torch.compiler.is_compiling() else state.batch
        if batch is None or not batch.is_in(q):
            return run_method(state, settings, given)
        return run_batch(state, settings, given, batch)


class ConvolvingAttention(AdaptedAttention):
    """Any method, beside the module's depth-wise convolution of the values (Nystromformer, YOSO)."""

    def read_mask(self, state: LayerState, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask for the method, and which keys are not padding, [B, 1, 1, n]."""
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Run like the module's own `forward`, but hide padding from the convolution too; return no weights."""
        found = self.state_and_settings()
        if found is None:
            return super().forward(hidden_states, attention_mask, output_attentions)
        mask, keep = (None, None) if attention_mask is None else self.read_mask(found[0], attention_mask)
        layers: Any = (self.query, self.key, self.value)
        out, convolution = self.attend(*found, hidden_states, layers, mask), getattr(self, "conv", None)
        if convolution is not None:
            value = split_heads(layers[2](hidden_states), out.shape[1])
            out = out + convolution(value if keep is None else value.masked_fill(~keep.mT, 0.0))
        return outputs(join_heads(out), output_attentions)


def split_heads(projected: Tensor, heads: int) -> Tensor:
    """Return [B, n, H e] as [B, H, n, e]."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(out: Tensor) -> Tensor:
    """Return [B, H, n, e] as [B, n, H e]."""
    return out.transpose(1, 2).flatten(2)


def outputs(out: Tensor, output_attentions: bool) -> tuple[Tensor | None, ...]:
    """Return the output as such modules do, with None in the place of the weights."""
    return (out, None) if output_attentions else (out,)
