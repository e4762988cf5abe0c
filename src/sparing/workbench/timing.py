"""Wall-clock times with all sides interleaved in one run, so that ratios compare under the same noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

MARGIN = 1.03  #: a speed ratio below it may be noise


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Interval(NamedTuple):
    """A median with its quartiles."""

    median: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Return the median and the quartiles; a single value is all three."""
    if not values:
        raise ValueError("values is empty; pass at least one number")
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Interval(statistics.median(values), low, high)


def race(
    sides: Sequence[Callable[[], object]], rounds: Sequence[int], calls: Sequence[int] | None = None
) -> list[list[float]]:
    """Return the seconds per call of every side, one number for each of its rounds.

    Round i times each side once, in an order that alternates; a side with fewer rounds stays out of the later ones.
    So the times of two sides in the same round were taken next to each other.

    calls: how often a side is called in a round; short calls need several for the resolution of the clock.
    """
    found: list[list[float]] = [[] for _ in sides]
    for number in range(max(rounds, default=0)):
        order = range(len(sides)) if number % 2 else reversed(range(len(sides)))
        for side in order:
            if number >= rounds[side]:
                continue
            count = calls[side] if calls else 1
            start = time.perf_counter()
            for _ in range(count):
                sides[side]()
            found[side].append((time.perf_counter() - start) / count)
    return found


def speed_ratio(baseline: Callable[[], object], candidate: Callable[[], object], *, rounds: int = 9) -> Interval:
    """Return seconds of the baseline / seconds of the candidate, round by round: above 1 the candidate is faster.

    Each round times both once, in alternating order, after one warm-up.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    slow, fast = race((baseline, candidate), (rounds + 1, rounds + 1))
    return interval([a / b for a, b in zip(slow[1:], fast[1:], strict=True)])
