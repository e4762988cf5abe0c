"""A value layer that hands on its input instead of its output, to a method that samples the product itself."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from sparing.contract import Projection, Unsupported
from sparing.transformers.slot import Slot


class Deferred(nn.Linear):
    """Stands in for a linear layer, with the same parameters under the same names.

    While its attention layer runs a method on the projection, it returns numbers that are not numbers and take no
    memory, and keeps its input for that method. Whatever else used its output would show at once. The first time it
    returns its product, to see that the attention layer splits it into heads as `Projection` does.
    """

    def __init__(self, layer: nn.Linear, slot: Slot) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)
        self.original = (layer,)  # in a tuple: no part of the module tree
        self.slot = slot
        self.proven = False  # the values arrive in the order that `Projection` has
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}  # input and output, by thread

    def forward(self, input: Tensor) -> Tensor:
        """The product, or its placeholder."""
        if not self.slot.projects or not self.slot.serving:
            return super().forward(input)
        if self.proven or torch.compiler.is_compiling():
            output = input.new_full((), torch.nan).expand(*input.shape[:-1], self.out_features)
        else:
            with torch.no_grad():  # so that a pass that is run again for its gradient looks the same
                output = super().forward(input)
        self.waiting[_thread()] = input, output
        return output

    def take(self, value: Tensor, like: Tensor) -> Projection:
        """The projection that the placeholder stood for."""
        input, output = self.waiting.pop(_thread(), (None, None))
        if input is None or output is None or not self._is_view(value, output):
            raise Unsupported(
                f"{self.slot.name}: the values were copied before the attention function saw them, as a cache does, "
                "but the layer's method projects them itself; pass use_cache=False"
            )
        found = Projection(input, self.weight, self.bias).map(lambda t: t.to(like.dtype))
        if not self.proven and not torch.compiler.is_compiling():
            with torch.no_grad():
                expected = found.project(value.shape[1]).to(value.dtype)
            size = 0.05 * float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
            if expected.shape != value.shape or not torch.allclose(expected, value, 0.05, size, equal_nan=True):
                raise Unsupported(f"{self.slot.name}: the model splits its values into heads in a way of its own")
            self.proven = True
        return found

    def _is_view(self, value: Tensor, output: Tensor) -> bool:
        if not any(output.stride()):
            return not any(value.stride())
        return value.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()

    def restored(self) -> nn.Linear:
        """The layer that it stands in for, with the parameters as they are now."""
        (layer,) = self.original
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)


def _thread() -> int:
    """Two threads may run one model; a traced graph belongs to one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
