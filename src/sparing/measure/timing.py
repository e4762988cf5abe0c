"""Wall-clock time: candidates interleaved in one run, medians with an interval. Compare ratios, not seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds of one call: the median and the quartiles."""

    median: float
    low: float
    high: float


def interleaved(candidates: Mapping[str, Callable[[], object]], *, rounds: int = 7) -> dict[str, Timing]:
    """Time each candidate once per round, after one warm-up, so that all of them meet the same noise."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    found = {}
    for name, values in seconds.items():
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        found[name] = Timing(statistics.median(values), quartiles[0], quartiles[2])
    return found
