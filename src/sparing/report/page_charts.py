"""What the charts of the page draw: numbers and names, without colours, for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparing.report.numbers import finite, short_names
from sparing.workbench.comparison.judgement import ORACLE
from sparing.workbench.comparison.summary import rounded
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.estimate import Estimate
from sparing.workbench.metrics import metrics_of
from sparing.workbench.timing import Interval


def charts(found: Comparison) -> dict[str, Any]:
    """Everything that page.js reads."""
    return {"trade": trade(found), "crossover": crossings(found), "heads": heads(found)}


def trade(found: Comparison) -> dict[str, Any]:
    """Change against speed of the model, both as [middle, low, high]; the speed of the exact model is 1.

    Rows without a finite change, or without a time, are not there; oracles, which have none, stand apart.
    """
    short = short_names([row.method for row in found.rows])
    signed = can_be_negative(found)
    points: list[dict[str, Any]] = []
    oracles: list[dict[str, Any]] = []
    for row in found.rows:
        change, speed = _change(row.change, signed), _speed(row)
        point: dict[str, Any] = {"method": row.method, "label": short[row.method], "verdict": row.verdict}
        point["change"] = change
        if change is not None and row.verdict == ORACLE:
            oracles.append(point)
        elif change is not None and speed is not None:
            points.append({**point, "speed": speed})
    speeds, changes = [point["speed"][0] for point in points], [abs(point["change"][0]) for point in points]
    on_front = front([1.0, *speeds], [0.0, *changes])[1:]
    for point, is_best in zip(points, on_front, strict=True):
        point["front"] = is_best
    return {
        "points": points,
        "oracles": oracles,
        "tolerance": found.tolerance,
        "metric": found.metric,
        "signed": signed,
    }


def front(speeds: Sequence[float], changes: Sequence[float]) -> list[bool]:
    """Return for each point whether nothing else is both as fast and as good: the Pareto front.

    >>> front([1.0, 2.0, 1.4, 1.2], [0.0, 0.2, 0.3, 0.1])
    [True, True, False, True]
    """
    both = list(zip(speeds, changes, strict=True))
    return [not any(a >= s and b <= c and (a, b) != (s, c) for a, b in both) for s, c in both]


def left_out(found: Comparison) -> list[str]:
    """Return the methods that the chart of change and speed cannot show."""
    shown = trade(found)
    drawn = {point["method"] for point in (*shown["points"], *shown["oracles"])}
    return [row.method for row in found.rows if row.method not in drawn]


def crossings(found: Comparison) -> dict[str, Any]:
    """Speed of the attention call over the length; lines have points [length, median, low, high]."""
    short = short_names([row.method for row in found.rows])
    lines = [
        {
            "method": row.method,
            "label": short[row.method],
            "family": row.method.partition("(")[0],
            "verdict": row.verdict,
            "from": pays,
            "points": points,
        }
        for row in found.rows
        for pays in [None if row.crossover is None else rounded(row.crossover)]
        if (points := [[each.length, *each.ratio] for each in row.points if _drawable(each.ratio)])
    ]
    return {"lines": lines, "tokens": found.tokens}  # fmt: skip


def heads(found: Comparison) -> list[dict[str, Any]]:
    """Return the pictures of each head, those of exact attention first."""
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    for each in found.maps:
        name = f"layer {each.number}, head {each.head}"
        group = groups.setdefault((each.number, each.head), {"name": name, "layer": each.layer, "maps": []})
        wrong = _error_of_head(found.rows, each.method, each.layer, each.head)
        group["maps"].append({"method": each.method, "side": each.side, "pixels": each.pixels, "error": wrong})
    for group in groups.values():
        group["maps"].sort(key=lambda picture: picture["method"] != "exact")
    return list(groups.values())


def can_be_negative(found: Comparison) -> bool:
    """Return whether a change below 0 exists in the metric of a comparison; a metric that is not known may have one."""
    return all(metric.signed or metric.words != found.metric for metric in metrics_of(found.kind).values())


def _change(value: Estimate | None, signed: bool) -> list[float | None] | None:
    """Return mean, low and high; an interval over documents may reach below 0 where no change can."""
    if value is None or finite(value.mean) is None:
        return None
    parts = (value.mean, finite(value.low), finite(value.high))
    return [part if part is None or signed else max(part, 0.0) for part in parts]


def _speed(row: Row) -> list[float] | None:
    """Return the time of the exact model / that with the method."""
    speed = None if row.time is None else row.time.model
    return None if speed is None or row.disturbed or not _drawable(speed) else list(speed)


def _drawable(speed: Interval) -> bool:
    """On a logarithmic axis."""
    return all(finite(part) is not None and part > 0 for part in speed)


def _error_of_head(rows: Sequence[Row], method: str, layer: str, head: int) -> float | None:
    for row in rows:
        for each in row.layers:
            if row.method == method and each.layer == layer and head < len(each.heads):
                return finite(each.heads[head])
    return None
