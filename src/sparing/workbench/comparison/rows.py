"""Make the rows of a comparison of what was measured, and judge them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparing.contract import method as _method
from sparing.workbench.comparison.facts import FactCount
from sparing.workbench.comparison.judgement import (
    KEPT,
    ORACLE,
    REFUSED,
    UNKNOWN,
    UNSAFE,
    is_faster,
    keeps,
    timed_verdict,
    within,
)
from sparing.workbench.comparison.quality import LayerError
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.comparison.seconds import Seconds
from sparing.workbench.comparison.verdict import PARTS, SPEEDS, Row
from sparing.workbench.crossover import crossover
from sparing.workbench.estimate import Estimate, estimate
from sparing.workbench.metrics import End, Metric, scores
from sparing.workbench.timing import MARGIN, Interval

_ROUNDING = 1e-6  # an error of attention that is rounding in float32
_NOT_MEANS = (  # of documents
    "change", "label", "class", "exact_class", "classes", "neighbour", "exact_neighbour", "neighbour_label",
    "exact_neighbour_label",
)  # fmt: skip


def row_of(
    spec: str,
    parts: Sequence[dict[str, Any]],
    time: dict[str, Any],
    kind: str,
    tolerance: float,
    metric: Metric,
    labels: Sequence[float] | None = None,
    points: tuple[RacePoint, ...] = (),
) -> Row:
    """Make a row of what was measured: a `Quality` of each seed, and `Seconds`, as dictionaries."""
    if (refused := next((part["refused"] for part in parts if "refused" in part), None)) is not None:
        return Row(spec, REFUSED, refused)
    by_seed = [labelled(part["ends"], labels) for part in parts]
    errors = [_mean(seeds) for seeds in zip(*(part["errors"] for part in parts), strict=True)]
    layers = tuple(_layer(same) for same in zip(*(part["layers"] for part in parts), strict=True))
    end = _ends(kind, by_seed)
    taken = _seconds(time)
    # An oracle runs on few documents, which may not be enough to have a neighbour.
    change = metric.change(by_seed) if all(map(metric.fits, by_seed)) else None
    if change is not None and max(errors) <= _ROUNDING:  # identical outputs
        change = Estimate(0.0, 0.0, 0.0, change.count)  # of any document, however few were measured
    said, reason = verdict(spec, change, taken, tolerance)
    substitution, approximation = (
        _mean([getattr(layer, part) for layer in layers]) if layers else None for part in PARTS
    )
    return Row(
        spec, said, change=change, error=estimate(errors), substitution=substitution,
        approximation=approximation, layers=layers, end=end, keys_read=parts[0]["keys_read"], reason=reason,
        flops_reduction=_inverse(_mean([part["flops"] for part in parts])), time=taken, points=points,
        crossover=crossover([(each.length, each.ratio.median) for each in points], margin=MARGIN).tokens,
    )  # fmt: skip


def labelled(ends: Sequence[End], labels: Sequence[float] | None) -> list[End]:
    """Add to each document its label and, if that is a class, the label of its nearest document."""
    if labels is None:
        return list(ends)
    found = [{**end, "label": label} for end, label in zip(ends, labels, strict=False)]
    for end in found:
        for which in ("exact_", ""):
            if f"{which}neighbour" in end and "score" not in end:  # labels of pairs say how similar they are
                end[f"{which}neighbour_label"] = labels[int(end[f"{which}neighbour"])]
    return found


def _ends(kind: str, by_seed: Sequence[list[End]]) -> End:
    """Return means over documents and seeds, and scores against the labels."""
    ends = [end for some in by_seed for end in some]
    found = {name: _mean([end[name] for end in ends]) for name in ends[0] if name not in _NOT_MEANS}
    if "neighbour" in ends[0]:
        found["neighbours"] = _mean([float(end["exact_neighbour"] == end["neighbour"]) for end in ends])
    against = [scores(kind, some) for some in by_seed]
    return found | {name: _mean([one[name] for one in against]) for name in against[0]}


def verdict(spec: str, change: Estimate | None, time: Seconds, tolerance: float) -> tuple[str, str]:
    """Judge a row, and say what cannot be told. Faster: the whole model is, in three rounds of four."""
    if _method(spec).oracle:
        return ORACLE, ""
    if change is None:
        return UNKNOWN, "no document shows a change"
    holds, reason = within(change, tolerance, "change", "document")
    if holds is not True:
        return (UNSAFE, "") if holds is False else (UNKNOWN, reason)
    return timed_verdict(is_faster(time.model, time.disturbed), time.disturbed)


def with_facts(row: Row, facts: FactCount | None, tolerance: float | None) -> Row:
    """Return a row of a language model with what its prompts keep of facts, and the verdict that follows.

    tolerance: share of the facts that may be lost, if facts alone decide; None: they are needed beside the change.
    """
    holds, reason = keeps(facts, KEPT if tolerance is None else 1 - tolerance)
    change = row.change
    if tolerance is not None and facts is not None:
        change = facts.lost
        word, said = timed_verdict(is_faster(row.speed, row.disturbed), row.disturbed)
        row = replace(row, verdict=word, reason=said)
    if holds is not True:
        row = replace(row, verdict=UNKNOWN if holds is None else UNSAFE, reason=reason)
    return replace(row, change=change, facts=facts)


def _layer(same: Sequence[dict[str, Any]]) -> LayerError:
    bars = [each["bar"] for each in same if each["bar"] is not None]
    numbers = {name: _mean([each[name] for each in same]) for name in (*PARTS, "total")}
    heads = tuple(_mean(head) for head in zip(*(each["heads"] for each in same), strict=True))
    return LayerError(same[0]["layer"], **numbers, heads=heads, bar=_mean(bars) if bars else None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _inverse(share: float) -> float:
    return 1 / share if share else math.inf


def _seconds(held: dict[str, Any]) -> Seconds:
    ratios = {name: None if held[name] is None else Interval(*held[name]) for name in SPEEDS}
    return Seconds(**{**held, **ratios})
