"""Make second derivatives raise an error for functions that have only first ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Wrap a backward pass so that its results raise where somebody differentiates them.

    torch's decorator of this name raises only where `backward()` walks all of the graph: `torch.autograd.grad` with
    given inputs finds no path to them and returns zero. So the results are made to depend on the saved tensors.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        causes = [*grads, *(t for t in ctx.saved_tensors if t is not None)]
        return tuple(None if g is None else _Refusal.apply(g, *causes) for g in found)

    return refusing


class _Refusal(torch.autograd.Function):
    """A gradient that depends on the tensors after it, in a way that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *causes: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        refuse()


def refuse(*_: Any) -> NoReturn:
    """Raise the error for a second derivative that does not exist."""
    raise RuntimeError(
        "a second derivative of attention was asked for, and this gradient is once_differentiable; a method that has "
        "a second derivative gives it with impl='reference'"
    )
