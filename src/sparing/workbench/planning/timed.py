"""Gains as cells: measured alone, and kept for this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparing.from_json import build
from sparing.store import Cell, Check, Store
from sparing.transformers.recipe import Recipe
from sparing.workbench.cells import measured
from sparing.workbench.planning import clock
from sparing.workbench.prepare import Prepared, fingerprint
from sparing.workbench.timing import Interval


class Timed:
    """What a document of median length gains."""

    def __init__(
        self,
        given: Prepared,
        objective: str,
        blank: Recipe,
        store: Store,
        rounds: int,
        *,
        of: Mapping[str, Any],
        tell: Callable[[], None],
    ) -> None:
        self.subject, self.ids, self.objective, self.blank = given.subject, given.typical, objective, blank
        self.store, self.rounds, self.tell = store, rounds, tell
        self.of = {**of, "document": fingerprint([self.ids]), "objective": objective}

    def calls(self, specs: Sequence[str]) -> dict[str, Interval | None]:
        """Of an attention call, by each method; None where it cannot run."""
        found = self._kept(
            {"what": "calls", **self.of, "methods": list(specs)},
            lambda: clock.call_gains(self.subject, self.ids, specs, self.objective),
            _check_calls,
        )
        return {spec: None if found[spec] is None else Interval(*found[spec]) for spec in specs}

    def model(self, layers: Mapping[str, str]) -> Interval:
        """Of the whole model, by a recipe with these layers."""
        recipe = replace(self.blank, layers=dict(layers))
        cell = {"what": "gain", **self.of, "layers": dict(layers), "seed": recipe.seed, "rounds": self.rounds}
        found = self._kept(
            cell, lambda: clock.model_gain(self.subject, self.ids, recipe, self.objective, self.rounds), _check_gain
        )
        return Interval(*found)

    def _kept(self, cell: Cell, measure: Callable[[], Any], check: Check) -> Any:
        (found,) = measured([cell], lambda cell: measure(), self.store, check=check)
        self.tell()
        return found


def _check_calls(cell: Cell, result: Any) -> None:
    if not isinstance(result, dict) or set(result) != set(cell["methods"]):
        raise ValueError("gains must be of the methods that were raced")
    for gain in result.values():
        if gain is not None:
            build(Interval, gain)


def _check_gain(cell: Cell, result: Any) -> None:
    build(Interval, result)
