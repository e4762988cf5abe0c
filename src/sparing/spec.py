"""The grammar of spec strings: a Python call with literal keyword values, parsed and never evaluated."""

from __future__ import annotations

import ast
from typing import Any


def split_specs(text: str) -> list[str]:
    """The specs of a comma-separated list; commas inside parentheses belong to a spec."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`"yoso(hashes=32)"` -> ("yoso", {"hashes": 32}). Literals only; a bare word is a string; nothing is evaluated."""
    wrong = ValueError(
        f"method: cannot read the spec {spec!r}; write a name, or a name with keyword values such as "
        "'yoso(hashes=32, normalize=l2)'"
    )
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError):
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
        except (ValueError, TypeError):
            raise wrong from None
    return tree.func.id, settings
