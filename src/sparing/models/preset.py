"""What the presets load."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A model of transformers with its tokenizer."""

    model: Any
    tokenizer: Any
