"""Monte-Carlo attention in Longformer: its own windowed and global weights, over sampled value projections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from sparing.contract import Method, Projection
from sparing.draws import Draws
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.transformers.own import Served
from sparing.transformers.serve import refuse_dropout
from sparing.transformers.slot import Choice, Slot

_VALUES = ("value", "value_global")
_NOBODY: tuple[None, dict[str, Tensor]] = (None, {})
_instead = threading.local()  #: what the value layers of the module that runs in this thread return


class ServedLongformer(Served, LongformerSelfAttention):
    """A first pass of the module's own code gives the weights, a second one uses the values that were sampled for them.

    The rows of global tokens use `value_global`, all others `value`; each has its own counts. N counts the valid
    tokens, as everywhere, and not those in the window. The scores are computed twice: this shows what sampling does to
    the model and how many samples it takes, and saves no time.
    """

    stock = LongformerSelfAttention

    @classmethod
    def refusal(cls, module: nn.Module, method: Method) -> str | None:
        """Only methods that leave the weights alone fit."""
        if not isinstance(method, MonteCarlo):
            return f"{cls.stock.__name__} attends within a window by its own code; only monte_carlo can work beside it"
        odd = [name for name in _VALUES if type(module._modules.get(name)) is not nn.Linear]
        return f"{method.name} needs linear layers of the values, and {odd[0]} is none" if odd else None

    def __getattr__(self, name: str) -> Any:
        """The module's children; for its own code, what stands in for its value layers."""
        running, values = getattr(_instead, "now", _NOBODY)
        return _Returns(values[name]) if running is self and name in values else super().__getattr__(name)

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
        """As the module's own."""
        served, own = self.served(), super().forward
        given = (hidden_states, attention_mask, is_index_masked, is_index_global_attn, is_global_attn)
        if served is None:
            return own(*given, output_attentions)
        assert is_index_masked is not None
        served[1].tally.calls += 1
        refuse_dropout(*served, self.dropout if self.training else 0.0)
        nothing = hidden_states.new_zeros(1, 1, 1).expand(*hidden_states.transpose(0, 1).shape)
        with torch.no_grad(), _standing_in(self, dict.fromkeys(_VALUES, nothing)):
            _, *weights = own(*given, output_attentions=True)
        received = [received_locally(weights[0], is_index_global_attn if is_global_attn else None)]
        pairs = [weights[0].numel()]
        if is_global_attn:
            assert is_index_global_attn is not None
            received.append(received_from_global(weights[1], is_index_global_attn))
            pairs.append(weights[1].numel())
        flops = [float(count) * (4 * self.head_dim + 1) for count in pairs]  # scores, exponentials, weighted values
        with _standing_in(self, self._sampled(served, hidden_states, received, ~is_index_masked, flops)):
            return own(*given, output_attentions)

    def _sampled(
        self, served: tuple[Slot, Choice], hidden: Tensor, received: list[Tensor], keep: Tensor, flops: list[float]
    ) -> dict[str, Tensor]:
        """The values [n, B, H e] by their layers' names; hidden [B, n, d], keep [B, n], and of each layer M (B, H, n)
        and the FLOPs of the attention over its values."""
        _, choice = served
        assert isinstance(choice.method, MonteCarlo)
        heads = received[0].shape[1]
        seed = int(torch.randint(2**63 - 1, ())) if choice.seed is None else choice.seed & (2**64 - 1)
        streams = torch.tensor(choice.streams(2 * heads), device=hidden.device).unflatten(0, (2, heads))
        valid = keep[:, None].expand_as(received[0])
        flops, found = list(flops), {}
        for name, largest, stream in zip(_VALUES, received, streams, strict=False):
            layer: Any = self._modules[name]
            with torch.autocast(hidden.device.type, enabled=False):
                wide = Projection(hidden.masked_fill(~keep.unsqueeze(-1), 0.0), layer.weight, layer.bias).map(_wide)
                values, counts = choice.method.values(wide, largest, valid, Draws(seed, stream))
            found[name] = values.permute(2, 0, 1, 3).flatten(2).to(hidden.dtype)
            choice.tally.add_values(
                counts, keep, hidden.shape[-1], values.shape[-1], flops.pop(0), for_global=name != _VALUES[0]
            )
        return found


def received_locally(weights: Tensor, is_global: Tensor | None) -> Tensor:
    """M (B, H, n): the largest weight that a token without global attention gives to each key.

    weights: [B, n, H, globals + 2w + 1] as the module returns them: those of the keys with global attention, in their
        order, then those of the keys i - w, ..., i + w. Rows of padding and of global tokens are zero.
    is_global: [B, n]; None where no token has global attention.
    """
    n = weights.shape[1]
    most = 0 if is_global is None else int(is_global.sum(-1).max())
    window = weights[..., most:]
    reach = window.shape[-1] // 2
    queries = nn.functional.pad(window, (0, 0, 0, 0, reach, reach))  # of column c, query j - c + w sees key j
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
    """M (B, H, n): the largest weight that a token with global attention gives to each key.

    weights: [B, H, globals, n]; items with fewer such tokens than others have rows at the end that mean nothing.
    """
    rows = torch.arange(weights.shape[2], device=weights.device) < is_global.sum(-1, keepdim=True)
    return _known(weights.masked_fill(~rows[:, None, :, None], 0.0).amax(2))


def _known(received: Tensor) -> Tensor:
    """Keys that get weights which are not numbers are projected exactly, as the stock model would."""
    return received.nan_to_num(nan=1.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _Returns:
    """A layer whose output is known."""

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def __call__(self, input: Tensor) -> Tensor:
        return self.output.to(input.dtype)


@contextmanager
def _standing_in(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Within, the module's value layers return these in this thread."""
    _instead.now = (module, values)
    try:
        yield
    finally:
        del _instead.now
