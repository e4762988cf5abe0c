"""Plan generation: the fastest method for all layers whose promise holds, on passages or on facts of the context.

Candidates are tried from the fastest to the slowest on calibration cases. The first that is likely to keep the promise
is checked once, on held-out cases that the search has not seen: other passages, or contexts from other seeds.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from sparing.contract import Unsupported
from sparing.documents import Documents
from sparing.models import Subject
from sparing.store import Cell, Store
from sparing.transformers.find import base_name, find
from sparing.transformers.handle import approximate
from sparing.transformers.recipe import Recipe
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.comparison.facts import FactCount, FactRuns, contexts_of
from sparing.workbench.comparison.generation import TOKENS, passages
from sparing.workbench.comparison.tokens import Prompt, read_prompt, run_continuation, token_speed
from sparing.workbench.planning import words
from sparing.workbench.planning.clock import is_gain, refuse_busy
from sparing.workbench.planning.promise import Promise, calibrating
from sparing.workbench.planning.result import Candidate, Plan, about
from sparing.workbench.planning.search import StepFigures, figures
from sparing.workbench.prepare import fingerprint
from sparing.workbench.timing import Interval, threads

FACT_CONTEXTS = 30  #: contexts with facts, by default; a third of them calibrates
FACT_CONFIDENCE = 0.975  #: of the lower end of an interval of 95 %
_HELD_OUT = 10_000  # first seed of held-out contexts
_WORDS = {
    "perplexity": "change of the perplexity of a continuation", "agreement": "share of next tokens that differ",
    "needle": "facts of the context that are lost",
}  # fmt: skip


GENERATION_METRICS = tuple(_WORDS)  #: the default first


class Cases(Protocol):
    """What a promise is about: passages, or contexts with facts."""

    count: int

    def calibrate(self, spec: str) -> StepFigures | None:
        """Return the figures of calibration cases if they make the promise likely to hold, else None."""

    def check(self, spec: str) -> tuple[bool, StepFigures]:
        """Return whether held-out cases show the promise, and their figures."""


class PassageCases:
    """Passages: each is a document that changes by so much."""

    def __init__(self, planner: GenerationPlanner, rows: Sequence[Tensor]) -> None:
        self.planner, self.count = planner, len(rows)
        self.calibration, self.held_out = rows[: calibrating(len(rows))], rows[calibrating(len(rows)) :]
        self.last: StepFigures | None = None

    def calibrate(self, spec: str) -> StepFigures | None:
        """Return the figures of calibration passages if they make the promise likely to hold, else None."""
        promise = self.planner.promise
        changes = [self._change(ids, spec) for ids in self.calibration]
        self.last = figures(0, changes, promise)
        return self.last if promise.likely(changes, len(self.held_out)) else None

    def check(self, spec: str) -> tuple[bool, StepFigures]:
        """Return whether held-out passages show the promise, and their figures."""
        changes = [self._change(ids, spec) for ids in self.held_out]
        return self.planner.promise.kept(changes), figures(0, changes, self.planner.promise)

    def _change(self, ids: Tensor, spec: str) -> float:
        planner = self.planner
        tokens = min(TOKENS, len(ids) // 2)
        cell = {
            **planner.of, "what": "continuation", "passage": fingerprint([ids]), "tokens": tokens, "method": spec,
            "when": planner.when, "seed": planner.seed,
        }  # fmt: skip
        work = functools.partial(planner.continuation, ids)
        (part,) = measured([cell], work, planner.store, check=_check, done=lambda cell, again: planner.tell())
        if is_refusal(part):
            return math.nan
        if planner.metric == "agreement":
            return 1 - statistics.fmean(part["same"])
        difference = statistics.fmean(part["losses"]) - statistics.fmean(part["exact_losses"])
        return math.expm1(difference) if difference < 700 else math.inf


class FactCases:
    """Facts in made-up contexts: the share of those that exact attention finds which must be kept is the coverage."""

    def __init__(self, planner: GenerationPlanner, length: int, count: int) -> None:
        self.planner, few = planner, calibrating(count)
        runs = FactRuns(planner.subject, planner.store, planner.here, lambda text: planner.tell())
        self.runs = runs
        self.calibration = contexts_of(planner.subject, length, few)
        self.held_out = contexts_of(planner.subject, length, count - few, first=_HELD_OUT)
        self.count = len(self.calibration) + len(self.held_out)
        self.last: StepFigures | None = None
        if not self.calibration or not self.held_out:
            raise ValueError(f"metric='needle': no task fits into context={length} tokens; use a longer context")

    def calibrate(self, spec: str) -> StepFigures | None:
        """Return the figures of calibration contexts if they make the promise likely to hold, else None."""
        found = self._count(self.calibration, spec)
        self.last = self._figures(found)
        # Half of the room is left: held-out facts must show the coverage by the lower end of an interval.
        return self.last if found.kept.solved and found.kept.share >= (1 + self.planner.promise.coverage) / 2 else None

    def check(self, spec: str) -> tuple[bool, StepFigures]:
        """Return whether held-out facts show the promise, and their figures."""
        found = self._count(self.held_out, spec)
        return found.kept.low >= self.planner.promise.coverage, self._figures(found)

    def _count(self, contexts: Sequence[Any], spec: str) -> FactCount:
        found = self.runs.count(contexts, [(spec, self.planner.when)])[spec, self.planner.when]
        if isinstance(found, str):
            raise Unsupported(found)
        return found

    def _figures(self, found: FactCount) -> StepFigures:
        kept = found.kept
        lost = 1 - kept.share if kept.solved else math.nan
        return StepFigures(0, kept.solved, kept.solved - kept.kept, 1 - kept.low, lost, lost)


class GenerationPlanner:
    """Find the fastest method that keeps a promise about generated tokens."""

    def __init__(
        self, subject: Subject, data: Documents, promise: Promise, store: Store, here: dict[str, Any], *,
        metric: str, when: str, seed: int, keep: bool, progress: Callable[[str, int, int], None],
    ) -> None:  # fmt: skip
        self.subject, self.data, self.promise, self.store, self.here = subject, data, promise, store, here
        self.metric, self.when, self.seed, self.keep, self.progress = metric, when, seed, keep, progress
        self.of: dict[str, Any] = {
            "model": subject.fingerprint, "versions": [here["torch"], here["transformers"], here["sparing"]],
        }  # fmt: skip
        self.now, self.done, self.steps = "", 0, 1

    def plan(self, specs: Sequence[str], context: int, count: int | None, most: int) -> Plan:
        """Return the plan. count: of passages or contexts with facts; None: `most` passages, or `FACT_CONTEXTS`."""
        texts = list(dict.fromkeys(self.data.texts))
        random.Random(self.seed).shuffle(texts)
        wanted = 1 if self.metric == "needle" else count or most
        rows = passages(self.subject, texts, context, wanted, name="context")
        cases: PassageCases | FactCases
        if self.metric == "needle":
            cases = FactCases(self, context, FACT_CONTEXTS if count is None else count)
        else:
            self.promise.refuse_few(len(rows))
            cases = PassageCases(self, rows)
        self.steps = len(specs) + 2 * cases.count
        self.now = "tokens"
        gains = {spec: self._gain(rows[0], spec) for spec in specs}
        candidates = tuple(Candidate(spec, gain, is_gain(gain)) for spec, gain in gains.items())
        known = {spec: gain for spec, gain in gains.items() if gain is not None}
        useful = [spec for spec, gain in known.items() if self.keep or is_gain(gain)]
        useful.sort(key=lambda spec: known[spec].median)
        found: dict[str, Any] = {
            "candidates": candidates, "damages": {}, "steps": len(useful), "step": 0, "calibration": None,
            "checks": (), "ceiling": known[useful[-1]] if useful else None, "gain": None,
        }  # fmt: skip
        if not useful:
            return self._result(words.no_token(candidates, context), {}, found, cases, context)
        for step in range(len(useful), 0, -1):
            spec = useful[step - 1]
            self.now = f"calibration: {spec}"
            likely = cases.calibrate(spec)
            assert cases.last is not None
            found |= {"calibration": replace(cases.last, step=step), "gain": known[spec]}
            if likely is None:
                continue
            self.now = f"held-out cases: {spec}"
            holds, seen = cases.check(spec)
            found["checks"] = (replace(seen, step=step),)
            if not holds:
                return self._result(words.token_not_held(seen, self.promise, self.metric), {}, found, cases, context)
            with approximate(self.subject.model, spec, seed=self.seed, when=self.when) as handle:
                layers = {name: each for name, each in handle.recipe.layers.items() if each is not None}
            return self._result("", layers, {**found, "step": step}, cases, context)
        return self._result(words.no_mild(found["calibration"], self.metric), {}, found, cases, context)

    def _gain(self, ids: Tensor, spec: str) -> Interval | None:
        cell = {**self.of, "what": "token gain", "machine": self.here, "passage": fingerprint([ids]), "method": spec}
        (part,) = measured([cell], functools.partial(self._time, ids), self.store, done=lambda cell, again: self.tell())
        return None if is_refusal(part) else Interval(*part)

    def _time(self, ids: Tensor, cell: Cell) -> Any:
        with threads(self.here["threads"]):
            try:
                prompt = read_prompt(self.subject.model, ids, min(TOKENS, len(ids) // 2))
                found = token_speed(self.subject.model, prompt, cell["method"], prompt.length)
            except Unsupported as error:
                return {"refused": str(error)}
        refuse_busy(found.disturbed)
        return found.ratio

    def continuation(self, ids: Tensor, cell: Cell) -> dict[str, Any]:
        """Run the continuation of a passage: losses, exact and with the method, and where both agree."""
        with threads(self.here["threads"]):
            prompt: Prompt = read_prompt(self.subject.model, ids, cell["tokens"], exact_cache="dynamic")
            try:
                found = run_continuation(
                    self.subject.model, prompt, cell["method"], when=cell["when"], seed=cell["seed"]
                )
            except Unsupported as error:
                return {"refused": str(error)}
        return {"exact_losses": list(prompt.losses), "losses": list(found.losses), "same": list(found.same)}

    def tell(self) -> None:
        """Report one more finished measurement."""
        self.done += 1
        self.progress(self.now, self.done, max(self.done, self.steps))

    def _result(self, reason: str, layers: dict[str, str], found: dict[str, Any], cases: Cases, context: int) -> Plan:
        model = self.subject.model
        places = [base_name(model, layer.name) for layer in find(model)]
        blank = Recipe(layers, self.seed, getattr(model.config, "model_type", None), when=self.when)
        made = Plan(
            recipe=blank, reason=reason, model=self.subject.name, kind=self.subject.kind, data=self.data.name,
            data_fingerprint=self.data.fingerprint, model_fingerprint=self.of["model"], documents=cases.count,
            tokens=context, truncated=0, skipped=0, metric=self.metric, words=_WORDS[self.metric], objective="time",
            promise=self.promise, machine=self.here, layers={name: blank.spec_of(name) or "exact" for name in places},
            dtype=self.subject.dtype, **found,
        )  # fmt: skip
        made = made if not layers else replace(made, reason=words.token_success(made))
        return replace(made, recipe=replace(made.recipe, about=about(made)))


def _check(cell: Cell, result: Any) -> None:
    if is_refusal(result):
        return
    names = ("exact_losses", "losses", "same")
    if not isinstance(result, dict) or any(len(result.get(name, ())) != cell["tokens"] for name in names):
        raise ValueError(f"a continuation has {cell['tokens']} losses")
