"""Modules with attention of their own, adapted to sparing: one file for each family of models."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from sparing.transformers.families import Family
from sparing.transformers.runtime.adapters.base import AdaptedAttention
from sparing.transformers.state import LayerState


def set_class(module: nn.Module, state: LayerState, family: Family | None) -> None:
    """Give the module the class that its settings need: its own, if sparing computes none of them."""
    if family is None:
        return
    # The code of a model is an optional dependency: it is imported with its adapter.
    adapted: type[AdaptedAttention] = getattr(import_module(f"{__name__}.{family.name}"), f"Adapted{family.attention}")
    module.__class__ = adapted if any(adapted.computes(settings) for settings in state.stack) else adapted.stock
