"""Gradients of gradients: kernels have none."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from sparing.native.library import schemas


def once_differentiable(op: str) -> None:
    """Let a backward op refuse to be differentiated; without a rule, torch would only warn and go on with zeros."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(
            f"{op} is a gradient, and once_differentiable: kernels have no second derivatives; use impl='reference'"
        )

    torch.library.register_autograd(f"sparing::{op}", refuse, lib=schemas)
