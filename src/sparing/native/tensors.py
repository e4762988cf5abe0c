"""Bring tensors to the form that kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WritableState:
    """Base of objects that write to their tensors in place, in inference mode or outside.

    Tensors made in inference mode cannot be written to outside it, so subclasses make theirs outside. Copies and
    pickles that were made in inference mode hold such tensors; they are replaced here.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        with torch.inference_mode(False):
            vars(self).update({name: writable(x) for name, x in state.items()})


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows; copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def wide_type(x: Tensor) -> torch.dtype:
    """Return the type that kernels compute in for x: float32 for 16 bits, else its own."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return a tensor of 16 bits in float32, and any other as it is."""
    return x.to(wide_type(x))


def writable(x: Any) -> Any:
    """Return a tensor, or a tuple of them, that may be written to outside inference mode; anything else as it is."""
    if isinstance(x, tuple):
        return type(x)(map(writable, x))
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x
