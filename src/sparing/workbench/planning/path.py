"""Order recipes from exact attention to the fastest that each layer tolerates, one change of a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

LayerSpecs = dict[str, str]  #: layer -> spec; a layer that is not named is exact


def path(
    damages: Mapping[str, Mapping[str, float]], savings: Mapping[str, float], limit: float = math.inf
) -> list[LayerSpecs]:
    """Return recipes, each of which changes one layer of the one before it; the first is empty.

    damages: layer -> spec -> change of the model's output if that layer alone runs it; NaN: it cannot.
    savings: spec -> what a call of it saves, above 0.
    limit: a candidate with more damage is left out, since it would be too much by itself.

    The next change is the one that adds the least damage for what it saves more. So each layer walks along the convex
    hull below its candidates, and no candidate above that is ever taken.

    >>> path({"a": {"window": 0.2, "nystrom": 0.3}, "b": {"window": 0.1}}, {"window": 1.0, "nystrom": 1.2})
    [{}, {'b': 'window'}, {'b': 'window', 'a': 'window'}, {'b': 'window', 'a': 'nystrom'}]
    """
    usable = {
        layer: {spec: damage for spec, damage in found.items() if math.isfinite(damage) and damage <= limit}
        for layer, found in damages.items()
    }
    steps: list[LayerSpecs] = [{}]
    while moves := [
        (price, -saved, layer, spec)
        for layer, found in usable.items()
        for spec, damage in found.items()
        if (saved := savings[spec] - _of(savings, steps[-1].get(layer))) > 0
        for price in [(damage - _of(found, steps[-1].get(layer))) / saved]
    ]:
        *_, layer, spec = min(moves)
        steps.append({**steps[-1], layer: spec})
    return steps


def _of(table: Mapping[str, float], spec: str | None) -> float:
    """Return an entry of the table, or 0 for exact attention."""
    return 0.0 if spec is None else table[spec]
