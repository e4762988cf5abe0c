"""The length from which a method is faster than exact attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple


class Crossover(NamedTuple):
    """The length from which a method stays faster, as far as that was measured."""

    kind: Literal["at", "below", "none", "unknown"]
    length: float  #: "at": that length; "below": the shortest measured; "none": the longest measured

    def __str__(self) -> str:
        if self.kind == "unknown":
            return "not measured"
        words = {"at": "", "below": "below ", "none": "none up to "}[self.kind]
        return f"{words}{self.length:.0f}"

    @property
    def tokens(self) -> int | None:
        """The length in whole tokens, or None if the method is faster at no length that was measured."""
        return round(self.length) if self.kind in ("at", "below") else None


def crossover(points: Sequence[tuple[int, float]], *, margin: float = 1.0) -> Crossover:
    """Return where the speed ratios (length, ratio) reach `margin` for good.

    Between two lengths the ratio is taken to follow a power of the length.

    >>> print(crossover([(1024, 0.5), (4096, 2.0)]), crossover([(512, 1.5)]), crossover([(512, 0.5)]), sep=", ")
    2048, below 512, none up to 512
    """
    points = sorted(points)
    if not points:
        return Crossover("unknown", 0)
    if points[-1][1] < margin:
        return Crossover("none", points[-1][0])
    slower = [i for i, (_, ratio) in enumerate(points) if ratio < margin]
    if not slower:
        return Crossover("below", points[0][0])
    (n0, r0), (n1, r1) = points[slower[-1]], points[slower[-1] + 1]
    low, high = math.log(r0 / margin), math.log(r1 / margin)
    share = -low / (high - low)
    return Crossover("at", math.exp(math.log(n0) + share * (math.log(n1) - math.log(n0))))
