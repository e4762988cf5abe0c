"""Wall-clock time as a ratio: both sides interleaved in one run, so that they meet the same noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Interval(NamedTuple):
    """A median with its quartiles."""

    median: float
    low: float
    high: float


def speed_ratio(baseline: Callable[[], object], candidate: Callable[[], object], *, rounds: int = 9) -> Interval:
    """Seconds of the baseline / seconds of the candidate, round by round: above 1 the candidate is faster.

    Each round times both once, in alternating order, after one warm-up.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    sides = (baseline, candidate)
    ratios = []
    for round_number in range(rounds + 1):
        seconds = [0.0, 0.0]
        for side in (0, 1) if round_number % 2 else (1, 0):
            start = time.perf_counter()
            sides[side]()
            seconds[side] = time.perf_counter() - start
        if round_number:
            ratios.append(seconds[0] / seconds[1])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
    return Interval(statistics.median(ratios), low, high)
