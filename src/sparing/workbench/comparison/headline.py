"""Choose the row that a comparison recommends, and say in six words what to do.

Every report takes its answer from here, so that the headline, the summary and the code that turns a method on name the
same row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

from sparing.workbench.comparison.judgement import FASTER, SLOWER, UNKNOWN, UNTIMED, is_faster
from sparing.workbench.timing import MARGIN, Interval


class Judged(Protocol):
    """A row of a comparison, of prompts or of generation."""

    @property
    def method(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def when(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def speed(self) -> Interval | None: ...
    @property
    def disturbed(self) -> str: ...


J = TypeVar("J", bound=Judged)
K = TypeVar("K", bound=Judged)


def fastest(rows: Iterable[J], verdict: str = FASTER) -> J | None:
    """Return the row of this verdict that makes the model fastest; None: there is none.

    Of generation, a row at a longer context comes first. An approximation must be faster than exact attention by more
    than noise, if that is a row of this verdict.
    """
    found = [row for row in rows if row.verdict == verdict]
    best, exact = max(found, key=_rank, default=None), next(filter(is_exact, found), None)
    if best is None or best.speed is None or exact is None or exact.speed is None:
        return best
    return best if best.speed.median > MARGIN * exact.speed.median else exact


def recommended(generation: Iterable[J], rows: Iterable[K]) -> J | K | None:
    """Return what to turn on: for generation if a row there is safe and faster, else for prompts; None: nothing."""
    return fastest(generation) or fastest(rows)


def safe_but_slower(generation: Iterable[J], rows: Iterable[K]) -> J | K | None:
    """Return the fastest of what is safe, where nothing that is safe is faster."""
    return fastest(generation, SLOWER) or fastest([row for row in rows if not is_exact(row)], SLOWER)


def headline(generation: Iterable[Judged], rows: Iterable[Judged], kind: str) -> str:
    """Return what to do, in six words at most."""
    generation, rows = list(generation), list(rows)
    best = recommended(generation, rows)
    if best is not None:
        return f"Turn on {best.method.partition('(')[0]}{_where(best, generation, kind)}: {_times(best.speed)}"
    longest = max((row.context for row in generation), default=0)
    asked = [*(row for row in generation if row.context == longest), *rows]
    if any(row.verdict == UNTIMED for row in asked):
        return "Cannot tell: this machine is busy"
    if any(row.verdict == UNKNOWN and is_faster(row.speed, row.disturbed) for row in asked):
        return "Cannot tell yet"
    return "Keep exact attention"


def doubts(best: J, generation: Iterable[J]) -> list[J]:
    """Return the same method at other contexts where it is not known to be safe, the longest first."""
    same = [row for row in generation if (row.method, row.when) == (best.method, best.when)]
    return sorted((row for row in same if row.verdict not in (FASTER, SLOWER, UNTIMED)), key=lambda row: -row.context)


def _where(best: Judged, generation: Iterable[Judged], kind: str) -> str:
    if kind != "language model":
        return ""
    if best.when == "prefill":
        return " for prompts"
    return f" ({best.context:,} tokens)" if doubts(best, generation) else " for generation"


def _rank(row: Judged) -> tuple[int, float]:
    return row.context, 0.0 if row.speed is None else row.speed.median


def is_exact(row: Judged) -> bool:
    """Return whether a row is sparing's exact attention, which changes a model by rounding alone."""
    return row.method.partition("(")[0] == "exact"


def _times(speed: Interval | None) -> str:
    if speed is None or not math.isfinite(speed.median):
        return "faster"
    return f"{speed.median:.2f}x" if speed.median < 10 else f"{speed.median:.0f}x"
