"""Longformer: its own windowed and global weights, over value projections that are sampled by Monte Carlo."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from sparing.contract import Projection
from sparing.draws import Draws
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.transformers.families import LONGFORMER
from sparing.transformers.runtime.adapters.base import AdaptedAttention
from sparing.transformers.runtime.refusals import check_dropout
from sparing.transformers.state import LayerSettings

_VALUES = ("value", "value_global")


class AdaptedLongformerSelfAttention(AdaptedAttention, LongformerSelfAttention):
    """Runs the module's own code twice: once for the weights, and once with values that were sampled for them.

    Rows of global tokens use `value_global`, all others `value`; each has its own sample counts. N counts all valid
    tokens, as everywhere, and not those in the window. The scores are computed twice, so this saves no time: it shows
    what sampling does to the model, and how many samples it takes.
    """

    family = LONGFORMER
    stock = LongformerSelfAttention

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sample counts depend on the data
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run like the module's own `forward`."""
        found = self.state_and_settings()
        given = (hidden_states, attention_mask, is_index_masked, is_index_global_attn, is_global_attn)
        if found is None:
            return super().forward(*given, output_attentions)
        assert is_index_masked is not None
        state, settings = found
        settings.tally.calls += 1
        check_dropout(state, settings, self.dropout if self.training else 0.0)
        nothing = hidden_states.new_zeros(1, 1, 1).expand(*hidden_states.transpose(0, 1).shape)
        with torch.no_grad():
            _, *weights = self._with_values(dict.fromkeys(_VALUES, nothing), *given, output_attentions=True)
        received = [received_locally(weights[0], is_index_global_attn if is_global_attn else None)]
        pairs = [weights[0].numel()]
        if is_global_attn:
            assert is_index_global_attn is not None
            received.append(received_from_global(weights[1], is_index_global_attn))
            pairs.append(weights[1].numel())
        flops = [float(count) * (4 * self.head_dim + 1) for count in pairs]  # scores, exponentials, weighted values
        values = self._sample(settings, hidden_states, received, ~is_index_masked, flops)
        return self._with_values(values, *given, output_attentions)

    def _with_values(self, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Run the module's own code on a shallow copy whose value layers return these values."""
        module = copy.copy(self)
        layers: Any = {name: _Returns(output) for name, output in values.items()}
        module._modules = {**self._modules, **layers}
        return LongformerSelfAttention.forward(module, *args, **kwargs)

    def _sample(
        self, settings: LayerSettings, hidden: Tensor, received: list[Tensor], keep: Tensor, flops: list[float]
    ) -> dict[str, Tensor]:
        """Return the sampled values [n, B, H e] of each value layer, by its name.

        hidden: [B, n, d]. keep: [B, n]. received: M (B, H, n) for each value layer. flops: those of the attention over
        the values of each.
        """
        assert isinstance(settings.method, MonteCarlo)
        heads = received[0].shape[1]
        seed = int(torch.randint(2**63 - 1, ())) if settings.seed is None else settings.seed & (2**64 - 1)
        streams = torch.tensor(settings.streams(2 * heads), device=hidden.device).unflatten(0, (2, heads))
        valid = keep[:, None].expand_as(received[0])
        flops, found = list(flops), {}
        for name, largest, stream in zip(_VALUES, received, streams, strict=False):
            layer: Any = self._modules[name]
            with torch.autocast(hidden.device.type, enabled=False):
                wide = Projection(hidden.masked_fill(~keep.unsqueeze(-1), 0.0), layer.weight, layer.bias).map(_wide)
                values, counts = settings.method.values(wide, largest, valid, Draws(seed, stream))
            found[name] = values.permute(2, 0, 1, 3).flatten(2).to(hidden.dtype)
            settings.tally.add_values(
                counts, keep, hidden.shape[-1], values.shape[-1], flops.pop(0), for_global=name != _VALUES[0]
            )
        return found


def received_locally(weights: Tensor, is_global: Tensor | None) -> Tensor:
    """Return M (B, H, n), the largest weight that a token without global attention gives to each key.

    weights: [B, n, H, globals + 2w + 1] as the module returns them: those of the keys with global attention, in their
        order, then those of the keys i - w, ..., i + w. Rows of padding and of global tokens are zero.
    is_global: [B, n]; None if no token has global attention.
    """
    n = weights.shape[1]
    most = 0 if is_global is None else int(is_global.sum(-1).max())
    window = weights[..., most:]
    reach = window.shape[-1] // 2
    queries = nn.functional.pad(window, (0, 0, 0, 0, reach, reach))  # in column c, query j - c + w sees key j
    received = queries[:, 2 * reach : 2 * reach + n, :, 0]
    for c in range(1, 2 * reach + 1):
        received = torch.maximum(received, queries[:, 2 * reach - c : 2 * reach - c + n, :, c])
    received = received.transpose(1, 2).contiguous()
    if is_global is not None:
        item, key = is_global.nonzero(as_tuple=True)
        column = (is_global.long().cumsum(-1) - 1)[item, key]
        received[item, :, key] = torch.maximum(received[item, :, key], weights[item, :, :, column].amax(1))
    return _known(received)


def received_from_global(weights: Tensor, is_global: Tensor) -> Tensor:
    """Return M (B, H, n), the largest weight that a token with global attention gives to each key.

    weights: [B, H, globals, n]; items with fewer such tokens than others have rows at the end that mean nothing.
    """
    rows = torch.arange(weights.shape[2], device=weights.device) < is_global.sum(-1, keepdim=True)
    return _known(weights.masked_fill(~rows[:, None, :, None], 0.0).amax(2))


def _known(received: Tensor) -> Tensor:
    """Return M with 1 for NaN weights: the values of such keys are projected exactly, as in the model's own code."""
    return received.nan_to_num(nan=1.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _Returns:
    """Stands in for a linear layer whose output is known."""

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def __call__(self, input: Tensor) -> Tensor:
        return self.output.to(input.dtype)
