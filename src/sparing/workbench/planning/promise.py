"""The promise of a plan about unseen documents, and how many documents it takes to show it."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparing.workbench.binomial import rate_of, upper_bound
from sparing.workbench.estimate import student

#: Calibration chooses a recipe that passes the check with this probability. The check alone is the guarantee.
CHANCE = 0.75
_FLOOR = 0.1  # of the tolerance: smaller changes count as this one, since they say nothing about large ones


@dataclass(frozen=True)
class Promise:
    """With this confidence, at least a share `coverage` of documents changes by no more than the tolerance."""

    tolerance: float
    coverage: float = 0.9
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name in ("tolerance", "coverage", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 and below 1: a share")

    def violations(self, changes: Sequence[float]) -> int:
        """Return the number of documents that change by more than the tolerance, or by NaN."""
        return sum(not abs(change) <= self.tolerance for change in changes)

    def most(self, changes: Sequence[float]) -> float:
        """Return the upper bound of the share of documents beyond the tolerance, at the promise's confidence."""
        return upper_bound(self.violations(changes), len(changes), self.confidence)

    def kept(self, changes: Sequence[float]) -> bool:
        """Return whether held-out documents show that the promise is kept."""
        return self.most(changes) <= 1 - self.coverage

    def likely(self, changes: Sequence[float], held_out: int) -> bool:
        """Return whether calibration documents leave enough room for so many held-out ones to show it.

        First, violations are few by the count of conformal prediction: (violations + 1) / (n + 1) is within
        1 - coverage, and there is none where n is too small for that. Second, Student's prediction of the next change,
        from the logarithms, exceeds the tolerance so rarely that the check passes with probability `CHANCE`.
        """
        count = len(changes)
        if not all(map(math.isfinite, changes)):
            return False
        if self.violations(changes) > max(math.floor((count + 1) * (1 - self.coverage)) - 1, 0):
            return False
        logs = [math.log(max(abs(change), _FLOOR * self.tolerance)) for change in changes]
        reach = self._reach(count, held_out) * statistics.stdev(logs)
        return statistics.fmean(logs) + reach <= math.log(self.tolerance)

    @functools.cache  # noqa: B019  (it keeps a few numbers)
    def _reach(self, count: int, held_out: int) -> float:
        """Return how many standard deviations above the mean of `count` documents the tolerance must be."""
        allowed = 0
        while upper_bound(allowed + 1, held_out, self.confidence) <= 1 - self.coverage:
            allowed += 1
        rate = rate_of(allowed, held_out, CHANCE)
        return student(1 - rate, count - 1) * math.sqrt(1 + 1 / count)

    def refuse_few(self, documents: int) -> None:
        """Raise where the documents are too few to show the promise, even if all stay within the tolerance."""
        have = documents - calibrating(documents)
        needed = math.ceil(math.log(1 - self.confidence) / math.log(self.coverage))
        if have >= needed:
            return
        wanted = needed
        while wanted - calibrating(wanted) < needed:
            wanted += needed - (wanted - calibrating(wanted))
        shown = math.floor(1000 * (1 - self.confidence) ** (1 / have)) / 1000 if have > 0 else 0.0
        raise ValueError(
            f"documents: {documents} are too few for coverage={self.coverage} with confidence={self.confidence}: that "
            f"takes {wanted}, {needed} of them held out"
            + (f"; coverage={shown} is the most that these can show" if shown > 0 else "")
        )


def calibrating(documents: int) -> int:
    """Return how many of the documents are used for calibration; the others are held out."""
    return max(round(documents / 3), 2)
