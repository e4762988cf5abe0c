"""The reason for a plan in one sentence, for each way that a plan can end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sparing.workbench.planning.promise import Promise
from sparing.workbench.planning.result import Candidate, Plan
from sparing.workbench.planning.search import StepFigures
from sparing.workbench.timing import MARGIN, Interval

KEEP = "Keep exact attention: "
_LESS = {"time": "faster", "memory": "smaller in memory"}


_NEEDED = f"the lower quartile must exceed {MARGIN}x"
_OFFER = " keep=True (--keep) checks it on held-out documents and returns it all the same."


def how_much(gain: Interval, objective: str) -> str:
    """Return a gain in words, with its quartiles."""
    if objective == "time":
        return f"{gain.median:.2f}x as fast (quartiles {gain.low:.2f}x and {gain.high:.2f}x)"
    return f"{gain.median:.2f}x as small in memory (quartiles {gain.low:.2f}x and {gain.high:.2f}x)"


def no_candidate(candidates: Sequence[Candidate], tokens: int, objective: str) -> str:
    """Say that no attention call gains anything."""
    raced = [(one.gain.median, one.gain, one.method) for one in candidates if one.gain is not None]
    if not raced:
        return f"{KEEP}no candidate can run in this model."
    _, gain, best = max(raced)
    return (
        f"{KEEP}no candidate's attention is sure to be {_LESS[objective]} than exact attention at {tokens} tokens "
        f"here: the best, {best}, is {how_much(gain, objective)}; {_NEEDED}."
    )


def no_ceiling(ceiling: Interval, tokens: int, objective: str) -> str:
    """Say that attention is too small a part of the model."""
    return (
        f"{KEEP}even with what saves most in every layer the model is {how_much(ceiling, objective)} at {tokens} "
        f"tokens here; {_NEEDED}."
    )


def no_layer() -> str:
    """Say that no layer can run a candidate."""
    return f"{KEEP}no attention layer of the model can run a candidate."


def no_single(damages: Mapping[str, Mapping[str, float]], promise: Promise, words: str) -> str:
    """Say that a change of any single layer exceeds the tolerance."""
    found = [(damage, spec, layer) for layer, each in damages.items() for spec, damage in each.items()]
    known = [one for one in found if math.isfinite(one[0])]
    if not known:
        return no_layer()
    damage, spec, layer = min(known)
    return (
        f"{KEEP}a single layer is too much already for {promise.tolerance:.2%} ({words}): the mildest, {spec} in "
        f"{layer}, changes documents by {damage:.2%} on average."
    )


def no_step(first: StepFigures, promise: Promise, words: str) -> str:
    """Say that calibration documents allow no step."""
    return (
        f"{KEEP}no step leaves enough room within {promise.tolerance:.2%} ({words}): the first, in one layer, changes "
        f"{first.documents} calibration documents by {first.mean:.2%} on average, {first.worst:.2%} at worst."
    )


def no_gain(gain: Interval, objective: str) -> str:
    """Say that the recipe within the tolerance is not sure to gain anything end to end."""
    return (
        f"{KEEP}with what stays within the tolerance on the calibration documents the model is "
        f"{how_much(gain, objective)}; {_NEEDED}.{_OFFER}"
    )


def not_held(checks: Sequence[StepFigures], promise: Promise) -> str:
    """Say that held-out documents do not confirm what calibration documents allowed."""
    last = checks[-1]
    return (
        f"{KEEP}held-out documents do not show the promise: {last.violations} of {last.documents} are beyond "
        f"{promise.tolerance:.2%}, so that {last.most:.1%} of such documents may be, with confidence "
        f"{promise.confidence:g}."
    )


def no_token(candidates: Sequence[Candidate], context: int) -> str:
    """Say that no candidate makes a generated token faster."""
    raced = [(one.gain.median, one.gain, one.method) for one in candidates if one.gain is not None]
    if not raced:
        return f"{KEEP}no candidate can continue a cache of this model."
    _, gain, best = max(raced)
    return (
        f"{KEEP}no candidate's tokens are sure to be faster after {context} others here: the best, {best}, is "
        f"{how_much(gain, 'time')}; {_NEEDED}.{_OFFER}"
    )


def no_mild(last: StepFigures, metric: str) -> str:
    """Say that calibration cases allow no candidate."""
    if metric == "needle":
        return (
            f"{KEEP}no candidate keeps enough facts; the mildest loses {last.violations} of {last.documents} in "
            "calibration contexts."
        )
    return (
        f"{KEEP}no candidate leaves enough room within the tolerance; the mildest changes {last.documents} calibration "
        f"passages by {last.mean:.2%} on average, {last.worst:.2%} at worst."
    )


def token_not_held(seen: StepFigures, promise: Promise, metric: str) -> str:
    """Say that held-out cases do not confirm what calibration cases allowed."""
    if metric == "needle":
        return (
            f"{KEEP}held-out contexts do not show the promise: {seen.violations} of {seen.documents} facts are lost, "
            f"so that {seen.most:.1%} of all may be."
        )
    return not_held([seen], promise)


def token_success(plan: Plan) -> str:
    """Say what a recipe for generation does and gains."""
    held, gain = plan.held_out, plan.gain
    assert held is not None
    assert gain is not None
    kept = held.documents - held.violations
    if plan.metric == "needle":
        said = f"{kept} of {held.documents} facts in held-out contexts are kept (at least {1 - held.most:.0%})"
    else:
        said = f"{kept} of {held.documents} held-out passages stay within {plan.promise.tolerance:.2%} ({plan.words})"
    return (
        f"Approximate {len(plan.recipe.layers)} of {len(plan.layers)} attention layers with when={plan.recipe.when!r}: "
        f"{said}, and a token after {plan.tokens} others is {how_much(gain, plan.objective)}.{_doubt(gain)}"
    )


def _doubt(gain: Interval) -> str:
    return "" if gain.low > MARGIN else f" That is no gain for sure: {_NEEDED}."


def success(plan: Plan) -> str:
    """Say what the recipe does and gains."""
    held, gain = plan.held_out, plan.gain
    assert held is not None
    assert gain is not None
    within = held.documents - held.violations
    count = f"all {within}" if not held.violations else f"{within} of {held.documents}"
    return (
        f"Approximate {len(plan.recipe.layers)} of {len(plan.layers)} attention layers: {count} held-out documents "
        f"stay within {plan.promise.tolerance:.2%} ({plan.words}), and the model is {how_much(gain, plan.objective)}."
        f"{_doubt(gain)}"
    )
