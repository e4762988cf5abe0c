"""Adapters for modules that compute attention by their own code: one file for each family of models."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from sparing.transformers.families import Family
from sparing.transformers.runtime.adapters.base import AdaptedAttention
from sparing.transformers.state import LayerState


def set_class(module: nn.Module, state: LayerState, family: Family | None) -> None:
    """Set the class of the module: the adapted one if sparing computes any of its settings, else its own."""
    if family is None:
        return
    # A model's code is imported with its adapter, and only when one of its modules is approximated.
    adapted: type[AdaptedAttention] = getattr(import_module(f"{__name__}.{family.name}"), f"Adapted{family.attention}")
    module.__class__ = adapted if any(adapted.computes(settings) for settings in state.stack) else adapted.stock
