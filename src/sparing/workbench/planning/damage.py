"""Estimate the damage of each method in each layer alone, from few runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from sparing.workbench.planning.path import LayerSpecs

GROUPS = 12  #: the most groups of neighbouring layers

Probe = Callable[
    [Sequence[LayerSpecs]], Sequence[Sequence[float]]
]  #: recipes -> the change of each document under each


def damages(
    can: Mapping[str, Sequence[str]], savings: Mapping[str, float], probe: Probe
) -> dict[str, dict[str, float]]:
    """Return layer -> method -> mean change of the model's output; NaN where the method cannot run.

    can: layer -> methods that it can run. Up to `GROUPS` layers are probed one by one. In deeper models, neighbouring
    layers are probed together for each method, and one by one for the method that saves most; the latter decides how
    the layers of a group share the damage of the other methods.
    """
    ask: list[LayerSpecs] = []
    parts = groups(list(can), GROUPS)
    specs = sorted({spec for able in can.values() for spec in able}, key=lambda spec: (-savings[spec], spec))
    for part in parts:
        ask += [members for spec in specs if (members := {name: spec for name in part if spec in can[name]})]
        ask += [{name: _strongest(can[name], savings)} for name in part if len(part) > 1]
    asked = {_key(layers): layers for layers in ask}
    found = {key: _mean(changes) for key, changes in zip(asked, probe(list(asked.values())), strict=True)}
    result: dict[str, dict[str, float]] = {name: {} for name in can}
    for part in parts:
        alone = {name: found.get(_key({name: _strongest(can[name], savings)}), math.nan) for name in part}
        for spec in specs:
            members = {name: spec for name in part if spec in can[name]}
            whole = sum(alone[name] for name in members)
            for name in members:
                share = alone[name] / whole if len(members) > 1 and whole > 0 else 1 / len(members)
                result[name][spec] = found[_key(members)] * share
    return result


def groups(layers: list[str], most: int) -> list[list[str]]:
    """Group neighbours into at most so many groups of equal size.

    >>> groups(["a", "b", "c", "d", "e"], 3)
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    size = -(-len(layers) // most)
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _strongest(able: Sequence[str], savings: Mapping[str, float]) -> str:
    return max(able, key=lambda spec: (savings[spec], spec))


def _key(layers: LayerSpecs) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(layers.items()))


def _mean(changes: Sequence[float]) -> float:
    return sum(changes) / len(changes)
