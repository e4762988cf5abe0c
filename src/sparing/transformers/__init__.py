"""Hugging Face models: approximate their attention in place, and get the exact model back."""

from sparing.transformers.handle import Handle, approximate
from sparing.transformers.hook import register
from sparing.transformers.positions import extend_positions
from sparing.transformers.recipe import Recipe

__all__ = ["Handle", "Recipe", "approximate", "extend_positions", "register"]
