"""How much each method harms in each layer alone, from few runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from sparing.workbench.planning.path import LayerSpecs

GROUPS = 12  #: of neighbouring layers, in deeper models

Probe = Callable[[Sequence[LayerSpecs]], Sequence[Sequence[float]]]  #: of some recipes, what happens to each document


def damages(
    can: Mapping[str, Sequence[str]], savings: Mapping[str, float], probe: Probe
) -> dict[str, dict[str, float]]:
    """layer -> method -> mean change at the end of the model; NaN: it cannot run there after all.

    can: layer -> methods that it can run. Up to `GROUPS` layers are probed one by one. Of more, neighbours are probed
    together for each method, and one by one for the method that saves most, which tells how they share others' harm.
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
    """Neighbours together, in at most so many groups of one size.

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
