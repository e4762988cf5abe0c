"""Methods swapped into models: how far each is from exact attention, by the keys that it may use."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from sparing.method import method
from sparing.studies.study import Rows, pick

WIDTHS = {"minilm": 32, "smollm2": 64}  #: of a head's values; 64 in all others


def family(spec: str) -> str:
    """The name before the settings."""
    return spec.partition("(")[0]


def budget(spec: str) -> int:
    """r, as the paper counts: keys, or those of a round, or features."""
    found: Any = method(spec)
    name = {"lsh": "chunk", "random_features": "features", "window": "size"}.get(found.name, "keys")
    return int(getattr(found, name)) * (2 if found.name == "lsh" else 1)


class Group:
    """The swaps into one model at one length: losses against exact attention, by method."""

    def __init__(self, rows: Rows) -> None:
        self.model, self.kind, self.length = rows[0]["model"], rows[0]["kind"], rows[0]["length"]
        self.rows = rows
        values: dict[str, list[float]] = {}
        for row in rows:
            values.setdefault(row["spec"], []).append(row["value"])
        self.values = {spec: sum(found) / len(found) for spec, found in values.items()}  # over seeds
        self.read = {row["spec"]: row["read"] for row in rows}
        self.width = WIDTHS.get(self.model, 64)

    @property
    def name(self) -> str:
        return f"{self.model} {self.length}"

    def loss(self, spec: str) -> float:
        """How far from exact: in the unit of the value, or in nats per token."""
        exact, found = self.values["exact"], self.values[spec]
        return math.log(found / exact) if self.kind == "language model" else found - exact

    def share(self, spec: str) -> float:
        """Of the way from exact attention to the single key of largest weight."""
        return self.loss(spec) / self.loss("top_keys(keys=1)")

    def curve(self, name: str) -> dict[int, float]:
        """The losses by r."""
        found = {budget(spec): self.loss(spec) for spec in self.values if family(spec) == name}
        return dict(sorted(found.items()))

    def both(self, first: str, second: str) -> list[tuple[int, float, float]]:
        """The losses of two methods, where both have them."""
        a, b = self.curve(first), self.curve(second)
        return [(r, a[r], b[r]) for r in a if r in b]

    def show(self, spec: str) -> str:
        found = self.values[spec]
        return f"{abs(found):.3f}" if self.kind == "encoder" else f"{found:.1f}"


def groups(rows: Rows) -> list[Group]:
    """In the order they were measured."""
    swaps = pick(rows, what="swap")
    names = dict.fromkeys((row["model"], row["length"]) for row in swaps)
    return [Group(pick(swaps, model=model, length=length)) for model, length in names]


def between(curve: dict[int, float], r: float) -> float | None:
    """A curve at r, straight between its points in the logarithms; None outside of them."""
    points = sorted(curve.items())
    for (left, low), (right, high) in pairwise(points):
        if left <= r <= right and min(low, high) > 0:
            part = math.log(r / left) / math.log(right / left)
            return math.exp((1 - part) * math.log(low) + part * math.log(high))
    return None
