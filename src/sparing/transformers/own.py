"""Models that compute their attention by themselves: their modules, with the attention handed to sparing.

While such a module is approximated it has another class, derived from its own. It stays the same object in the same
place: names, parameters, hooks, training flag, device and copies need no care, and its own class gives back the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.yoso.modeling_yoso import YosoSelfAttention

from sparing.contract import Method, Projection, Unsupported
from sparing.methods.yoso.method import Yoso
from sparing.transformers.masks import biased, hidden
from sparing.transformers.serve import serve
from sparing.transformers.slot import Choice, Slot, slot_of


class Served(nn.Module):
    """What an attention module becomes while its slot holds choices that sparing computes."""

    stock: ClassVar[type[nn.Module]]  #: the class that it takes over from
    target: ClassVar[str] = "softmax"  #: the attention that such models are trained with
    biased: ClassVar[bool] = False  #: it adds a position bias to the scores
    takes_exact: ClassVar[bool] = False  #: "exact" is what it computes, so that sparing's exact attention can do it

    @classmethod
    def serves(cls, choice: Choice) -> bool:
        """Whether sparing computes this choice; what it does not is left to the module's own code."""
        return cls.takes_exact or not choice.exact

    @classmethod
    def refusal(cls, module: nn.Module, method: Method) -> str | None:
        """Why such a module cannot run the method, beyond what is said of any layer."""
        return None

    @classmethod
    def settings(cls, module: nn.Module, name: str) -> Method | None:
        """The method of that name as the module itself would run it; None where it has no settings for it."""
        return None

    def served(self) -> tuple[Slot, Choice] | None:
        """What sparing has to compute in this call, if anything."""
        slot = slot_of(self)
        if slot is None or slot.choice is None or not self.serves(slot.choice):
            return None
        if not torch.compiler.is_compiling():
            slot.served = True
        return slot, slot.choice

    def attend(
        self,
        served: tuple[Slot, Choice],
        hidden: Tensor,
        layers: tuple[nn.Linear, nn.Linear, nn.Linear],
        mask: Tensor | None,
        dropout: float = 0.0,
    ) -> Tensor:
        """hidden [B, n, d] through the layers of queries, keys and values -> [B, H, n, e]."""
        (slot, choice), heads = served, int(self.num_attention_heads)  # type: ignore[arg-type]
        q, k = (_split(layer(hidden), heads) for layer in layers[:2])
        value: Tensor | Projection
        if choice.method.supports.projection:
            value = Projection(hidden, layers[2].weight, layers[2].bias).map(lambda t: t.to(q.dtype))
        else:
            value = _split(layers[2](hidden), heads)
        if choice.exact:  # only dropout is random then, and must differ from step to step
            choice = replace(choice, seed=None)
        return serve(slot, choice, q, k, value, mask, is_causal=False, scale=None, dropout=dropout)

    def with_convolution(self, out: Tensor, hidden: Tensor, layer: nn.Linear, keep: Tensor | None) -> Tensor:
        """Adds the module's depth-wise convolution of the values, which must not see padding; keep is [B, 1, n, 1]."""
        convolution = getattr(self, "conv", None)
        if convolution is None:
            return out
        value = _split(layer(hidden), out.shape[1])
        return out + convolution(value if keep is None else value.masked_fill(~keep, 0.0))


class ServedMPNet(Served, MPNetSelfAttention):
    """Softmax attention with a position bias; sparing computes it even where it is exact, without all of n^2."""

    stock = MPNetSelfAttention
    biased = True
    takes_exact = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        """As the module's own; there are no weights to return."""
        served = self.served()
        if served is None:
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **others)
        for name, argument in others.items():
            if argument is not None and argument is not False:
                raise Unsupported(f"{served[0].name}: the model passes {name}, which sparing does not know")
        mask = attention_mask if position_bias is None else biased(position_bias, attention_mask)
        dropout = self.dropout.p if self.training else 0.0
        out = self.attend(served, hidden_states, (self.q, self.k, self.v), mask, dropout)
        return _returned(self.o(_joined(out)), output_attentions)


class ServedYoso(Served, YosoSelfAttention):
    """YOSO's own attention on any machine, with its padding mask; or any other method in its place."""

    stock = YosoSelfAttention
    target = "angular"

    @classmethod
    def settings(cls, module: nn.Module, name: str) -> Method | None:
        """A bare "yoso" is what the model's config asks for."""
        given: Any = module
        if name != "yoso":
            return None
        if given.use_expectation:
            return Yoso(expectation=True, bits=given.hash_code_len)
        family: Any = "hadamard" if given.use_fast_hash else "gaussian"
        return Yoso(hashes=given.num_hash, bits=given.hash_code_len, hash=family)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor | None, ...]:
        """As the module's own, but padding is hidden; attention_mask is [B, n], 0 for padding. No weights."""
        served = self.served()
        if served is None:
            return super().forward(hidden_states, attention_mask, output_attentions)
        if attention_mask is not None and attention_mask.ndim != 2:
            raise Unsupported(f"{served[0].name}: attention_mask is {list(attention_mask.shape)}; YOSO takes [B, n]")
        keep = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
        out = self.attend(served, hidden_states, (self.query, self.key, self.value), keep)
        out = self.with_convolution(out, hidden_states, self.value, None if keep is None else keep.mT)
        return _returned(_joined(out), output_attentions)


class ServedNystromformer(Served, NystromformerSelfAttention):
    """Any method in the place of the model's landmarks."""

    stock = NystromformerSelfAttention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor | None, ...]:
        """As the module's own, but the convolution sees no padding; attention_mask is additive. No weights."""
        served = self.served()
        if served is None:
            return super().forward(hidden_states, attention_mask, output_attentions)
        keep = None if attention_mask is None else (~hidden(attention_mask)).any(-2, keepdim=True).any(1, keepdim=True)
        out = self.attend(served, hidden_states, (self.query, self.key, self.value), attention_mask)
        out = self.with_convolution(out, hidden_states, self.value, None if keep is None else keep.mT)
        return _returned(_joined(out), output_attentions)


def _split(projected: Tensor, heads: int) -> Tensor:
    """[B, n, H e] -> [B, H, n, e]."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(out: Tensor) -> Tensor:
    """[B, H, n, e] -> [B, n, H e]."""
    return out.transpose(1, 2).flatten(2)


def _returned(out: Tensor, output_attentions: bool) -> tuple[Tensor | None, ...]:
    return (out, None) if output_attentions else (out,)
