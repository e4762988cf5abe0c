"""Handle methods that compute the value layer's product themselves, from its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparing.contract import Projection
from sparing.transformers.find import LinearStandIn
from sparing.transformers.runtime import refusals
from sparing.transformers.runtime.call import ModelCall
from sparing.transformers.runtime.exact import exact
from sparing.transformers.runtime.method import run_call
from sparing.transformers.state import LayerState

_INPUT = "sparing_input"


def projection(call: ModelCall) -> Tensor:
    """Run a method on the projection of the values; exact attention for tokens that continue a cache."""
    assert call.settings is not None
    return exact(call) if call.continues or call.settings.when == "decode" else run_call(call)


def read_projection(module: nn.Module, state: LayerState, value: Tensor, like: Tensor) -> Projection:
    """Return the input, weight and bias of the layer's values."""
    layer = getattr(module, state.value_name or "", None)
    if not isinstance(layer, UnprojectedLinear):
        raise refusals.replaced_value_layer(state)
    return layer.read(value, like)


class UnprojectedLinear(LinearStandIn):
    """Stands in for a linear layer of values, with the same parameters under the same names.

    While its attention layer runs a method on the projection, it returns a placeholder of NaN that takes no memory, so
    that any other use of its output is noticed. The storage of the placeholder carries the layer's input to `read`,
    through any view and in any thread. The first call returns the product itself, to check that the attention layer
    splits it into heads as `Projection` does.
    """

    def __init__(self, layer: nn.Linear, state: LayerState) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)
        self.original = (layer,)  # in a tuple, so that it is not a submodule
        self.state = state
        self.checked = False  # the attention layer splits the values into heads as `Projection` does
        self.traced: Tensor | None = None  # the input while torch.compile traces: traced tensors have no storage

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, or its placeholder."""
        if not self.state.projects or not self.state.active:
            return super().forward(input)
        tracing = torch.compiler.is_compiling()
        if self.checked or tracing:
            output = input.new_full((), torch.nan).expand(*input.shape[:-1], self.out_features)
        else:
            with torch.no_grad():  # so that gradient checkpointing, which runs the pass again, saves the same tensors
                output = super().forward(input)
        if tracing:
            self.traced = input
        else:
            setattr(output.untyped_storage(), _INPUT, input)
        return output

    def read(self, value: Tensor, like: Tensor) -> Projection:
        """Return the projection of which `value`, a view of the placeholder, is the result."""
        tracing = torch.compiler.is_compiling()
        if tracing:
            input, self.traced = (None if any(value.stride()) else self.traced), None
        else:
            input = getattr(value.untyped_storage(), _INPUT, None)
        if input is None:
            raise refusals.copied_values(self.state)
        found = Projection(input, self.weight, self.bias).map(lambda t: t.to(like.dtype))
        if not self.checked and not tracing:
            with torch.no_grad():
                expected = found.project(value.shape[1]).to(value.dtype)
            size = 0.05 * float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
            if expected.shape != value.shape or not torch.allclose(expected, value, 0.05, size, equal_nan=True):
                raise refusals.other_heads(self.state)
            self.checked = True
        return found

    def restored(self) -> nn.Linear:
        """Return the original layer, with the parameters as they are now."""
        (layer,) = self.original
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)
