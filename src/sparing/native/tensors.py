"""Tensors in the form that kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WritableState:
    """An object whose tensors are written to in place, whichever of torch's modes a caller is in.

    It makes them outside inference mode, whose tensors cannot be written to anywhere else. Those that arrive otherwise,
    in a copy or a pickle that was made in inference mode, are replaced once, here.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        with torch.inference_mode(False):
            vars(self).update({name: _writable(x) for name, x in state.items()})


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows; copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _writable(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x
