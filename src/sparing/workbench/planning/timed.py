"""Measure gains in cells, one at a time, and keep them for this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparing.from_json import build
from sparing.store import Cell, Check
from sparing.workbench.cells import measured
from sparing.workbench.planning import clock
from sparing.workbench.planning.context import PlanContext
from sparing.workbench.prepare import fingerprint
from sparing.workbench.timing import Interval


class Timed:
    """Measure what a document of median length gains on this machine."""

    def __init__(self, context: PlanContext, objective: str, rounds: int, machine: Mapping[str, Any]) -> None:
        self.context, self.objective, self.rounds = context, objective, rounds
        self.subject, self.ids = context.given.subject, context.given.typical
        self.of = {**context.of, "machine": machine, "document": fingerprint([self.ids]), "objective": objective}

    def calls(self, specs: Sequence[str]) -> dict[str, Interval | None]:
        """Return the gain of an attention call by each method; None where it cannot run."""
        found = self._kept(
            {"what": "calls", **self.of, "methods": list(specs)},
            lambda: clock.call_gains(self.subject, self.ids, specs, self.objective),
            _check_calls,
        )
        return {spec: None if found[spec] is None else Interval(*found[spec]) for spec in specs}

    def model(self, layers: Mapping[str, str]) -> Interval:
        """Return the gain of the whole model by a recipe with these layers."""
        recipe = replace(self.context.blank, layers=dict(layers))
        cell = {"what": "gain", **self.of, "layers": dict(layers), "seed": recipe.seed, "rounds": self.rounds}
        found = self._kept(
            cell, lambda: clock.model_gain(self.subject, self.ids, recipe, self.objective, self.rounds), _check_gain
        )
        return Interval(*found)

    def _kept(self, cell: Cell, measure: Callable[[], Any], check: Check) -> Any:
        (found,) = measured([cell], lambda cell: measure(), self.context.store, check=check)
        self.context.tell()
        return found


def _check_calls(cell: Cell, result: Any) -> None:
    if not isinstance(result, dict) or set(result) != set(cell["methods"]):
        raise ValueError("gains must be of the methods that were raced")
    for gain in result.values():
        if gain is not None:
            build(Interval, gain)


def _check_gain(cell: Cell, result: Any) -> None:
    build(Interval, result)
