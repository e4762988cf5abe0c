"""Run the steps of a plan one after the other, as long as there is something to gain."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparing.contract import method as _method
from sparing.store import Store
from sparing.transformers.find import base_name, find
from sparing.transformers.recipe import Recipe
from sparing.workbench.planning import words
from sparing.workbench.planning.clock import is_gain
from sparing.workbench.planning.context import PlanContext, PlanGoal
from sparing.workbench.planning.damage import GROUPS, damages
from sparing.workbench.planning.path import LayerSpecs, path
from sparing.workbench.planning.promise import calibrating
from sparing.workbench.planning.result import Candidate, Plan, about
from sparing.workbench.planning.runs import RecipeRuns, packed
from sparing.workbench.planning.search import check, farthest, figures
from sparing.workbench.planning.timed import Timed
from sparing.workbench.prepare import Prepared, fingerprint

PROBES = 3  #: calibration documents that the damage of a method in a layer is measured on


class Planner:
    """Run the steps of `plan()`; `found` holds what is known so far, under the names of `Plan`'s fields."""

    def __init__(
        self,
        given: Prepared,
        goal: PlanGoal,
        store: Store,
        here: dict[str, Any],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.given, self.here, self.progress = given, here, progress
        self.promise, self.metric, self.objective, self.keep = goal.promise, goal.metric, goal.objective, goal.keep
        self.now, self.done, self.steps = "", 0, 1
        documents = [fingerprint([ids]) for ids in given.rows]
        count = calibrating(len(documents))
        self.calibration, self.held_out = documents[:count], documents[count:]
        model = given.subject.model
        self.places = {base_name(model, layer.name): layer for layer in find(model)}
        # Documents are prompts: tokens that continue a cache are not measured and stay exact.
        when = "prefill" if given.subject.kind == "language model" else "always"
        self.context = PlanContext(
            given=given,
            store=store,
            blank=Recipe({}, goal.seed, getattr(model.config, "model_type", None), when=when),
            of={
                "model": given.subject.fingerprint,
                "versions": [here["torch"], here["transformers"], here["sparing"]],
            },
            tell=self._tell,
        )
        self.timed = Timed(self.context, goal.objective, goal.rounds, here)
        self.found: dict[str, Any] = {
            "candidates": (), "damages": {}, "steps": 0, "step": 0, "calibration": None, "checks": (),
            "ceiling": None, "gain": None,
        }  # fmt: skip

    def plan(self, specs: Sequence[str], jobs: int) -> Plan:
        """Run the steps, cheap ones first; each may end the plan with exact attention."""
        tokens = len(self.given.typical)
        self.now = "attention calls"
        gains = self.timed.calls(specs)
        self.found["candidates"] = tuple(Candidate(spec, gain, is_gain(gain)) for spec, gain in gains.items())
        savings = {
            spec: 1 - 1 / gain.median
            for spec, gain in gains.items()
            if gain is not None and (is_gain(gain) or (self.keep and gain.median > 1))
        }
        if not savings:
            return self._exact(words.no_candidate(self.found["candidates"], tokens, self.objective))
        can = self._can(list(savings))
        if not can:
            return self._exact(words.no_layer())
        self._expect(can)
        self.now = "the model with what saves most"
        ceiling = self.timed.model({layer: max(able, key=savings.__getitem__) for layer, able in can.items()})
        self.found["ceiling"] = ceiling
        if not is_gain(ceiling) and not self.keep:
            return self._exact(words.no_ceiling(ceiling, tokens, self.objective))
        with packed(self.given, jobs) as where:
            runs = RecipeRuns(self.context, self.metric, where, jobs)
            self.now = "layers one by one"
            probes = self.calibration[:PROBES]
            self.found["damages"] = damages(can, savings, lambda asked: runs.changes(asked, probes))
            return self._search(runs, path(self.found["damages"], savings, self.promise.tolerance))

    def _can(self, specs: Sequence[str]) -> dict[str, list[str]]:
        """Return the methods that each layer can run, without layers that attend within a window by themselves."""
        found = {
            name: [spec for spec in specs if layer.refusal(_method(spec)) is None]
            for name, layer in self.places.items()
            if layer.window is None
        }
        return {name: able for name, able in found.items() if able}

    def _search(self, runs: RecipeRuns, steps: Sequence[LayerSpecs]) -> Plan:
        """Return the plan of the farthest step that keeps the promise, if that gains something."""
        last = len(steps) - 1
        if last == 0:
            return self._exact(words.no_single(self.found["damages"], self.promise, self.metric.words))

        def changes(documents: Sequence[str], what: str, step: int) -> list[float]:
            self.now = f"{what}: step {step} of {last}"
            return runs.changes([steps[step]], documents)[0]

        calibrate = functools.partial(changes, self.calibration, "calibration")
        step = farthest(last, calibrate, self.promise, len(self.held_out))
        shown = figures(max(step, 1), calibrate(max(step, 1)), self.promise)
        self.found |= {"steps": last, "calibration": shown}
        if not step:
            return self._exact(words.no_step(shown, self.promise, self.metric.words))
        if not self._gains(steps[step]) and not self.keep:  # before the check, which takes longer
            return self._exact(words.no_gain(self.found["gain"], self.objective))
        held, checks = check(step, functools.partial(changes, self.held_out, "held-out documents"), self.promise)
        self.found |= {"checks": checks, "step": held}
        if not held:
            return self._exact(words.not_held(checks, self.promise))
        if not self._gains(steps[held]) and not self.keep:
            return self._exact(words.no_gain(self.found["gain"], self.objective))
        return self._result("", steps[held])

    def _gains(self, layers: LayerSpecs) -> bool:
        self.now = "the model with the recipe"
        self.found["gain"] = self.timed.model(layers)
        return is_gain(self.found["gain"])

    def _expect(self, can: Mapping[str, Sequence[str]]) -> None:
        """Estimate the number of runs, for the progress bar."""
        options = sum(len(able) for able in can.values())
        together = -(-len(can) // GROUPS)
        probes = PROBES * (-(-options // together) + (len(can) if together > 1 else 0))
        bisection = math.ceil(math.log2(options + 1))
        self.steps = 4 + probes + (1 + bisection) * len(self.calibration) + 3 * len(self.held_out)

    def _tell(self) -> None:
        self.done += 1
        self.progress(self.now, self.done, max(self.done, self.steps))

    def _exact(self, reason: str) -> Plan:
        self.found["step"] = 0
        return self._result(reason, {})

    def _result(self, reason: str, layers: LayerSpecs) -> Plan:
        given, subject = self.given, self.given.subject
        chosen = {name: layers[name] for name in self.places if name in layers}
        found = Plan(
            recipe=replace(self.context.blank, layers=chosen), reason=reason, model=subject.name, kind=subject.kind,
            data=given.data, data_fingerprint=given.data_fingerprint, model_fingerprint=self.context.of["model"],
            documents=len(given.rows), tokens=given.tokens, truncated=given.longer, skipped=given.skipped,
            metric=self.metric.name, words=self.metric.words, objective=self.objective, promise=self.promise,
            machine=self.here, layers={name: chosen.get(name, "exact") for name in self.places},
            dtype=subject.dtype, notes=given.notes, **self.found,
        )  # fmt: skip
        found = found if chosen == {} else replace(found, reason=words.success(found))
        return replace(found, recipe=replace(found.recipe, about=about(found)))
