"""The numbers that the papers print, a file for each paper.

Keys say what a number stands for: method, task, length, quantity. Notes on how a number was read stand under "note".
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def numbers(paper: str, table: str) -> Any:
    """Return a table of a paper; keys that are whole numbers are of type int."""
    text = resources.files(__package__).joinpath(f"{paper}.json").read_text("utf-8")
    return json.loads(text, object_pairs_hook=_with_numbers)[table]


def _with_numbers(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in pairs}
