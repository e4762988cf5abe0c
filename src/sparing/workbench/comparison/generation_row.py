"""What was measured of generation at one context, what follows from it, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparing.workbench.comparison.facts import FactCount
from sparing.workbench.comparison.headline import doubts, fastest
from sparing.workbench.comparison.judgement import (
    KEPT,
    SLOWER,
    UNKNOWN,
    UNSAFE,
    UNTIMED,
    is_faster,
    keeps,
    timed_verdict,
    within,
)
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval


@dataclass(frozen=True)
class GenerationTimes:
    """Medians over passages of seconds and bytes."""

    exact_cache: str  #: "dynamic" or "static": the cache of transformers with which exact attention is faster
    exact_token: float
    token: float
    token_speed: Interval  #: time of a token with exact attention / with the method
    exact_attention: float  #: part of a token's time, all layers
    attention: float
    exact_prompt: float
    prompt: float  #: with the index that the method builds
    exact_prompt_attention: float
    prompt_attention: float
    cache_bytes: int
    index_bytes: int
    disturbed: str = ""  #: by what, if the times say nothing

    @property
    def attention_speed(self) -> float:
        """Time of a token's attention, exact / with the method."""
        return self.exact_attention / self.attention if self.attention else math.nan


@dataclass(frozen=True)
class GenerationRow:
    """One method at one length of the context."""

    method: str
    when: str  #: "decode": the prompt is read exactly; "always": the method reads it, too
    context: int  #: tokens of the prompt and the continuation
    verdict: str
    reason: str = ""  #: what fails, or what cannot be told
    refused: str | None = None  #: why it cannot generate; nothing else is known then
    passages: int = 0
    tokens: int = 0  #: of all continuations
    exact_perplexity: float | None = None  #: of the continuations
    perplexity: float | None = None
    change: Estimate | None = None  #: of the perplexity (relative), over blocks of tokens
    differing: Estimate | None = None  #: share of tokens where another one is most likely, over blocks
    keys_read: float | None = None  #: by a token, on average
    facts: FactCount | None = None  #: None: the context is too short for any
    times: GenerationTimes | None = None
    points: tuple[RacePoint, ...] = ()  #: speed of a token over the context
    crossover: int | None = None  #: context from which on a token is faster; None: at none of `points`

    @property
    def speed(self) -> Interval | None:
        """Time of a token with exact attention / with the method."""
        return None if self.times is None else self.times.token_speed

    @property
    def disturbed(self) -> str:
        """By what its times were disturbed, so that they say nothing."""
        return "" if self.times is None else self.times.disturbed


def judge(
    change: Estimate,
    differing: Estimate,
    facts: FactCount | None,
    times: GenerationTimes | None,
    *,
    metric: str | None,
    tolerance: float,
) -> tuple[str, str]:
    """Return the verdict of a row, and what fails or cannot be told.

    metric: what decides, or None for both the perplexity and the facts.
    """
    text = {"agreement": within(differing, tolerance, "differing tokens")}
    text["perplexity"] = within(change, tolerance, "perplexity")
    text["needle"] = keeps(facts, 1 - tolerance if metric == "needle" else KEPT)
    found = [text[metric]] if metric is not None else [text["perplexity"], text["needle"]]
    for wanted, verdict in ((False, UNSAFE), (None, UNKNOWN)):
        if reasons := [why for holds, why in found if holds is wanted]:
            return verdict, "; ".join(reasons)
    return timed_verdict(
        times is not None and is_faster(times.token_speed, times.disturbed), "" if times is None else times.disturbed
    )


def generation_summary(rows: Sequence[GenerationRow]) -> str:
    """Return what to do when the model generates, in one or two sentences."""
    known = [row for row in rows if row.times is not None]
    if not known:
        return "Generation: keep exact attention, no method can continue a cache." if rows else ""
    longest = max(row.context for row in known)
    best = fastest(known)
    if best is not None:
        said = f"Generation after {best.context:,} tokens: turn on {best.method}. {_gain(best)}{_later(best)}"
        return (
            f"{said}{''.join(f' After {row.context:,}: {row.verdict}, {row.reason}.' for row in doubts(best, known))}"
        )
    there = [row for row in known if row.context == longest]
    untimed = [row for row in there if row.verdict == UNTIMED]
    if untimed:
        return (
            f"Generation after {longest:,} tokens: {untimed[0].method} is safe, but this machine is too busy to time "
            f"it: {untimed[0].disturbed}. Measure again when it is idle."
        )
    safe = [row for row in there if row.verdict == SLOWER]
    if safe:
        return (
            f"Generation after {longest:,} tokens: keep exact attention, nothing that is safe is faster here."
            f"{_later(safe[0])}"
        )
    open_ = [row for row in there if row.verdict == UNKNOWN]
    if open_ and not any(is_faster(row.speed, row.disturbed) or row.disturbed for row in open_):
        what = (
            "nothing that may be safe is faster"
            if any(is_faster(row.speed, row.disturbed) for row in there)
            else "nothing is faster"
        )
        return f"Generation after {longest:,} tokens: keep exact attention, {what} here.{_later(open_[0])}"
    if open_:
        best = max(open_, key=lambda row: row.times.token_speed.median)  # type: ignore[union-attr]
        gain = f"Nor was it timed: {best.disturbed}." if best.disturbed else _gain(best)
        return (
            f"Generation after {longest:,} tokens: these cases cannot tell whether {best.method} is safe "
            f"({best.reason}). {gain}"
        )
    mildest = min(there, key=lambda row: abs(row.change.mean) if row.change else math.inf)
    return (
        f"Generation after {longest:,} tokens: keep exact attention, no method is safe; the mildest, "
        f"{mildest.method}: {mildest.reason}."
    )


def _gain(row: GenerationRow) -> str:
    assert row.times is not None
    assert row.change is not None
    times, facts = row.times, row.facts
    kept = ""
    if facts is not None and facts.kept.solved:
        kept = (
            f", {facts.kept.kept} of the {facts.kept.solved} facts that exact attention finds are kept (at least "
            f"{facts.kept.low:.0%})"
        )
    return (
        f"A token takes {_milliseconds(times.token)} ms instead of {_milliseconds(times.exact_token)} "
        f"({times.token_speed.median:.2f}x as fast){kept}, and the perplexity changes by {row.change.mean:+.2%}."
    )


def _milliseconds(seconds: float) -> str:
    found = 1000 * seconds
    return f"{found:.0f}" if found >= 10 else f"{found:.2g}"


def _later(row: GenerationRow) -> str:
    if row.crossover is None or not row.points or row.crossover <= row.points[0].length:
        return ""
    return f" Tokens are faster from about {round(row.crossover, -2):,} tokens of context."
