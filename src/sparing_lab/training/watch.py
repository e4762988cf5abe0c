"""The first module or parameter of a model that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing_lab.training.objectives import Inputs, losses


class Stopped(RuntimeError):
    """Training cannot continue; the message names the step and the module or parameter."""


def first_non_finite(model: nn.Module, parts: Sequence[Inputs], reseed: Callable[[], None]) -> str:
    """Run a step again and return the first output or gradient in it that is not finite, in words.

    reseed: called before each run, so that the same random numbers are drawn.
    """
    reseed()
    for part in parts:
        name = _first_output(model, lambda part=part: model(**part.arguments))
        if name is not None:
            return f"the output of {name}"
    model.zero_grad()
    reseed()
    for part in parts:  # gradients are computed again: clipping by a norm that is not finite has spoilt them all
        found = losses(model, part)
        (found.loss if found.order is None else found.loss + found.order).backward()
    return f"the gradient of {_first_gradient(model) or 'some parameter in another process'}"


def _first_output(model: nn.Module, run: Any) -> str | None:
    """Return the name of the innermost module whose output is the first that is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            if not found and not all(map(_finite, _tensors(out))):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _first_gradient(model: nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient is not finite."""
    return next((name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)), None)


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [each for each in out if isinstance(each, Tensor)] if isinstance(out, tuple | list) else []


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
