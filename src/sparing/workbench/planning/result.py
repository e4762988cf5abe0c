"""The result of a plan: a recipe, the reason, and the figures behind it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from sparing.from_json import build
from sparing.notebook import block, table
from sparing.store import add_checksum, verify_checksum, without_nan
from sparing.transformers.recipe import Recipe
from sparing.workbench.planning.promise import Promise
from sparing.workbench.planning.search import StepFigures
from sparing.workbench.timing import Interval

FORMAT = 1


def plain_percent(share: float) -> str:
    """Format a share without decimals that say nothing.

    >>> plain_percent(0.95), plain_percent(0.975), plain_percent(0.0001)
    ('95%', '97.5%', '0.01%')
    """
    if not math.isfinite(share):
        return str(share)
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


@dataclass(frozen=True)
class Candidate:
    """A method that was raced against exact attention."""

    method: str
    gain: (
        Interval | None
    )  #: of one attention call, or of a generated token; above 1 is better; None: it cannot run in this model
    used: bool  #: whether it gains enough to be tried in layers


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `sparing.plan`. An empty recipe leaves every layer exact, and `reason` says why."""

    recipe: Recipe
    reason: str  #: what to do, in one sentence
    model: str
    model_fingerprint: str
    kind: str
    data: str
    data_fingerprint: str
    documents: int
    tokens: int  #: of the longest
    truncated: int  #: documents that were longer than that
    skipped: int  #: documents without text, of one token, or repeated
    metric: str
    words: str  #: what the metric measures
    objective: str  #: "time" or "memory"
    promise: Promise
    machine: dict[str, Any]
    candidates: tuple[Candidate, ...]
    layers: dict[str, str]  #: what every attention layer runs
    damages: dict[str, dict[str, float]]  #: layer -> method -> mean change where that layer alone runs it
    steps: int  #: length of the path from exact attention to the fastest that each layer tolerates
    step: int  #: step of the path that the recipe is
    calibration: StepFigures | None  #: of the step that calibration documents chose
    checks: tuple[StepFigures, ...]  #: of the steps that were checked on held-out documents
    ceiling: Interval | None  #: gain of the model with what saves most in every layer
    gain: (
        Interval | None
    )  #: of the whole model, exact / recipe: above 1 is better; also of a recipe that was refused for it
    dtype: str = "float32"  #: of the model's weights
    notes: tuple[str, ...] = ()  #: about the documents

    @property
    def holds(self) -> bool:
        """Whether the recipe approximates a layer; held-out documents have confirmed it then."""
        return bool(self.recipe.layers)

    @property
    def held_out(self) -> StepFigures | None:
        """The figures of held-out documents for the recipe, or for the last step that was refused."""
        mine = [found for found in self.checks if found.step == self.step]
        return mine[0] if mine else self.checks[-1] if self.checks else None

    @property
    def generates(self) -> bool:
        """Whether it plans tokens that continue a prompt."""
        return self.kind == "language model" and self.recipe.when != "prefill"

    @property
    def promised(self) -> str:
        """What is promised of documents that were not seen, in words."""
        promise = self.promise
        sure = f"with {plain_percent(promise.confidence)} confidence at least {plain_percent(promise.coverage)} of"
        if self.metric == "needle":
            return f"{sure} the facts that exact attention finds in its context are kept"
        cases = "continuations like these" if self.generates else "documents like these"
        return f"{sure} {cases} change by {plain_percent(promise.tolerance)} at most ({self.words})"

    def __repr__(self) -> str:
        return f"<Plan for {self.model} on {self.data}: {self.reason}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: what to do, what is promised, and what each layer runs."""
        gain = (
            ()
            if self.gain is None
            else (f"Gain: {self.gain.median:.2f}x ({self.gain.low:.2f} to {self.gain.high:.2f}).",)
        )
        kept = (f"Promise: {self.promised}.",) if self.holds else ()
        return block(self.reason, *kept, *gain) + table(
            ["layer", "method"], [[layer, spec or ""] for layer, spec in self.recipe.layers.items()]
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a flat dictionary for each layer, as `pandas.DataFrame` takes them."""
        return [
            {"layer": layer, "method": spec, "damage": self.damages.get(layer, {}).get(spec, 0.0)}
            for layer, spec in self.layers.items()
        ]

    def to_json(self) -> str:
        """Return the plan as JSON; "recipe" holds a recipe for `sparing.approximate`."""
        held = {**asdict(self), "recipe": self.recipe.to_dict(), "holds": self.holds}
        return json.dumps(add_checksum(without_nan({"format": FORMAT, **held})), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Plan:
        """Read the parsed JSON of `to_json`; a ValueError names the part that is wrong."""
        held = verify_checksum(held)
        if held.pop("format", None) != FORMAT:
            raise ValueError(f"this format of a plan is not known; this sparing reads {FORMAT}")
        held.pop("holds", None)  # follows from the recipe
        if not isinstance(held.get("recipe"), dict):
            raise ValueError("a plan is a JSON object with 'recipe'")
        try:
            return build(cls, {**held, "recipe": Recipe.of(held["recipe"])})
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is not a plan as sparing writes it: {error}") from None


def about(plan: Plan) -> dict[str, Any]:
    """Return the `about` entry of a plan's recipe; figures of refused steps are in the reason alone."""
    held = asdict(plan.held_out) if plan.holds and plan.held_out is not None else None
    gain = plan.gain._asdict() if plan.holds and plan.gain is not None else None
    said = {"reason": plan.reason, **asdict(plan.promise), "metric": plan.metric, "objective": plan.objective}
    seen = {"documents": plan.documents, "length": plan.tokens, "seed": plan.recipe.seed, "machine": plan.machine}
    of = {name: getattr(plan, name) for name in ("model", "model_fingerprint", "data", "data_fingerprint")}
    found: dict[str, Any] = without_nan({**said, "held_out": held, "gain": gain, **of, **seen})
    return found
