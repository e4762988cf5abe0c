"""Where a run went wrong: the first part of a model whose numbers are no numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Stopped(RuntimeError):
    """Training cannot go on; the message names the step and the part of the model."""


def first_bad_output(model: nn.Module, run: Any) -> str | None:
    """The name of the innermost part whose output is the first to be infinite or NaN, in another run."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            if not found and not all(map(_finite, _tensors(out))):
                found.append(name)

        return hook

    handles = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_bad_gradient(model: nn.Module) -> str | None:
    """The name of the first parameter whose gradient is infinite or NaN."""
    return next((name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)), None)


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [each for each in out if isinstance(each, Tensor)] if isinstance(out, tuple | list) else []


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
