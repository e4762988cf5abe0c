"""A value layer that hands on its input instead of its output, to a method that samples the product itself."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from sparing.method import Projection, Unsupported
from sparing.transformers.slot import Slot


class Deferred(nn.Linear):
    """Stands in for a linear layer, with the same parameters under the same names.

    While its attention layer runs a method on the projection, it returns numbers that are not numbers and take no
    memory, and keeps its input for that method. Whatever else used its output would show at once.
    """

    def __init__(self, layer: nn.Linear, slot: Slot) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)
        self.original = (layer,)  # in a tuple: no part of the module tree
        self.slot = slot
        self.inputs: dict[int, Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        """The product, or its placeholder."""
        if not self.slot.projects or not self.slot.serving:
            return super().forward(input)
        self.inputs[_thread()] = input
        return input.new_full((), torch.nan).expand(*input.shape[:-1], self.out_features)

    def take(self, value: Tensor, like: Tensor) -> Projection:
        """The projection that the placeholder stood for."""
        input = self.inputs.pop(_thread(), None)
        if input is None or any(value.stride()):
            raise Unsupported(
                f"{self.slot.name}: the values were copied before the attention function saw them, as a cache does, "
                "but the layer's method projects them itself; pass use_cache=False"
            )
        return Projection(input, self.weight, self.bias).map(lambda t: t.to(like.dtype))

    def restored(self) -> nn.Linear:
        """The layer that it stands in for, with the parameters as they are now."""
        (layer,) = self.original
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)


def _thread() -> int:
    """Two threads may run one model; a traced graph belongs to one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
