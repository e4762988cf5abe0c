"""Approximate the attention of Hugging Face models in place, and restore the exact model."""

from sparing.transformers.handle import Handle, approximate, restore
from sparing.transformers.positions import extend_positions
from sparing.transformers.recipe import Recipe
from sparing.transformers.runtime.function import register

__all__ = ["Handle", "Recipe", "approximate", "extend_positions", "register", "restore"]
