"""The grammar of spec strings: a Python call with literal keyword values, parsed and never evaluated."""

from __future__ import annotations

import ast
import warnings
from typing import Any

LONGEST = 1000  #: most characters of a spec. No method needs more than 200, and Python's parser recurses


def shown(value: Any) -> str:
    """Return the repr of a value for an error message, cut off where it is long.

    >>> shown(10**5000), shown("a" * 100)
    ('an integer of 16610 bits', "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...")
    """
    if isinstance(value, int) and value.bit_length() > 1000:  # Python limits the digits that it writes
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def split_specs(text: str) -> list[str]:
    """Return the specs of a comma-separated list; commas inside parentheses belong to a spec."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse `"yoso(hashes=32)"` into ("yoso", {"hashes": 32}). Literals only; a bare word is a string."""
    wrong = ValueError(
        f"method: cannot read the spec {shown(spec)}; write a name, or a name with keyword values such as "
        "'yoso(hashes=32, normalize=l2)'"
    )
    if len(spec) > LONGEST:
        raise ValueError(f"method: the spec {shown(spec)} has {len(spec)} characters; at most {LONGEST} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning, for text that looks like a mistake in a program
            tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # deep nesting raises either of the last two
        raise wrong from None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        raise wrong
    settings: dict[str, Any] = {}
    for pair in tree.keywords:
        if pair.arg is None or pair.arg in settings:
            raise wrong
        try:
            settings[pair.arg] = pair.value.id if isinstance(pair.value, ast.Name) else ast.literal_eval(pair.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise wrong from None
    return tree.func.id, settings
