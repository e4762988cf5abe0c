"""Wall-clock times with all sides interleaved in one run, so that ratios compare under the same noise.

Ratios do not survive all noise: other programs that come and go disturb one side more than the other. So `undisturbed`
watches what they take, and how steady exact attention is against itself.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")

MARGIN = 1.03  #: a speed ratio below it may be noise
OTHER_WORK = 0.1  #: share of the processors that torch uses which other programs may take while times are measured
SPREAD = 1.25  #: ratio of the quartiles of exact attention's times above which they say nothing
_STAT = Path("/proc/stat")
_TICK = 0.02  # seconds that the system's count may be wrong by
_LEAST = 0.25  # seconds that it takes to see what other programs take


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


def undisturbed(
    measure: Callable[[], T], exact: Callable[[T], Sequence[float]] = lambda found: (), *, tries: int = 2
) -> tuple[T, str]:
    """Return what `measure` returns, and what disturbed it: "" if nothing did. A disturbed measurement is repeated.

    exact: gives the times of exact attention in a result, one for each round, which must be about the same.
    """
    for _ in range(tries):
        before, start = _others(), time.perf_counter()
        found = measure()
        time.sleep(max(_LEAST - (time.perf_counter() - start), 0.0))
        said = _disturbance(before, start, exact(found))
        if not said:
            break
    return found, said


def _disturbance(before: float | None, start: float, exact: Sequence[float]) -> str:
    """Return what disturbed a measurement. before: of `_others` when it started. exact: times that should be equal."""
    others, elapsed = _others(), time.perf_counter() - start
    if others is not None and before is not None:
        ours = torch.get_num_threads()
        spare = max(len(_processors()) - ours, 0)
        share = (max(others - before - _TICK, 0.0) / elapsed - spare) / ours
        if share > OTHER_WORK:
            return f"other programs take {share:.0%} of the processors"
    spread = interval(exact or [1.0])
    if spread.high > SPREAD * spread.low:
        return f"exact attention takes {spread.low:.2g} to {spread.high:.2g} s from one time to the next"
    return ""


def _others() -> float | None:
    """Return the seconds that our processors have worked for other programs since the start; None: it is not known."""
    mine = {f"cpu{number}" for number in _processors()}
    ticks = 0
    try:
        for line in _STAT.read_text(encoding="ascii").splitlines():
            name, *counts = line.split() or [""]
            if name in mine:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time() if ticks else None


def _processors() -> set[int]:
    """Return the processors that this process may use: a container or `taskset` may allow only some."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


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
