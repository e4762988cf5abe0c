"""The error of a method in one layer, split as `sparing compare` splits it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import sparing
from sparing.transformers.watch import ObservedCall
from sparing.workbench.comparison.quality import ErrorObserver, LayerError


@torch.no_grad()
def layer_error(spec: str, seen: ObservedCall, *, seeds: Sequence[int] = (0,)) -> LayerError:
    """Return the errors of a method on one call, means over the seeds of a stochastic method."""
    method = sparing.method(spec)
    observer = ErrorObserver(method)
    for seed in seeds if method.supports.stochastic else seeds[:1]:
        observer(seen._replace(call={**seen.call, "seed": seed}))
    (found,) = observer.layers()
    return found
