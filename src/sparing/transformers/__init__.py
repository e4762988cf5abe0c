"""Hugging Face models: approximate their attention in place, and get the exact model back."""

from sparing.transformers.handle import Handle, approximate
from sparing.transformers.positions import extend_positions
from sparing.transformers.recipe import Recipe
from sparing.transformers.runtime.function import register

__all__ = ["Handle", "Recipe", "approximate", "extend_positions", "register"]
