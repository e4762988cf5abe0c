"""What all adapted attention modules share.

While such a module is approximated it has another class, derived from its own. It stays the same object in the same
place: names, parameters, hooks, training flag, device and copies need no care, and its own class gives back the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparing.contract import Projection
from sparing.transformers.families import Family
from sparing.transformers.runtime.method import run_method
from sparing.transformers.state import LayerSettings, LayerState, state_of


class AdaptedAttention(nn.Module):
    """The class of an attention module while it has settings that sparing computes."""

    family: ClassVar[Family]
    stock: ClassVar[type[nn.Module]]  #: the module's own class

    @classmethod
    def computes(cls, settings: LayerSettings) -> bool:
        """Return whether sparing computes these settings; what it does not is left to the module's own code."""
        return cls.family.takes_exact or not settings.exact

    def present(self) -> tuple[LayerState, LayerSettings] | None:
        """Return what sparing has to compute in this call, or None if nothing."""
        state = state_of(self)
        if state is None or state.settings is None or not self.computes(state.settings):
            return None
        if not torch.compiler.is_compiling():
            state.called = True
        return state, state.settings

    def attend(
        self,
        present: tuple[LayerState, LayerSettings],
        hidden: Tensor,
        layers: tuple[nn.Linear, nn.Linear, nn.Linear],
        mask: Tensor | None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Run hidden [B, n, d] through the layers of queries, keys and values and the method; [B, H, n, e]."""
        (state, settings), heads = present, int(self.num_attention_heads)  # type: ignore[arg-type]
        q, k = (split_heads(layer(hidden), heads) for layer in layers[:2])
        value: Tensor | Projection
        if settings.method.supports.projection:
            value = Projection(hidden, layers[2].weight, layers[2].bias).map(lambda t: t.to(q.dtype))
        else:
            value = split_heads(layers[2](hidden), heads)
        if settings.exact:  # only dropout is random then, and must differ from step to step
            settings = replace(settings, seed=None)
        return run_method(state, settings, q, k, value, mask, dropout=dropout)

    def attend_and_convolve(
        self,
        present: tuple[LayerState, LayerSettings],
        hidden: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        output_attentions: bool,
    ) -> tuple[Tensor | None, ...]:
        """Run the method and the module's depth-wise convolution of the values, which must not see padding.

        keep: [B, 1, 1, n] boolean, False for padding. There are no weights to return.
        """
        layers: Any = (self.query, self.key, self.value)
        out, convolution = self.attend(present, hidden, layers, mask), getattr(self, "conv", None)
        if convolution is not None:
            value = split_heads(layers[2](hidden), out.shape[1])
            out = out + convolution(value if keep is None else value.masked_fill(~keep.mT, 0.0))
        return outputs(join_heads(out), output_attentions)


def split_heads(projected: Tensor, heads: int) -> Tensor:
    """[B, n, H e] -> [B, H, n, e]."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(out: Tensor) -> Tensor:
    """[B, H, n, e] -> [B, n, H e]."""
    return out.transpose(1, 2).flatten(2)


def outputs(out: Tensor, output_attentions: bool) -> tuple[Tensor | None, ...]:
    """Return what such modules return; there are no weights."""
    return (out, None) if output_attentions else (out,)
